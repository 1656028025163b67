"""Deadlines of steps: who is late, when it is said, and what nobody mistakes for it."""

import gc
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
import weakref

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benches.chaos.planted import ChaosOrder, give, plant, taken
from decentjax import distributed
from decentjax.distributed import watch
from decentjax.distributed.deadline import (
    ENDED,
    PhaseReport,
    check_deadline,
    code_of_main,
    late_processes,
    limit_of,
    names,
    sentence,
)
from decentjax.distributed.watch import StepWatch
from decentjax.process import phases
from tests.jobs import LONG, ended, launch, of_run, read_until, started
from train.job.distributed import MetricMeans

INF = math.inf


def test_a_limit_is_as_given_and_ten_times_as_long_for_what_is_long():
    assert limit_of("reading", 20, median=1.0) == 20
    for phase in ("compiling", "saving", "evaluating", "starting", "between steps"):
        assert limit_of(phase, 20, median=1.0) == 200
    assert limit_of("reading", 20, median=None) == 200  # The first step compiles.
    assert limit_of("reading", None, median=1.0) == 300
    assert limit_of("reading", None, median=20.0) == 600
    assert limit_of("compiling", None, median=20.0) == 6000
    assert limit_of(phases.WAITING, 20, median=1.0) == INF
    assert limit_of("reading", INF, median=1.0) == INF


@pytest.mark.parametrize("seconds", [None, 1, 2.5, INF])
def test_a_deadline_is_a_second_or_more(seconds):
    check_deadline("x", seconds)


@pytest.mark.parametrize("seconds", [0, -1, 0.9, math.nan, "5", True, [5], 10**9])
def test_other_deadlines_get_a_sentence(seconds):
    with pytest.raises(ValueError, match="x must be a Python number of 1 to 1e"):
        check_deadline("x", seconds)


def report(phase="computing", turn=5, seconds=9.0, limit=5.0, own=False):
    return PhaseReport(1, phase, turn - 1, turn, seconds, limit, "", own)


@pytest.mark.parametrize(
    ("reports", "late"),
    [
        # The one that reads, and not those that wait for it.
        ([report(), report("reading"), report()], [1]),
        ([report("exchanging"), report("computing"), report("exchanging")], [1]),
        # A step behind, whatever the others do.
        ([report("reading"), report("saving", turn=4), report("placing")], [1]),
        # Saving comes after computing: it has not held anybody up yet.
        ([report("saving", seconds=1.0), report(), report()], [1, 2]),
        # All compute: the one that is in code of its own.
        ([report(), report(own=True), report()], [1]),
        ([report(), report()], [0, 1]),
        # One that has ended, and that others wait for.
        ([report(turn=6), report(ENDED, turn=5)], [1]),
        ([report("evaluating"), report(ENDED)], [0]),
        # The late one may take longer: all wait.
        ([report(), report("compiling", limit=50.0)], []),
        ([report(), report("saving", turn=4, limit=50.0)], []),
        ([report(), report("computing", seconds=1.0, own=True)], []),
        # No process has named a phase yet, or only the one that waits has.
        ([report("starting", turn=0)] * 2, []),
        ([report("starting", turn=0), report("computing", turn=1)], [0]),
    ],
)
def test_the_one_that_is_furthest_behind_is_late(reports, late):
    assert late_processes(dict(enumerate(reports))) == late


def test_one_that_gives_no_sign_is_late_whatever_the_others_say():
    reports = {0: report(), 1: report("reading", turn=2), 2: report()}
    assert late_processes(reports, {2}) == [2]
    assert "process 2 gives no sign: it is frozen" in names([2], reports, {2})
    assert "last seen computing, step 4" in names([2], reports, {2})
    assert names([7], reports, {7}).endswith("last seen starting")  # Never heard of.


reports_of = st.lists(
    st.builds(
        report,
        phase=st.sampled_from(["reading", "computing", "exchanging", "saving", ENDED]),
        turn=st.integers(1, 4),
        seconds=st.floats(0, 10),
        own=st.booleans(),
    ),
    min_size=1,
    max_size=7,
)


@given(reports_of)
def test_who_is_late_is_over_its_time_and_nobody_is_behind_it(reports):
    late = late_processes(dict(enumerate(reports)))
    for i in late:
        assert reports[i].seconds >= reports[i].limit
        assert all(reports[i].turn <= one.turn for one in reports)
    last = min(one.turn for one in reports)
    if all(one.seconds >= one.limit for one in reports if one.turn == last):
        assert late


def test_a_line_names_three_of_many_and_says_what_to_do():
    reports = {i: report("reading")._replace(at="data.py:3 read") for i in range(9)}
    line = sentence(list(range(9)), reports)
    assert line.startswith(
        "process 0 is late: reading, step 4, for 9.0 s of at most 5 s, at data.py:3 "
        "read; process 1 is late"
    )
    assert line.endswith(
        "and 6 more; if that may take so long, set a longer step_deadline"
    )
    between = {0: report(phases.BETWEEN), 1: report(ENDED)}
    assert "process 0 is late: between steps 4 and 5, for" in names([0], between)
    assert sentence([1], between) == "process 1 has ended after step 4"


def test_a_phase_of_ones_own_ends_where_it_began():
    phases.note("computing", 7)
    turn = phases.now().turn
    with distributed.phase("reading", step=8):
        assert phases.now()[:2] == ("reading", 8)
        assert phases.now().turn == turn + 1
        with distributed.phase("decoding"):
            assert phases.now()[:2] == ("decoding", 8)
        assert phases.now()[:2] == ("reading", 8)
    assert phases.now()[:2] == ("computing", 7)
    phases.note("computing", 8)
    assert phases.now().turn == turn + 1
    phases.note("computing", 0)  # A second run of this process is later.
    assert phases.now().turn == turn + 2


def test_a_phase_after_a_step_is_not_ahead_of_it():
    phases.note("exchanging", 7007)
    turn = phases.now().turn
    with distributed.phase("evaluating", 7008):
        assert phases.now()[1::2] == (7008, turn)
    phases.note("reading", 7008)
    assert phases.now().turn == turn + 1


def test_a_phase_that_is_entered_again_in_its_step_continues_its_time():
    phases.note("reading", 7100)
    first = phases.now().since
    with distributed.phase("placing", step=7100):
        pass
    assert phases.now().since == first  # Also around another.
    phases.note("reading", 7100)
    assert phases.now().since == first
    phases.note(phases.BETWEEN)
    phases.note("reading", 7100)  # The same step is taken again.
    assert phases.now().since > first
    phases.note("evaluating", 7100)
    first = phases.now().since
    phases.note("evaluating")  # The next batch.
    assert phases.now().since > first
    phases.note(phases.COMPILING)
    first = phases.now().since
    phases.note("evaluating")
    phases.note(phases.COMPILING)
    assert phases.now().since == first
    phases.note("reading", 7101)
    phases.note(phases.COMPILING)
    assert phases.now().since > first


def test_a_compilation_is_a_phase_within_the_one_around_it():
    watch._note_compiling()
    phases.note("reading", 8000)
    turn, seen = phases.now().turn, []
    with distributed.phase("reading", 8001):
        jax.monitoring.register_event_duration_secs_listener(
            lambda *_, **__: seen.append(phases.now().phase)
        )
        jax.jit(lambda x: x * 8001.0)(1.0)
        assert phases.now()[:2] == ("reading", 8001)
    assert "compiling" in seen
    with distributed.phase("compiling", 8001):
        jax.jit(lambda x: x * 8002.0)(1.0)
        assert phases.now()[:2] == ("compiling", 8001)
    phases.note("computing", 8001)
    assert phases.now().turn == turn + 1


def test_another_thread_has_no_phase():
    before = phases.now()
    thread = threading.Thread(target=phases.note, args=("reading", 9000))
    thread.start()
    thread.join()
    assert phases.now() == before


def test_looking_at_a_stack_keeps_nothing_of_it():
    class Batch:
        pass

    def read():
        batch = Batch()
        code_of_main()
        return weakref.ref(batch)

    gc.disable()
    try:
        assert read()() is None
    finally:
        gc.enable()


def test_the_median_is_of_whole_steps():
    for step in range(1000, 1102):
        phases.note("reading", step)
        phases.note("computing", step)
    assert 0 < phases.median_seconds() < 0.1


def code():
    """What another thread sees of the main thread."""
    found = []
    thread = threading.Thread(target=lambda: found.append(code_of_main()))
    thread.start()
    thread.join()
    return found[0]


def test_code_of_the_main_thread_is_told_from_that_of_the_library():
    where, is_own = code()
    assert is_own
    assert re.match(r"test_watch\.py:\d+ code < test_watch\.py:\d+ test_code", where)


def test_a_function_that_a_compiled_program_calls_back_is_code_of_ones_own():
    def slow(x):
        found.append(code())
        return x

    found = []
    shape = jax.ShapeDtypeStruct((), jnp.float32)
    jax.jit(lambda x: jax.pure_callback(slow, shape, x))(1.0).block_until_ready()
    where, is_own = found[0]
    assert is_own
    assert re.match(r"test_watch\.py:\d+ code < test_watch\.py:\d+ slow", where)


def in_call(call):
    """What another thread sees of the main thread while it waits within a call."""
    found, seen = [], threading.Event()

    def look():
        time.sleep(0.2)
        found.append(code_of_main())
        seen.set()

    threading.Thread(target=look).start()
    call(seen.wait)
    return found[0]


def test_code_of_the_program_waits_and_a_users_of_the_same_name_does_not():
    with MetricMeans() as means:

        def flush(wait):
            means._engine.submit(wait)
            means.flush()

        where, is_own = in_call(flush)
    assert re.match(r"distributed\.py:\d+ flush < test_watch", where)
    assert not is_own
    names = {"__name__": "train.data"}
    exec(compile("def read(wait):\n  wait()", "/home/me/train/data.py", "exec"), names)
    where, is_own = in_call(names["read"])
    assert where.startswith("data.py:2 read")
    assert is_own


def test_a_garbage_collection_is_neither_the_place_nor_a_function_called_back():
    seen, done = [], threading.Event()

    def look():
        while len(seen) < 200:
            seen.append(code_of_main())
            time.sleep(0.001)
        done.set()

    def collect():
        while not done.is_set():
            gc.collect(0)
            time.sleep(0)

    threads = [threading.Thread(target=look), threading.Thread(target=collect)]
    for thread in threads:
        thread.start()
    while not done.is_set():
        gc.collect(0)
    for thread in threads:
        thread.join()
    assert not [where for where, _ in seen if not where.startswith("test_watch.py")]
    assert not [where for where, _ in seen if "collect <" in where]


def watched(deadline, **arguments):
    ends = []
    end = lambda *x: ends.append(x)  # noqa: E731
    return StepWatch(deadline, tick=0.05, end=end, **arguments), ends


def test_a_process_on_its_own_ends_once_its_time_is_over():
    for step in range(2):
        phases.note("reading", step + 5000)
    watch, ends = watched(1.0)
    begin = time.monotonic()
    while not ends and time.monotonic() < begin + 60:
        time.sleep(0.01)
    watch.close()
    assert time.monotonic() - begin >= 0.9
    (line, code, number), *_ = ends
    assert (code, number) == (72, 0)
    assert line.startswith("process 0 is late: reading, step 5001, for 1")


def test_phases_that_go_on_are_not_late():
    watch, ends = watched(1.0)
    begin, step = time.monotonic(), 6000
    while time.monotonic() < begin + 2.5:
        phases.note("reading", step := step + 1)
        time.sleep(0.1)
    watch.close()
    assert not ends


ALWAYS_AGAIN = """
import ctypes
import random
import time

import jax

from decentjax.distributed.watch import watch
from decentjax.process import phases


def hold():
    ctypes.PyDLL(None).sleep(1000)  # With Python's lock.


def compile_again():
    jax.jit(lambda x: x * random.random())(1.0)


def note_again():
    phases.note("reading", 1)


watch(1.0)
phases.note("reading", 0)
phases.note("reading", 1)
while True:
    WHAT()
    time.sleep(0.1)
"""


def always(what):
    script = ALWAYS_AGAIN.replace("WHAT", what)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=100
    )
    return done.returncode, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("what", ["compile_again", "note_again"])
def test_a_step_that_does_the_same_again_and_again_is_late(what):
    code, errors = always(what)
    assert code == 72, errors
    assert re.search(r"process 0 is late: (reading|compiling), step 1, for", errors)


@pytest.mark.slow
def test_a_process_on_its_own_that_holds_pythons_lock_ends_and_shows_where():
    code, errors = always("hold")
    assert code == -signal.SIGALRM, errors
    assert "in hold\n" in errors


BLOCKED = """
import threading, time
from decentjax.distributed.failure import end_process

write = lambda: print("x" * 10**6, flush=True)
threading.Thread(target=write, daemon=True).start()
time.sleep(1)
end_process("late", 72, 0)
"""


@pytest.mark.slow
def test_an_output_that_is_not_read_does_not_hold_the_end_up():
    read, write = os.pipe()
    command = [sys.executable, "-c", BLOCKED]
    with subprocess.Popen(command, stdout=write, stderr=write) as process:
        assert process.wait(LONG) == 72
    os.close(read)
    os.close(write)


# A job of a config, in which a process hangs, or is slow.
def stuck(tmp_path, phase, process, count, how="asleep", deadline=2, *more):
    config = plant("tests/job_line.py", tmp_path / "orders", tmp_path / "config.py")
    give(tmp_path / "orders", process, ChaosOrder(phase, 1000.0, 5, how))
    options = (
        f"--num-steps 400 --workers.num-workers {count} --workers.workers-per-node 1 "
        "--topology.name ring --evaluation.every-steps 10 --checkpoint.every-steps 10 "
        f"--distributed.step-deadline {deadline}"
    )
    run = launch(count, tmp_path / "run", *options.split(), *more, config=str(config))
    with run as job:
        output, _ = job.communicate(timeout=LONG)
    ended = time.time()
    assert job.returncode == 72, output
    assert of_run(tmp_path / "run") == {}
    return output, ended - taken(tmp_path / "orders", process)[0]


CASES = [
    (phase, process, count)
    for phase in (
        *("reading", "placing", "computing", "exchanging"),
        *("compiling", "saving", "evaluating"),
    )
    for process, count in ((1, 2), (0, 3), (3, 4), (2, 5), (0, 6), (4, 7), (7, 8))
]


@pytest.mark.slow
@pytest.mark.draw(64)
@pytest.mark.parametrize(("phase", "process", "count"), CASES)
def test_a_job_with_a_stuck_process_ends_and_names_it(phase, process, count, tmp_path):
    output, seconds = stuck(tmp_path, phase, process, count)
    late = seconds - (20 if phase in ("compiling", "saving", "evaluating") else 2)
    print(f"{phase}, {process} of {count}: ended {late:.1f} s after its deadline")
    step = 9 if phase in ("compiling", "saving", "evaluating") else 5
    line = rf"error: process \d: process {process} is late: {phase}, step {step}, for"
    assert re.search(line, output), output
    assert "planted.py:" in output
    # Another process may end first; all know why.
    assert "lost a peer" not in output
    assert "Traceback" not in output
    assert seconds < 60


@pytest.mark.nightly
@pytest.mark.draw(2)
@pytest.mark.parametrize("process", [0, 1])
def test_a_process_that_holds_pythons_lock_gives_no_sign(process, tmp_path):
    output, _ = stuck(tmp_path, "reading", process, 2, "locked")
    assert f"process {process} gives no sign: it is frozen, out of reach, or" in output


@pytest.mark.nightly
def test_a_compiled_step_that_waits_for_one_names_it(tmp_path):
    output, _ = stuck(tmp_path, "reading", 1, 2, "asleep", 2, "--exchange", "in_step")
    assert "process 1 is late: reading, step 5, for" in output


@pytest.mark.nightly
def test_a_stuck_job_is_started_again_and_ends_well(tmp_path):
    config = plant("tests/job_line.py", tmp_path / "orders", tmp_path / "config.py")
    give(tmp_path / "orders", 1, ChaosOrder("reading", 1000.0, 12))
    options = "--num-steps 30 --checkpoint.every-steps 10 --distributed.step-deadline 3"
    more = (*options.split(), "--max-restarts", "2")
    with launch(2, tmp_path / "run", *more, config=str(config)) as job:
        output = ended(job)
    assert output.count("started again") == 1
    assert "process 1 is late: reading, step 12" in output


@pytest.mark.slow
def test_a_process_0_that_is_frozen_is_named_with_what_it_did(tmp_path):
    options = "--num-steps 100000 --distributed.step-deadline 3"
    with launch(2, tmp_path, *options.split()) as job:
        read_until(job, "step 30/100000")
        os.kill(of_run(tmp_path)[0], signal.SIGSTOP)
        output, _ = job.communicate(timeout=LONG)
    assert job.returncode == 72, output
    # As of its last sign, since when it may have trained on for a second.
    line = r"process 0 gives no sign: it is frozen.*; last seen .*steps? \d+"
    assert re.search(line, output), output


@pytest.mark.slow
def test_process_0_has_a_deadline_after_the_last_step_too(tmp_path):
    options = "--task.score-seconds 1000 --distributed.step-deadline 3"
    with launch(2, tmp_path, *options.split()) as job:
        output, _ = job.communicate(timeout=LONG)
    assert job.returncode == 72, output
    assert "process 0 is late: showing results, step 11, for" in output


STOPPED = """
import time
from decentjax.process import phases
from decentjax.distributed.watch import watch

watch(8.0)
phases.note("reading", 0)
phases.note("reading", 1)  # The first step has longer.
print("reads", flush=True)
for _ in range(30):  # Which a stop does not shorten.
    time.sleep(0.1)
for step in range(60):  # Nor does the alarm end it later.
    phases.note("reading", step)
    time.sleep(0.1)
"""


@pytest.mark.slow
def test_a_process_that_is_stopped_for_a_while_is_not_late():
    command = [sys.executable, "-c", STOPPED]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "reads\n"
        time.sleep(2)
        process.send_signal(signal.SIGSTOP)
        time.sleep(14)
        process.send_signal(signal.SIGCONT)
        assert process.wait(LONG) == 0


@pytest.mark.nightly
def test_what_a_machine_sleeps_is_not_counted(tmp_path):
    """All processes stop for longer than the deadline, and go on."""
    options = "--num-steps 100000 --distributed.step-deadline 3"
    with launch(2, tmp_path, *options.split()) as job:
        read_until(job, "step 6/100000")
        pids = of_run(tmp_path).values()
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for pid in pids:
                os.kill(pid, number)
            time.sleep(8)
        assert job.poll() is None
        job.send_signal(signal.SIGTERM)
        ended(job)


SCRIPT = """
import sys, time
import jax, numpy as np, optax
from decentjax import distributed, gossip, init_state, local_update
from decentjax.placement import local_workers
from decentjax import place, topology

mesh = distributed.initialize(step_deadline=3)
workers, n = local_workers(mesh), mesh.size


def loss_fn(params, model_state, batch, key):
    return ((params - batch) ** 2).mean(), (model_state, {})


optimizer = optax.adam(3e-2)
state = init_state(np.zeros(3, "f"), optimizer, jax.random.key(9), n, workers=workers)
state, batch = place((state, np.ones((len(workers), 3), "f")), mesh)
local = local_update(loss_fn, optimizer)
with gossip.Background(local, topology.ring(n), mesh) as train_step:
    for t in range(40):
        with distributed.phase("reading", t):
            if t == 20 and jax.process_index() == 1:
                HANGS
        state, metrics = train_step(state, batch, t)
    train_step.settle()
if hasattr(jax.distributed, "shutdown"):
    jax.distributed.shutdown()
time.sleep(5)  # Longer than a deadline, once the job has ended.
print("done")
"""


@pytest.mark.slow
@pytest.mark.draw(3)
@pytest.mark.parametrize(
    ("hangs", "code", "line"),
    [
        ("time.sleep(1000)", 72, "process 1 is late: reading, step 20, for"),
        ("sys.exit()", 72, "process 1 has ended after step 19"),
        ("pass", 0, "done"),
    ],
)
def test_a_script_of_ones_own_is_watched_too(hangs, code, line, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.replace("HANGS", hangs))
    launcher = (sys.executable, "-m", "train.launch", "-n", "3", str(script))
    with started(*launcher) as job:
        output, _ = job.communicate(timeout=LONG)
    assert job.returncode == code, output
    assert line in output


WITHOUT_PHASES = """
import time
import jax
from decentjax import AXIS, distributed, over_workers, place

mesh = distributed.initialize(step_deadline=1)
total = jax.jit(over_workers(lambda x: jax.lax.psum(x, AXIS), mesh))
x = place(jax.numpy.ones((1, 3)), mesh)
end = time.monotonic() + 12  # Longer than ten deadlines.
while True:
    x = jax.block_until_ready(total(x)) / mesh.size
    is_over = jax.numpy.full((1,), float(time.monotonic() > end))
    if total(place(is_over, mesh)).addressable_data(0)[0]:
        break
    time.sleep(0.1)
print("done")
"""


@pytest.mark.nightly
def test_a_loop_whose_phases_have_no_names_has_no_deadline(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(WITHOUT_PHASES)
    launcher = (sys.executable, "-m", "train.launch", "-n", "2", str(script))
    with started(*launcher) as job:
        assert "done" in ended(job)
