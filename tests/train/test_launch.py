"""Several processes as one job: real processes, real signals."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.checkout import ROOT
from tests.jobs import RUN_JOB, SAVE, job_of, lives, read_lines, read_pids, wait_until
from tests.timed import TIME, untimed
from train.job.processes import Ended
from train.job.restarts import TRIES
from train.job.signals import REPEAT_SECONDS
from train.launch import (
    CACHE,
    cache_of_programs,
    check_port,
    command_line,
    elastic_arguments,
    environment,
    is_config,
    main,
    read,
    say_how_to_continue,
)
from train.store.folder import lock

SLEEP = "import os, time; print('pid', os.getpid()); time.sleep(300)"
DEAF = """
import os, signal, time

signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("pid", os.getpid())
time.sleep(300)
"""


def run(*codes: str) -> tuple[int, list[str]]:
    """Returns the exit code and the lines of a job."""
    with job_of(*codes) as job:
        out, _ = job.communicate(timeout=100)
    return job.returncode, untimed(out.decode()).split("\n")[:-1]


def test_each_line_is_whole_and_says_whose_it_is():
    code, lines = run(
        "import os\nfor i in range(500): print(os.environ['ME'], 'x' * 500)",
        "import os\nfor i in range(500): print(os.environ['ME'], 'y' * 500)",
    )
    assert code == 0
    assert sorted(lines) == 500 * [f"[0] 0 {'x' * 500}"] + 500 * [f"[1] 1 {'y' * 500}"]


# What jax 0.10.2 and gloo say in a process whose coordinator has been killed, and what
# 0.12 adds.
PAGE = """\
W1124 20:07:00.885848   16976 preemption_sync_manager.cc:147] Failed to retrieve pree
Additional GRPC error information from remote target coordination_service while calli
:UNKNOWN:Error received from peer  {grpc_message:"Socket closed", grpc_status:14}
E1124 20:07:00.885919   16976 coordination_service_agent.cc:289] Polled an error from
F1124 20:07:00.885925   16976 client.h:80] Terminating process because the JAX distri\
buted service detected fatal errors. This most likely indicates that another task died\
; see the other task logs for more details. absl::Status: UNAVAILABLE: Failed to send \
RPC to coordination service. Either the leader task was preempted/died/restarted
*** Check failure stack trace: ***
    @     0x7fac57220634  absl::lts_20260107::log_internal::LogMessage::SendToLog()
:UNAVAILABLE:Stream removed (Socket closed)
=== Source Location Trace: ===
external/xla+/xla/tsl/distributed_runtime/rpc/grpc_util.h:89
. This is only expected if one of the tasks is unhealthy. Check the logs for the actua
=== Source Location Trace: ===
external/xla+/xla/util.h:302

[Gloo] Rank 1 is connected to 1 peer ranks. Expected number of connected peer ranks is
"""


LOST = b"error: process 0: lost a peer: UNAVAILABLE: Failed to send RPC to coordination"
# What a process writes, and the lines that the launcher prints.
WRITTEN = [
    (
        f"print('step 7\\n', flush=True)\nprint({PAGE!r}, end='')\nprint('the end')",
        [b"step 7", b"", LOST + b" service", b"the end"],
    ),
    ("import sys; print('hm', file=sys.stderr)", [b"hm"]),
    ("print('a\\nb', end='')", [b"a", b"b"]),
    *(
        (f"import os; os.write(1, b'{text}')", [b"3%"])
        for text in (r"1%\r2%\r3%\n", r"\r1%\r3%\n", r"1%\r3%\r\n", r"\r3%")
    ),
    ("import time\nfor i in range(5): print(i, end='\\r'); time.sleep(0.05)", [b"4"]),
    (
        "import os; os.write(1, b'config; folder caf\\xe9\\n')",
        [b"config; folder caf\xe9"],
    ),
    ("import os; os.write(1, b'\\xff\\n')", [b"\xff"]),
    ("import sys; print(repr(sys.stdin.read()))", [b"''"]),
]


def test_of_what_processes_write_the_last_state_and_reasons_are_printed():
    with job_of(*(code for code, _ in WRITTEN)) as job:
        out, _ = job.communicate(timeout=100)
    assert job.returncode == 0
    lines = out.split(b"\n")
    for number, (_, wanted) in enumerate(WRITTEN):
        head = b"[%d] " % number
        own = [line.removeprefix(head) for line in lines if line.startswith(head)]
        assert own == wanted


def test_the_first_failure_gives_the_exit_code_and_its_last_step():
    code, lines = run(
        "import time, sys; time.sleep(1.5); sys.exit(4)",
        "import time; print('step 7/20  loss 1.5'); time.sleep(0.3); exit(3)",
        "",
    )
    assert code == 3
    end = "error: process 1 ended first, with exit code 3, after step 7/20"
    assert lines[1:] == [f"{end}; the others were stopped"]


def test_a_killed_process_gives_128_and_the_signal():
    with job_of(SLEEP, SLEEP) as job:
        pids = read_pids(job, 2)
        os.kill(pids[0], signal.SIGKILL)
        out, _ = job.communicate(timeout=100)
    assert job.returncode == 128 + signal.SIGKILL
    end = r"error: process \d ended first, killed by SIGKILL; the oth"
    assert re.search(f"(?m){TIME.pattern}{end}", out.decode())
    assert not any(map(lives, pids))


def test_after_a_failure_the_others_may_end_by_themselves():
    code, lines = run(
        "raise SystemExit(3)", "import time; time.sleep(0.7); print('done')"
    )
    assert code == 3
    assert "[1] done" in lines


def test_after_a_failure_the_others_are_asked_then_killed():
    begin = time.monotonic()
    # It ends at once: of the 0.4 s, a busy machine has taken what a pause left.
    at_once = SAVE.replace("time.sleep(0.3)", "pass")
    code, lines = run("raise SystemExit(3)", at_once, DEAF)
    assert time.monotonic() - begin >= 1.5 + 0.4
    assert code == 3
    assert "[1] saved" in lines


@pytest.mark.slow
@pytest.mark.draw(3)
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_the_launcher_lets_all_save(signum):
    # So long that a busy machine cannot come in between.
    program = f"import train.job.signals as p\np.REPEAT_SECONDS = 60.0\n{RUN_JOB}"
    with job_of(SAVE, SAVE, program=program) as job:
        read_pids(job, 2)
        job.send_signal(signum)
        time.sleep(0.05)
        job.send_signal(signum)  # As a terminal that closes does; the same request.
        out, _ = job.communicate(timeout=100)
    assert job.returncode == 0
    assert sorted(out.splitlines()) == [b"[0] saved", b"[1] saved"]


LATE = SAVE.replace(
    "signal.signal(", 'print("begins")\ntime.sleep(0.5)\nsignal.signal(', 1
).replace('print("pid"', 'signal.pthread_sigmask(signal.SIG_SETMASK, [])\nprint("pid"')


def test_no_signal_comes_before_the_handlers_of_who_takes_them_itself():
    program = RUN_JOB.replace('{"ME": str(i)}', '{"ME": str(i)}, is_ready=False')
    with job_of(LATE, program=program) as job:
        assert read_lines(job, 1) == [b"[0] begins\n"]
        job.send_signal(signal.SIGTERM)
        out, _ = job.communicate(timeout=100)
    assert job.returncode == 0
    assert b"[0] saved" in out


def test_who_has_not_saved_within_the_grace_is_killed():
    program = RUN_JOB.replace("processes).code", "processes, grace=1.5).code")
    with job_of(SAVE, DEAF, program=program) as job:
        pids = read_pids(job, 2)
        job.send_signal(signal.SIGTERM)
        out, _ = job.communicate(timeout=100)
    assert job.returncode == 128 + signal.SIGKILL
    assert b"[0] saved" in out
    assert not any(map(lives, pids))


def test_under_nohup_a_terminal_may_close():
    code = f"import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n{RUN_JOB}"
    with job_of(SAVE, program=code) as job:
        (pid,) = read_pids(job, 1)
        job.send_signal(signal.SIGHUP)
        time.sleep(0.5)
        assert lives(pid)
        job.send_signal(signal.SIGTERM)
        assert job.communicate(timeout=100)[0] == b"[0] saved\n"
    assert job.returncode == 0


# Prints for ever, and says in a file what SIGTERM has met; a second one would end it.
CHATTY = """
import os, signal, sys, time
from pathlib import Path

def save(signum, frame):
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    time.sleep(1)
    Path(os.environ["SAVED"] + os.environ["ME"]).write_text("saved")
    sys.exit()

signal.signal(signal.SIGTERM, save)
print("pid", os.getpid())
while True:
    print("a line", "of a long text" * 1000)
    time.sleep(0.01)
"""


@pytest.mark.parametrize("signum", [None, signal.SIGHUP])
def test_when_nobody_reads_all_save_and_no_word_is_said(signum, tmp_path, monkeypatch):
    """Also where the terminal has gone, which is a signal and a closed output."""
    monkeypatch.setenv("SAVED", str(tmp_path / "saved"))
    with job_of(CHATTY, CHATTY, stderr=subprocess.PIPE) as job:
        assert job.stdout is not None
        assert job.stderr is not None
        ready: set[bytes] = set()
        while len(ready) < 2:
            ready |= {line for line in read_lines(job, 1) if b"pid" in line}
        if signum:
            job.send_signal(signum)
        job.stdout.close()
        assert job.stderr.read() == b""
        # At a signal they may end before they print.
        codes = (128 + signal.SIGPIPE, 0) if signum else (128 + signal.SIGPIPE,)
        assert job.wait(timeout=100) in codes
    assert [path.read_text() for path in tmp_path.iterdir()] == ["saved", "saved"]


def test_who_is_started_while_a_signal_comes_is_told_too():
    program = RUN_JOB.replace(
        "import sys", "import os, signal, sys, train.job.processes"
    )
    # Of peers none is stopped because another has ended.
    program = program.replace("processes).code", "processes, lambda: True).code")
    # Another thread may take a signal that the main one holds.
    program = program.replace(
        "sys.exit(",
        "begin = train.job.processes._Child.__init__\n"
        "def told(*all):\n"
        "    begin(*all)\n"
        "    if all[1].name == '1':\n"
        "        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])\n"
        "        os.kill(os.getpid(), signal.SIGTERM)\n"
        "train.job.processes._Child.__init__ = told\n"
        "sys.exit(",
    )
    with job_of(SLEEP, SLEEP, SLEEP, program=program) as job:
        job.communicate(timeout=100)
    assert job.returncode == 128 + signal.SIGTERM


# A peer that fails four times, and says how many files its launcher has open.
FAILS = """
import os, sys
from pathlib import Path

print("open", len(os.listdir(f"/proc/{os.getppid()}/fd")), flush=True)
starts = Path(os.environ["STARTS"])
starts.open("a").write(".")
sys.exit(70 if len(starts.read_text()) < 5 else 0)
"""


@pytest.mark.slow
def test_a_peer_is_started_again_after_a_pause(tmp_path, monkeypatch):
    monkeypatch.setenv("STARTS", str(tmp_path / "starts"))
    with job_of("print('whole')", FAILS, program=peers(1.0)) as job:
        out, _ = job.communicate(timeout=100)
    assert job.returncode == 0
    lines = untimed(out.decode()).splitlines()
    said = [line for line in lines if line.startswith("warning")]
    ended = "warning: process 1 ended, with exit code 70; started again"
    assert said == [ended, *[f"{ended} in 1 s"] * 3]
    # Nothing of the earlier ones is left in the launcher.
    opened = [int(line.split()[-1]) for line in lines if "open" in line]
    assert len(opened) == 5
    assert max(opened[1:]) <= opened[0]


# Like FAILS, with what else it does in the place of a comment.
LOOPS = """
import os, sys
from pathlib import Path

starts = Path(os.environ["STARTS"])
starts.open("a").write(".")
count = len(starts.read_text())
if count > 20:
    sys.exit(0)
# more
print(f"error: process 1: no room for {count}", flush=True)
print("sys:1: RuntimeWarning: a line more", flush=True)
sys.exit(70)
"""


def peers(pause: float) -> str:
    """A job of peers that are started again for ever, after pauses of at most this."""
    program = RUN_JOB.replace(
        "processes).code", "processes, lambda: True, float('inf')).code"
    ).replace("import sys", "import sys, train.job.restarts")
    longest = f"train.job.restarts.LONGEST_PAUSE = {pause}\nprocesses = ["
    return program.replace("processes = [", longest)


def in_a_loop(tmp_path, monkeypatch, more: str) -> tuple[int, str, int]:
    """Code, output and number of starts of a peer that fails each time."""
    starts = tmp_path / "starts"
    starts.touch()
    monkeypatch.setenv("STARTS", str(starts))
    waits = (
        f"import time\nwhile len(open({str(starts)!r}).read()) < 8:"
        " time.sleep(0.1)\ntime.sleep(0.5); print('whole')"
    )
    with job_of(waits, LOOPS.replace("# more", more), program=peers(0.01)) as job:
        out, _ = job.communicate(timeout=100)
    return job.returncode, untimed(out.decode()), len(starts.read_text())


def test_a_peer_that_fails_each_time_is_given_up(tmp_path, monkeypatch):
    code, output, starts = in_a_loop(
        tmp_path, monkeypatch, "print('[1] step 1/9  a 1')"
    )
    assert (code, starts) == (70, TRIES)
    assert "[0] whole" in output
    assert (
        "error: process 1 has failed 8 times in a row, with exit code 70 and nothing "
        "saved, and is not started again; correct the cause first; it said at last: "
        "no room for 8\n"
    ) in output
    assert "the others continue, and this command restarts it: ME=1 " in output


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        "if count % 5 == 0: sys.exit(71 + count)",
        "run = starts.parent; print(f'8 devices; folder {run}', flush=True)\n"
        "import time; time.sleep(0.2)\n"
        "if count % 5 == 0: (run / 'checkpoints' / str(count)).mkdir(parents=True)",
    ],
)
def test_a_peer_that_fails_in_another_way_or_has_saved_is_started_again(
    more, tmp_path, monkeypatch
):
    code, output, starts = in_a_loop(tmp_path, monkeypatch, more)
    assert (code, starts) == (0, 21)
    assert "is not started again" not in output


def test_who_failed_first_is_named_once_all_peers_have_ended(tmp_path, monkeypatch):
    monkeypatch.setenv("STARTS", str(tmp_path / "starts"))
    with job_of("raise SystemExit(1)", FAILS, program=peers(1.0)) as job:
        out, _ = job.communicate(timeout=100)
    assert job.returncode == 1
    *_, last = lines = untimed(out.decode()).splitlines()
    assert last == "error: process 0 ended first, with exit code 1"
    assert lines.count(last) == 1


def test_a_warning_that_nobody_reads_ends_no_peer(tmp_path, monkeypatch):
    monkeypatch.setenv("SAVED", str(tmp_path / "saved"))
    program = RUN_JOB.replace("processes).code", "processes, lambda: True).code")
    with job_of(CHATTY, "import time; time.sleep(3); 1 / 0", program=program) as job:
        read_pids(job, 1)
        assert job.stdout is not None
        job.stdout.close()  # The standard error is the same pipe.
        # 120 is Python's, whose last flush of the error fails: `command` drops it.
        assert job.wait(timeout=100) in (120, 128 + signal.SIGPIPE)
    assert (tmp_path / "saved0").read_text() == "saved"


def test_a_second_signal_kills_at_once():
    with job_of(DEAF, DEAF) as job:
        pids = read_pids(job, 2)
        job.send_signal(signal.SIGINT)
        time.sleep(1.5 * REPEAT_SECONDS)
        assert all(map(lives, pids))
        job.send_signal(signal.SIGINT)
        job.communicate(timeout=100)
    assert job.returncode == 128 + signal.SIGKILL
    assert not any(map(lives, pids))


def test_a_killed_launcher_leaves_no_child():
    with job_of(DEAF, DEAF) as job:
        pids = read_pids(job, 2)
        # A terminal's Ctrl-C comes to the launcher alone.
        assert {os.getsid(pid) for pid in pids} == set(pids)
        job.kill()
        wait_until(lambda: not any(map(lives, pids)))


def test_a_grandchild_that_holds_the_pipe_is_not_waited_for():
    code = "import subprocess; print(subprocess.Popen(['sleep', '300']).pid)"
    status, lines = run(code)
    os.kill(int(lines[0].split()[-1]), signal.SIGKILL)
    assert status == 0


def test_a_program_that_cannot_be_started_stops_those_that_were():
    code = """
from train.job.processes import Process, run_job
run_job(lambda: [Process("0", ["sleep", "300"], {}), Process("1", ["/no/such"], {})])
"""
    job = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, timeout=100
    )
    assert job.returncode == 1
    assert b"FileNotFoundError" in job.stderr


SUPERVISE = """
import itertools
import sys
from train.job.processes import Process, run_job

count = itertools.count(1)

def job_of():
    env = {"START": str(next(count))}
    return [
        Process(str(i), [sys.executable, "-c", code], env)
        for i, code in enumerate(sys.argv[1:])
    ]

sys.exit(run_job(job_of, lambda: False, 2).code)
"""


def supervised(*codes: str) -> tuple[int, list[str]]:
    with job_of(*codes, program=SUPERVISE) as job:
        out, _ = job.communicate(timeout=100)
    return job.returncode, untimed(out.decode()).splitlines()


def test_a_job_that_lost_a_process_is_started_again_as_a_whole():
    dies = "import os\nif os.environ['START'] < '3': os.kill(os.getpid(), 9)"
    other = "import os; print('start', os.environ['START'])"
    code, lines = supervised(dies, other)
    assert code == 0
    assert sorted(x for x in lines if "] start " in x) == [
        f"[1] start {number}" for number in (1, 2, 3)
    ]
    assert [x for x in lines if x.startswith("warning")] == [
        "warning: the job is started again; restarts left: 1",
        "warning: the job is started again in 1 s; restarts left: 0",
    ]


def test_what_fails_each_time_ends_with_the_first_cause():
    fails = "import os, sys; sys.exit({'1': 70}.get(os.environ['START'], 134))"
    code, lines = supervised(fails)
    assert code == 134
    first = "process 0 ended first, with exit code 70"
    assert lines[-1] == (
        f"error: gave up after 3 failures without a newer checkpoint; first {first}"
    )


# Saves in each life but one step, and then fails.
SAVES = """
import os, time
from pathlib import Path

run, start = Path({run!r}), int(os.environ["START"])
print(f"8 devices; folder {{run}}", flush=True)
print("step 1/9  loss 2", flush=True)
time.sleep(0.5)  # For the launcher to read it.
if start < 6:
    (run / "checkpoints" / str(start)).mkdir(parents=True)
raise SystemExit(70 if start < {starts} else 0)
"""


def test_a_job_that_saves_before_each_failure_is_started_again_at_once(tmp_path):
    """More often than it may fail in vain, and without pauses."""
    code, lines = supervised(SAVES.format(run=str(tmp_path), starts=6))
    assert code == 0
    again = "warning: the job is started again; restarts left: 1"
    assert [x for x in lines if x.startswith("warning")] == [again] * 5


@pytest.mark.slow
def test_a_job_that_no_longer_saves_is_given_up(tmp_path):
    code, lines = supervised(SAVES.format(run=str(tmp_path), starts=99))
    assert code == 70
    assert [x.partition("again")[2] for x in lines if x.startswith("warning")] == [
        *["; restarts left: 1"] * 5,
        " in 1 s; restarts left: 0",
    ]
    first = "process 0 ended first, with exit code 70, after step 1/9"
    assert lines[-1] == (
        f"error: gave up after 3 failures without a newer checkpoint; first {first}"
    )


def test_a_signal_ends_the_pause_before_a_restart():
    fails = "import sys; print('fails', flush=True); sys.exit(70)"
    # Long enough for the signal to come within it on a busy machine.
    with job_of(fails, program=SUPERVISE.replace("2).code", "9).code")) as job:
        while b"in 4 s" not in read_lines(job, 1)[0]:
            pass
        job.send_signal(signal.SIGTERM)
        out, _ = job.communicate(timeout=100)
    assert job.returncode == 0
    assert b"fails" not in out


def test_who_gives_up_says_how_to_go_on(tmp_path, capsys):
    for name in ("500", "1000", "1500.temporary"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    say_how_to_continue(Ended(70, folder=str(tmp_path)), "-n 2")
    assert untimed(capsys.readouterr().err) == (
        f"step 1000 is saved: decentjax launch -n 2 resume {tmp_path} goes on from it\n"
    )
    say_how_to_continue(Ended(1, folder=str(tmp_path)), "-n 2")  # A wrong request.
    say_how_to_continue(Ended(70, signal.SIGTERM, str(tmp_path)), "-n 2")
    assert not capsys.readouterr().err


def test_an_error_that_several_processes_have_is_printed_once():
    fails = "print('error: process {}: too\\nerror: of {} alone'); raise SystemExit(1)"
    _, lines = supervised(*(fails.format(number, number) for number in range(3)))
    own = {f"[{number}] error: of {number} alone" for number in range(3)}
    said = [line for line in lines if line.startswith("[")]
    assert own < {*said}
    assert len(said) == 4
    assert {*said} - own < {f"[{i}] error: process {i}: too" for i in range(3)}


@pytest.mark.parametrize("code", [1, 2, 71, 130, 141])
def test_what_would_end_so_again_is_not_started_again(code):
    ended, lines = supervised(f"raise SystemExit({code})")
    assert ended == code
    assert not [x for x in lines if "restart" in x]


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGUSR1])
def test_who_is_asked_to_end_is_not_started_again(signum):
    with job_of(SAVE.replace("sys.exit()", "sys.exit(70)"), program=SUPERVISE) as job:
        read_pids(job, 1)
        job.send_signal(signum)
        out, _ = job.communicate(timeout=100)
    assert job.returncode == 70
    assert b"[0] saved" in out
    assert b"restart" not in out


def test_each_process_has_the_arguments_of_train_and_its_place():
    arguments = ["train", "configs/a.py", "--num-steps", "6", "--x=-1"]
    assert command_line(arguments, 4, 3, 1234) == [
        *(sys.executable, "-m", "decentjax", "train", "configs/a.py"),
        *("--num-steps", "6", "--x=-1", "--distributed.enabled"),
        *("--distributed.coordinator", "127.0.0.1:1234"),
        *("--distributed.num-processes", "4", "--distributed.process-id", "3"),
    ]


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ("tests/tiny.py --seed 3", "train tests/tiny.py --seed 3"),
        ("quickstart --seed 3", "train quickstart --seed 3"),
        ("train a.py", "train a.py"),
        ("resume runs/a --seed 3", "train --resume runs/a --seed 3"),
        ("advise --steps 3 --measure a.py", "train.advise --steps 3 --measure a.py"),
        ("dbench a.py --lr 1", "train.dbench a.py --lr 1"),
    ],
)
def test_the_processes_run_the_module_asked_for(arguments, wanted, monkeypatch):
    begun = []
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(
        "train.launch.run_job", lambda start, *_: begun.extend(start()) or Ended(0)
    )
    monkeypatch.setattr("train.launch.are_peers", lambda _: False)
    main(["-n", "2", *arguments.split()])
    places = []
    for process in begun:
        command, _, place = " ".join(process.argv).partition(" --distributed.enabled ")
        assert command == f"{sys.executable} -m decentjax {wanted}"
        places.append(place.split()[-1])
    assert places == ["0", "1"]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("from train.config import Config\nconfig = Config(name='a')", True),
        ("config: object = None", True),
        ("try:\n    from other import config\nfinally:\n    pass", True),
        ("", False),
        ("def main():\n    config = 3", False),
        ("def config(): pass", False),
        ("class config: pass", False),
        ("print(config)", False),
        ("[config for config in range(3)]", False),
    ],
)
def test_a_config_is_a_file_that_binds_the_name(text, wanted, tmp_path):
    path = tmp_path / "a.py"
    path.write_text(text)
    assert is_config(str(path)) == wanted
    assert is_config("own.py:mine")
    assert is_config(str(ROOT / "configs" / "digits.py"))


# It says where it is and what it was given; its argument is how it ends.
SCRIPT = """
import json, os, signal, sys, time
import beside

place = {k: v for k, v in os.environ.items() if k.startswith("DECENTJAX_")}
port = place["DECENTJAX_COORDINATOR"].removeprefix("127.0.0.1:")
assert port.isdecimal() and "JAX_LOCAL_DEVICE_IDS" not in os.environ
del place["DECENTJAX_COORDINATOR"], place["DECENTJAX_ASKED"]
print(json.dumps([sorted(place.items()), sys.argv[1:]]))
sys.exit(eval(sys.argv[1]))
"""
# A user who has only the library: the first part of the trainer's extra.
WITHOUT_EXTRAS = """
import runpy, sys
for name in ("flax", "tyro", "cloudpickle", "orbax", "grain", "rich"):
    sys.modules[name] = None
sys.argv = ["-m", "launch", *sys.argv[1:]]
runpy.run_module("decentjax", run_name="__main__")
"""


@pytest.fixture
def script(tmp_path):
    """A script with a module beside it, and a name `config` inside its functions."""
    (tmp_path / "beside.py").touch()
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def launched(*arguments: object) -> tuple[int, list[str]]:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_EXTRAS, *map(str, arguments)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return done.returncode, sorted(untimed(done.stdout).splitlines())


@pytest.mark.parametrize("count", [1, 3])
def test_a_script_runs_as_by_python_and_knows_its_place(count, script):
    """Without the packages of an extra; what follows it is its own."""
    given = ["0", "-n", "9", "--port=1", "--", "--help"]
    code, lines = launched("-n", count, script, *given)
    assert (code, len(lines)) == (0, count + (count > 1))
    if count > 1:  # It reads the variables, and does not ask the library.
        assert lines.pop() == (
            "warning: no process has called decentjax.distributed.initialize(): each "
            f"of the {count} has run {script} alone"
        )
    for number, line in enumerate(lines):
        place, arguments = json.loads(line.removeprefix(f"[{number}] "))
        assert dict(place) == {
            "DECENTJAX_NUM_PROCESSES": str(count),
            "DECENTJAX_PROCESS_ID": str(number),
            "DECENTJAX_LOCAL_ID": str(number),
        }
        assert arguments == given


def test_a_script_that_binds_config_is_one_where_it_is_said(tmp_path):
    path = str(tmp_path / "script.py")
    Path(path).write_text("config = 3\nprint('it ran')")
    assert launched("-n", 1, "--script", path) == (0, ["[0] it ran"])
    assert read(["-n", "1", path, "--a"])[1] == ["train", path, "--a"]


def test_the_first_failing_process_of_a_script_gives_the_code(script):
    fails = "time.sleep(300 if os.environ['DECENTJAX_PROCESS_ID'] == '0' else 0) or 5"
    code, lines = launched("-n", 2, script, fails)
    assert code == 5
    assert lines[-1].startswith("error: process 1 ended first, with exit code 5; the o")


@pytest.mark.slow
def test_a_lost_process_of_a_script_starts_the_whole_job_again(script, tmp_path):
    mark = tmp_path / "mark"
    dies = (
        f"(open({str(mark)!r}, 'x'), os.kill(os.getpid(), 9)) "
        f"if os.environ['DECENTJAX_PROCESS_ID'] == '0' and not os.path.exists("
        f"{str(mark)!r}) else time.sleep(3)"
    )
    code, lines = launched("-n", 2, "--max-restarts", 1, script, dies)
    assert code == 0
    assert any("the job is started again" in line for line in lines)
    assert [line[:3] for line in lines if "NUM_PROC" in line].count("[1]") == 2


PEER = """
import os, sys, time
from pathlib import Path
from decentjax import distributed

_ = sys.argv[2:] and distributed.initialize()
workers, n, mesh = distributed.initialize_peer()
own, folder = str(workers[0]), Path(sys.argv[1])
with (folder / own).open("a") as file:
    file.write(".")
print(f"worker {own} of {n}")
if own == "3" and (folder / own).read_text() == ".":
    os.kill(os.getpid(), 9)
while (folder / "3").read_text() != "..":
    time.sleep(0.1)
"""


def test_a_lost_peer_of_a_script_is_started_again_alone(tmp_path, monkeypatch):
    """The second of two machines: its processes have the numbers 2 and 3 of five."""
    script = tmp_path / "peers.py"
    script.write_text(PEER)
    (tmp_path / "3").touch()
    monkeypatch.setenv("MACHINE", "1")
    options = ("--elastic", "--first-process", "MACHINE", "--places", 5)
    code, lines = launched("-n", 2, *options, script, tmp_path)
    assert code == 0
    assert [line for line in lines if "worker" in line or "warning:" in line] == [
        "[2] worker 2 of 5",
        *["[3] worker 3 of 5"] * 2,
        "warning: process 3 ended, killed by SIGKILL; started again",
    ]
    code, lines = launched("-n", 1, "--elastic", script, tmp_path, "job")
    assert code == 1
    assert any("peers, which are no job: call initialize_peer()" in x for x in lines)


def test_an_elastic_run_keeps_the_quorum_of_its_file(tmp_path):
    path = tmp_path / "own.py"
    path.write_text(
        "import dataclasses\nfrom configs.quickstart import config\n"
        "from train.config import QuorumExchange, RoundsMethod, TopologyConfig\n"
        "config = dataclasses.replace(config, method=RoundsMethod(),\n"
        "    topology=TopologyConfig(name='complete'), exchange=QuorumExchange())\n"
    )
    own = [str(path), "--seed", "1"]
    assert elastic_arguments(own) == own
    added = ["--exchange", "peers", "--exchange.elastic"]
    assert elastic_arguments(["quickstart"]) == ["quickstart", *added]


def test_two_processes_of_one_number_are_named(tmp_path, capsys):
    arguments = "--elastic --first-process 1 --places 5 tests/line.py --run-dir"
    with lock(tmp_path / "process-2"), pytest.raises(SystemExit) as ended:
        main(["-n", "2", *arguments.split(), str(tmp_path)])
    assert f"{tmp_path}/process-2 is in use by process {os.getpid()} on" in (
        said := f"{capsys.readouterr().err}{ended.value.code}"
    )
    assert "two processes have the number 2: give each machine numbers of its" in said


def test_a_signal_reaches_all_processes_of_a_script(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SAVE)
    with job_of("-n", "2", str(path), program=WITHOUT_EXTRAS) as job:
        read_pids(job, 2)
        job.send_signal(signal.SIGINT)
        out, _ = job.communicate(timeout=100)
    assert job.returncode == 0
    lines = untimed(out.decode()).splitlines()
    assert sorted(lines)[:2] == ["[0] saved", "[1] saved"]


def test_whether_they_are_peers_is_asked_before_one_fails(monkeypatch):
    """The answer takes seconds, in which those who do not notice would live on."""
    asked = threading.Event()
    monkeypatch.setattr("train.launch.are_peers", lambda _: asked.set())
    monkeypatch.setattr(
        "train.launch.run_job", lambda *_: Ended(int(not asked.wait(60)))
    )
    assert main(["--processes", "2", str(ROOT / "tests" / "line.py")]) == 0


def test_each_process_has_its_share_of_cores_and_a_gpu(monkeypatch):
    monkeypatch.setattr("train.launch.allowed_cores", lambda: 8)
    shares = [environment(4, i, {}) for i in range(4)]
    wanted = [{"NPROC": "3", "JAX_LOCAL_DEVICE_IDS": i} for i in "0123"]
    assert shares == wanted
    assert "JAX_LOCAL_DEVICE_IDS" not in environment(1, 0, {})
    given = {"NPROC": "7", "JAX_LOCAL_DEVICE_IDS": "2,3", "HOME": "/root"}
    assert environment(2, 1, given) == {"NPROC": "7", "JAX_LOCAL_DEVICE_IDS": "2,3"}


@pytest.mark.parametrize("target", ["quickstart", "script.py"])
def test_wrong_numbers_of_threads_start_nothing(target, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NPROC", "auto")
    Path("script.py").write_text("raise SystemExit('started')")
    with pytest.raises(SystemExit, match="NPROC must be a number of threads"):
        main(["-n", "2", target])
    assert "started" not in capfd.readouterr().err


@pytest.mark.slow
def test_who_is_started_again_finds_what_was_compiled():
    """In a folder that ends with the launcher, or in the one that the user has set."""
    code = "import jax; jax.jit(lambda x: x + 1)(1)"
    with cache_of_programs(restarts=True, given={}) as compiled:
        plain = {k: v for k, v in os.environ.items() if "CACHE" not in k}
        command, env = [sys.executable, "-c", code], plain | compiled
        subprocess.run(command, env=env, check=True)
        entries = list(Path(compiled[CACHE]).iterdir())
        assert entries
        for path in entries:  # As when another process is still writing.
            path.write_bytes(path.read_bytes()[:-20])
        again = subprocess.run(command, env=env, capture_output=True, text=True)
        assert again.returncode == 0
        assert "compilation cache" not in again.stderr
    assert not Path(compiled[CACHE]).exists()
    for restarts, given in ((False, {}), (True, {CACHE: "own"})):
        with cache_of_programs(restarts, given) as compiled:
            assert compiled == {}


def test_a_port_where_an_earlier_job_listened_is_free_again():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)):
            server.accept()[0].close()  # The side that closes first waits a minute.
    assert check_port(port) == port
    assert 1024 <= check_port(0) < 2**16


@pytest.mark.parametrize("address", ["127.0.0.1", ""])
def test_a_port_in_use_is_refused_even_where_its_owner_would_share_it(address):
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        server.bind((address, 0))
        server.listen()
        port = server.getsockname()[1]
        with pytest.raises(ValueError, match=f"port {port} is unavailable: Address al"):
            check_port(port)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("", "usage: decentjax launch -n N"),
        ("--processes 2 --num-steps 6", "usage: decentjax launch -n N"),
        ("-n 2 dbench", "usage: decentjax launch -n N"),
        ("-n 2 advise a.py", "advise takes --measure CONFIG"),
        ("-n 2 --resume runs/a", "--resume is unknown before runs/a"),
        ("-n 2 a.py", "error: there is no config or script a.py"),
        ("-n 2 docs/api/index.md", "error: docs/api/index.md is not Python: "),
        ("-n 2 --first-process 0 --places 2 tests/saving.py", "peers: add --elastic"),
        ("-n 2 --first-process 0 --places 2 tests/line.py", "is for peers: add --elas"),
        ("-n 2 --elastic --first-process 2 tests/line.py", "takes --places N, the nu"),
        (
            "-n 2 --elastic --first-process 2 --places 3 tests/line.py",
            "places must be at least 4, the number of processes up to the last one he",
        ),
        (
            "-n 2 --elastic --first-process NODE --places 4 tests/line.py",
            "must be a number from 0, or a variable that has one; NODE is not set",
        ),
        (
            "-n 2 --elastic tests/tiny.py --exchange background",
            "--elastic starts peers, got --exchange background: leave out one",
        ),
        ("-n 2 --places 1 quickstart", "places must be at least 2, the number of pro"),
        ("-n 2 --places 3 tests/line.py", "for processes that join later: add --elast"),
        ("--processes 0 quickstart", "error: processes must be at least 1, got 0"),
        ("--workers 0 quickstart", "error: workers must be at least 1, got 0"),
        ("--workers 1 --processes-per-worker 0 a", "per_worker must be at least 1, go"),
        ("-n 4 --workers 2 quickstart", "of workers, --workers N, and not both"),
        ("-n 4 quickstart --workers 2", "of workers, --workers N, and not both"),
        (
            "-n 3 --processes-per-worker 2 quickstart",
            "processes must be a multiple of --processes-per-worker 2, as each worker",
        ),
        (
            "-n 2 --processes-per-worker 2 --first-process 1 --places 4 --elastic a",
            "first_process must be a multiple of --processes-per-worker 2, as each wor",
        ),
        (
            "--workers 1 --processes-per-worker 2 --places 3 --elastic a",
            "places must be a multiple of --processes-per-worker 2, as each worker has",
        ),
        ("--workers 2 dbench a.py", "are for runs and scripts, and train.dbench sets"),
        (
            "-n 2 --processes-per-worker 2 advise --measure a.py",
            "are for runs and scripts, and train.advise sets its workers itself: give",
        ),
        ("--processes 2 --port 65536 quickstart", "error: port must be from 0 to"),
        ("--processes 2 --port -1 quickstart", "error: port must be from 0"),
        ("--processes 2 --grace 0 quickstart", "grace must be positive, got 0"),
        ("--processes 2 --max-restarts -1 quickstart", "max_restarts must be at least"),
        (
            "--processes 2 --max-restarts 1 dbench a.py",
            "--max-restarts is for runs with checkpoints, and train.dbench has none",
        ),
        (
            "--processes 2 --max-restarts 1 resume runs/a --step 5",
            "--step would go back again at each restart",
        ),
        ("quickstart", "--processes"),
    ],
)
def test_bad_input_gets_a_sentence_at_once(arguments, sentence, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("train.launch.run_job", lambda start, *_: start())
    with pytest.raises(SystemExit) as ended:
        main(arguments.split())
    assert sentence in f"{capsys.readouterr().err}{ended.value.code}"
