"""Faults on purpose: what the program finds, and that it notices a broken promise."""

import json
import math
import os
import re
import sys
import textwrap
from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

pytest.importorskip("pyroute2", reason="needs the extra: pip install -e '.[emulate]'")

from benches.chaos import jobs, members
from benches.chaos.__main__ import Row, main, separated
from benches.chaos.faults import Bench
from benches.chaos.jobs import BrokenError, JobUnderTest, arrays, ends_in, saved
from benches.chaos.planted import sketch, whole
from decentjax import worker_mesh
from tests import line
from tests.changes import changed
from tests.checkout import ROOT
from tests.jobs import LONG, started
from tests.machines import needs_root
from train.figures.members_figure import lives, spans
from train.report import write_report
from train.run.history import History
from train.run.loop import train
from train.store.checkpoints import find_checkpoints
from train.store.log import METRICS


def run_python(code, tmp_path):
    log = tmp_path / f"{len(code)}.txt"
    return JobUnderTest([sys.executable, "-c", code], tmp_path, log)


def test_a_job_that_hangs_or_ends_otherwise_is_noticed(tmp_path):
    with run_python("import time; time.sleep(1000)", tmp_path) as job:
        broken = pytest.raises(BrokenError, match="did not end within 0 s")
        with broken:
            job.end(0, seconds=0.4)
    assert job.popen.poll() is not None  # Nothing is left of it.
    with run_python("print('error: why'); print('more'); exit(3)", tmp_path) as job:
        broken = pytest.raises(BrokenError, match="code 3, not with 0: error: why")
        with broken:
            job.end(0)
        assert job.end(3) == job.end(1, 3) == "error: why\nmore\n"
    launched = "print('[0] error: why\\nerror: process 0 ended first, so'); exit(1)"
    broken = pytest.raises(BrokenError, match=r"not with 0: \[0\] error: why")
    with run_python(launched, tmp_path) as job, broken:
        job.end(0)
    with run_python("", tmp_path) as job:
        with pytest.raises(BrokenError, match="code 0, not with 1 or 2: it said"):
            job.end(1, 2)
        with pytest.raises(BrokenError, match="ended and did not come to step 1: it"):
            job.reach(1)
        with pytest.raises(BrokenError, match="ended and did not say 'a word': it"):
            job.says("a word")


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    train(changed(line.config, num_steps=2), folder)
    return folder


def test_what_is_saved_is_told_apart_by_each_array(run_dir, monkeypatch):
    """Models, moments and random keys, whatever their files look like."""
    step, digest = saved(run_dir)
    assert step == 2
    found = arrays(find_checkpoints(run_dir).steps[2])
    assert {"params", "opt_state", "key"} <= {name.split("'")[1] for name in found}
    for name, x in found.items():
        if x.size:
            other = x.copy()
            other.flat[0] += 1
            spoilt = {**found, name: other}
            monkeypatch.setattr(jobs, "arrays", lambda _, spoilt=spoilt: spoilt)
            assert saved(run_dir)[1] != digest, name
    monkeypatch.setattr(jobs, "arrays", lambda _: found)
    assert saved(run_dir) == (2, digest)


def test_other_numbers_are_a_broken_promise(run_dir, tmp_path):
    bench = Bench(["tiny.py"], 2, 2, tmp_path, None, saved(run_dir))
    bench.check_saved(run_dir)
    with pytest.raises(BrokenError, match="other numbers"):
        bench._replace(wanted=(2, "another")).check_saved(run_dir)
    with pytest.raises(BrokenError, match="nothing is saved"):
        bench.check_saved(tmp_path)


CHAOS = (sys.executable, "-m", "benches.chaos")
OPTIONS = ["--processes", "2", "--steps", "12", "--task.step-seconds", "0.1"]


@pytest.mark.slow
@needs_root
def test_a_job_that_cannot_start_is_a_sentence(tmp_path):
    options = ("--out", str(tmp_path / "chaos"), "--workers.num-workers", "5")
    with started(*CHAOS, "tests/line.py", *options) as chaos:
        output, _ = chaos.communicate(timeout=LONG)
    assert chaos.returncode == 1
    (said,) = [line for line in output.splitlines() if line.startswith("error: ")]
    assert "the job fails without any fault" in said
    assert "5 workers cannot be dealt out evenly to 4 processes" in said
    assert "Traceback" not in output


@pytest.mark.nightly
@needs_root
def test_faults_are_injected_and_their_promises_are_kept(tmp_path):
    """One of each that ends a job, then an elastic run whose workers are killed."""
    out = tmp_path / "chaos"
    faults = ["kill", "partition", "full-disk"]
    own = ("--faults", *faults, "--minutes", "1.2", "--out", str(out))
    with started(*CHAOS, "tests/line.py", *OPTIONS, *own) as job:
        output, _ = job.communicate(timeout=5 * LONG)
    assert job.returncode == 0, output
    rows = json.loads((out / "chaos.json").read_text())["rows"]
    names = {row["fault"] for row in rows}
    assert "kill, elastic" in names
    assert names & {*faults}  # As many as there was time for.
    assert all(row["injected"] > 0 == len(row["broken"]) for row in rows)
    table = (out / "chaos.md").read_text().splitlines()
    assert table[0] == "| fault | promise | at most | measured | injected | kept |"
    assert b"<svg" in (out / "chaos.svg").read_bytes()
    page = write_report([out / "elastic"], tmp_path / "report.html").read_text()
    assert "<h2>Who trained when</h2>" in page
    assert "from its own" in page


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--faults", "--minutes", "1"], "--faults must be at least one, got none"),
        (["--faults", "kil"], "--faults must be one of 'kill', .* mean 'kill'"),
        (["--minutes", "0"], "--minutes must be at least 0.01, got 0"),
        (["--processes", "1"], "--processes must be at least 2, got 1"),
        (["--steps", "5"], "--steps must be at least 6, got 5"),
        (["--processes-per-worker", "3"], "--processes must be at least 6, got 4"),
        (["--elastic-share", "2"], r"--elastic-share must be in \[0, 1\], got 2"),
        (["--out", "."], r"\. already exists: choose another folder"),
        (["--help"], "example: `python -m benches.chaos quickstart --faults kill"),
    ],
)
def test_wrong_options_are_refused_and_help_has_an_example(options, words, capsys):
    with pytest.raises(SystemExit) as error:
        main(["tests/line.py", *options])
    said = "".join([str(error.value), *capsys.readouterr()]).replace("│", " ")
    assert re.search(words, " ".join(said.split()), re.IGNORECASE)


def life(began, *rows):
    return [{"seconds": 0.0, "step": 0, "began": began}, *rows]


def row(seconds, loss=1.0):
    return {"seconds": seconds, "step": int(seconds), "loss": loss}


def test_a_process_trained_from_its_start_to_its_end_but_for_gaps():
    # Killed at 3, started again 97 s later, and frozen from 8 to 20.
    first = life(100.0, row(1), row(2), row(3))
    second = [{**x, "seconds": 3 + x["seconds"]} for x in life(0, row(1), row(2))]
    second[0]["began"] = 200.0
    second += [row(20.0), row(21.0)]
    history = History(ROOT / "process-0", {}, [*first, *second], [])
    one, two = lives(history)
    assert spans(one) == [(101.0, 103.0)]
    assert spans(two) == [(201.0, 202.0), (217.0, 218.0)]
    figure = members.draw_hits([history], [hit()])
    assert [text.get_text() for text in figure.axes[0].texts] == ["kill"]


def test_faults_may_be_separated_by_commas():
    words = ["--faults", "kill,full-disk", "nan", "--name", "kill,a"]
    assert separated(words) == ["--faults", "kill", "full-disk", *words[2:]]


# Only in the program: the chaos that looks on has none.
BUGGY = """
import sys

is_chaos = "benches.chaos" in sys.orig_argv
"""
KEEPS_ITS_OWN = """
from train.run.peer_run import Joiner
taken = Joiner._taken
def keeps(self, begin, *args):
    return taken(self, begin, *args)._replace(state=begin.state)
Joiner._taken = keeps
"""
DROPS_MOMENTS = """
import jax
from train.run.peer_run import Joiner
taken = Joiner._taken
def drops(self, begin, state, *args):
    zeros = jax.tree.map(lambda x: 0 * x, state.opt_state)
    return taken(self, begin, state._replace(opt_state=zeros), *args)
Joiner._taken = drops
"""
WATCH = """
import decentjax.distributed.watch as watch
limit_of = watch.limit_of
"""
NAMES_NONE = f'{WATCH}watch.sentence = lambda *args: "somebody is late"'


def limit(value: str) -> str:
    """Code that gives a step another limit of time."""
    return f"{WATCH}watch.limit_of = lambda *args: {value}"


# A bug for each promise, planted in all processes, launchers too, and the fault that
# shows it: the time that it takes, what it says, and what it saves.
PROMISES = [
    (
        "kill",
        """
        import decentjax.distributed.failure as failure, time
        import train.job.processes as processes
        processes.GRACE_SECONDS = 20.0
        failure.os = type("os", (), {"_exit": lambda code: time.sleep(100)})
        failure.os.EX_SOFTWARE = 70
        """,
        "at most 5",
    ),
    (
        "kill",
        """
        from train.data.batches import Feed
        set_step = Feed.set_step
        Feed.set_step = lambda self, step: set_step(self, max(0, step - 1))
        """,
        "other numbers",
    ),
    ("freeze", limit("10 * limit_of(*args)"), "at most 7"),
    ("freeze", NAMES_NONE, "did not say 'gives no sign'"),
    (
        "stall",
        """
        import decentjax.distributed.watch as watch
        limit_of = watch.limit_of
        def hasty(phase, deadline, median):
            return 0.8 if deadline else limit_of(phase, deadline, median)
        watch.limit_of, watch.SILENT_TICKS = hasty, 1
        """,
        "code|restarts, at most 0|did not come to",
    ),
    ("freeze", f"{WATCH}watch.LATE = 70", "with exit code 70, not with exit code 72"),
    ("stuck", limit("8 + limit_of(*args)"), "at most 7"),
    ("stuck", f"{WATCH}watch.LATE = 70", "with exit code 70, not with exit code 72"),
    ("slow", f"{WATCH}watch.NAMED_AT = 1000.0", "did not say 'others wait"),
    ("partition", limit("20 + limit_of(*args)"), "at most 10"),
    (
        "corrupt",
        """
        import train.store.checkpoints as checkpoints
        checkpoints.check_files = lambda *args, **kwargs: None
        """,
        "other numbers|did not say|not named|shows a traceback|code",
    ),
    (
        "full-disk",
        """
        import contextlib
        from train.store.checkpoint_writer import Checkpoints
        Checkpoints._explained = lambda self: contextlib.suppress(Exception)
        """,
        "not with 70|did not say|did not end within",
    ),
    (
        "sigterm",
        """
        from train.run.stop import Stop
        import time
        poll = Stop.poll
        Stop.poll = lambda self: poll(self) and not time.sleep(21)
        """,
        "at most 20",
    ),
    (
        "nan",
        """
        import train.run.loop as loop, train.run.start_run as start_run
        loop.check_gradients = lambda *args: None
        start_run.build_check = lambda *args: lambda *args: None
        """,
        "code 0, not with 71",
    ),
    ("kill, elastic", KEEPS_ITS_OWN, "another model"),
    ("freeze, elastic", KEEPS_ITS_OWN, "another model"),
    (
        "freeze, elastic|elastic run",
        """
        from decentjax import links
        begin = links.Links.__init__
        def deaf(self, *args, **kwargs):
            begin(self, *args, **kwargs)
            self._silent_seconds = 100.0
        links.Links.__init__ = deaf
        """,
        "others took|never came back|another model",
    ),
    ("kill, elastic", DROPS_MOMENTS, "x a peer's moments"),
    ("stuck, elastic", NAMES_NONE, "it was not named"),
    ("stuck, elastic", f"{WATCH}watch.LATE = 70", "with exit code 70, not with"),
    ("slow, elastic", limit("limit_of(*args) / 3"), "it ended with exit code 72"),
]


# Bugs of workers of two processes.
OF_TWO = [
    (
        "elastic run",
        """
        from decentjax.links.worker_job import Follower
        take, first = Follower.take, {}
        def older(self, name, edge, compute):
            found = take(self, name, edge, compute)
            return [x._replace(arrays=first.setdefault(edge, x.arrays)) for x in found]
        Follower.take = older
        """,
        "worker . is split: process 1 has another model than process 0",
    ),
    (
        "kill of . in a worker, elastic",
        """
        import threading
        from decentjax.links.inbox import Inbox
        lose = Inbox.lose
        Inbox.lose = lambda *args: threading.Timer(4, lose, args).start()
        """,
        "others knew of its end after",
    ),
]


@pytest.mark.slow
@pytest.mark.nightly
@needs_root
@pytest.mark.parametrize(
    ("fault", "bug", "broken"), PROMISES, ids=[f"{x[0]}-{x[2]}" for x in PROMISES]
)
def test_each_broken_promise_is_noticed(fault, bug, broken, tmp_path):
    options = ("--processes", "3", "--workers.num-workers", "3")
    options += ("--workers.workers-per-node", "1", "--topology.name", "ring")
    config = "tests/drift.py" if "elastic" in fault else "tests/job_line.py"
    options += ("--faults", fault.partition(",")[0])
    assert re.search(broken, broken_in(fault, bug, tmp_path, config, *options))


@pytest.mark.slow
@pytest.mark.nightly
@needs_root
@pytest.mark.parametrize(("row", "bug", "broken"), OF_TWO, ids=["split", "late"])
def test_each_broken_promise_of_a_worker_of_two_is_noticed(row, bug, broken, tmp_path):
    options = ("--processes", "4", "--processes-per-worker", "2", "--faults", "kill")
    options += ("--workers.num-workers", "2", "--elastic-share", "1")
    found = broken_in(row, bug, tmp_path, "tests/wide_drift.py", *options)
    assert re.search(broken, found), found


def broken_in(row: str, bug: str, tmp_path, *args: str) -> str:
    """What chaos with a bug finds broken in a row, whose name is a pattern."""
    (tmp_path / "bug").mkdir()
    body = textwrap.indent(textwrap.dedent(bug), "    ")
    code = f"def plant():\n{body}\nif not is_chaos:\n    plant()\n"
    # Python imports it at its start, in each process of the job.
    (tmp_path / "bug" / "sitecustomize.py").write_text(BUGGY + code)
    out, path = tmp_path / "chaos", os.pathsep.join([str(tmp_path / "bug"), str(ROOT)])
    own = ("--minutes", "0.1", "--out", str(out), "--steps", "24")
    own += ("--task.step-seconds", "0.05")
    with started(*CHAOS, *args, *own, PYTHONPATH=path) as job:
        output, _ = job.communicate(timeout=5 * LONG)
    assert job.returncode == 1, output
    rows = json.loads((out / "chaos.json").read_text())["rows"]
    return str([x["broken"] for x in rows if re.fullmatch(row, x["fault"])])


def hit(**measured):
    found = {"back": 5.0, "gap": 1.0, "nearer": 0.1, "moments": 1.1, **measured}
    return members.Hit("kill", 1, (), 0.0, **found)


def test_a_return_is_measured_and_compared():
    assert hit().broken == hit(nearer=math.nan, moments=math.nan).broken == ""
    assert "with 0.03 x a peer's moments" in hit(moments=0.03).broken
    assert "others took 11.0 s" in hit(gap=11.0).broken
    assert "knew of its end after inf s" in hit(left=math.inf).broken
    assert "came back after 500.0 s" in hit(back=500.0).broken
    assert (
        members.worst([hit(), hit(gap=3.0, nearer=0.4)])
        == "3.0 s; 5.0 s; 0.40 x; 1.10 x the moments"
    )
    assert members.worst([hit(left=0.5), hit(left=1.5)]).startswith("1.5 s; 1.0 s; ")
    of_two = hit()._replace(processes=[2, 3])
    assert of_two.what == "kill of 2 in a worker, elastic"


def test_the_first_end_of_a_worker_is_that_of_its_process():
    said = (
        "warning: worker 1 (processes 2, 3) ended, process 3 first, killed by SIGKILL; "
        "started again\nerror: process 4 ended first, with exit code 70\n"
    )
    assert ends_in(said) == [(3, "killed by SIGKILL"), (4, "with exit code 70")]


def write_wholes(folder, process, *wholes):
    rows = [[0.0, "life", step, [1.0], 0.0, x] for step, x in enumerate(wholes)]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / f"models-{process}.jsonl").write_text(text)


@pytest.mark.parametrize(
    ("wholes", "broken"),
    [
        (["a", "b"], ""),
        (["a", "b", "c"], ""),  # A step that the others have not recorded.
        (["a", "x"], "worker 1 is split: process 1 .* after 1 of 2 steps"),
        ([], "worker 1 has no whole leaf"),
        (["", ""], "worker 1 has no whole leaf"),
    ],
)
def test_a_split_worker_is_noticed(wholes, broken, tmp_path):
    for process in range(3):
        first = ["", ""] if process == 2 and "" in wholes else ["a", "b"]
        write_wholes(tmp_path, process, *first)
    write_wholes(tmp_path, 3, *wholes)
    bench = Bench([], 4, 2, tmp_path, None, each=2)
    raises = pytest.raises(BrokenError, match=broken) if broken else nullcontext()
    with raises:
        members.check_whole(tmp_path, bench)
    members.check_whole(tmp_path, bench._replace(each=1))


def test_only_leaves_that_each_process_has_are_compared():
    mesh = worker_mesh(1, devices_per_worker=2)
    shares = NamedSharding(mesh, PartitionSpec("workers", "fsdp"))
    shared = jax.device_put(jnp.ones((1, 8)), shares)
    one, other = (
        jax.device_put(jnp.full((1,), x), NamedSharding(mesh, PartitionSpec("workers")))
        for x in (1.0, 1.0 + 1e-7)
    )
    assert whole({"w": shared}) == ""
    digests = [whole(x) for x in ({"w": shared, "b": one}, {"b": one}, {"b": other})]
    assert digests[0] == digests[1] != digests[2]


def test_goodput_is_what_is_used_after_the_first_fault_over_before(tmp_path):
    """Two workers use a batch a second each, then one of them none."""
    folders = [tmp_path / "process-0", tmp_path / "process-1"]
    for number, folder in enumerate(folders):
        rows = [{"seconds": 0.0, "step": 0, "began": 100.0}]
        for t in range(1, 21):
            used = [t, min(t, 10)] if number == 0 else [0, min(t, 10)]
            rows.append({"seconds": t, "step": t, "positions": used})
        folder.mkdir()
        (folder / METRICS).write_text("".join(json.dumps(x) + "\n" for x in rows))
    assert members.goodput(folders, 110.0) == pytest.approx(0.5)


def test_one_that_keeps_its_own_model_is_told_from_one_that_takes_a_peers():
    assert "another model, 0.90 x" in hit(nearer=0.9).broken


@pytest.mark.parametrize(
    ("found", "is_bad"),
    [
        ({}, False),  # There was no time for it.
        ({"injected": 2, "missed": 1}, False),
        ({"injected": 2, "broken": ["lost"]}, True),
        ({"missed": 3}, True),
    ],
)
def test_a_fault_that_was_never_done_is_no_promise_kept(found, is_bad):
    assert Row("kill", "ends well", "5 s", **found).is_bad == is_bad


def test_sketches_are_as_far_apart_as_models():
    random = np.random.default_rng(1)
    one = {"a": random.normal(size=(2, 300)), "b": random.normal(size=(2, 7, 50))}
    other = jax.tree.map(lambda x: x + 0.3 * random.normal(size=x.shape), one)
    exact = np.sqrt(sum(np.sum((one[k][0] - other[k][0]) ** 2) for k in one))
    found = [sketch(jax.tree.map(jnp.asarray, x)) for x in (one, other)]
    assert np.linalg.norm(found[0] - found[1]) == pytest.approx(exact, rel=0.4)
