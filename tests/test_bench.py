"""The race: what it refuses, a real one of seconds, and its arithmetic."""

import json
import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

pytest.importorskip("pyroute2", reason="needs the extra: pip install -e '.[emulate]'")

from test_emulate import needs_root, processes_with

from train.bench.graphs import graph_of
from train.bench.race import Race, Row, can_have
from train.bench.race_report import draw, link_seconds, table
from train.bench.work import Work

ROOT = Path(__file__).parent.parent
RACE = [sys.executable, "-m", "train.bench", "race"]
OURS = (
    "compute alone",
    "all-reduce",
    "exchange alone: ring",
    "in the step: ring",
    "in the background: ring",
)
TINY = (
    "--clusters 2x1 --steps 1 --work.layers 1 --work.width 8 --work.batch 2 "
    "--straggler 0.05"
)
# One model takes 0.04 s over this link.
WORK, RATE = Work(layers=1, width=500, batch=1), "200mbit"
# The tests' own devices and threads are no matter of the workers.
ENV = {k: v for k, v in os.environ.items() if k not in ("NPROC", "XLA_FLAGS")}


def race(*options: str, **env: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*RACE, *options],
        cwd=ROOT,
        env=ENV | env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ("--clusters=4", "a cluster is written as 4x2, got '4'"),
        ("--clusters 2x1 0x2", "a cluster is written as 4x2, got '0x2'"),
        ("--clusters 2x1 255x1", "nodes must be between 1 and 254, got 255"),
        ("--rate=none", "the race needs a rate, such as 200mbit"),
        ("--rate=fast", "rate must be like 200mbit"),
        ("--rounds=0", "rounds must be at least 1, got 0"),
        ("--steps=0", "steps must be at least 1, got 0"),
        ("--straggler=-1", "straggler must be at least 0, got -1"),
        ("--work.width=0", "work.width must be at least 1, got 0"),
        ("--only=(", "only must be a regular expression, got '('"),
        (
            "--clusters 3x2 --only=alternating",
            "3x2, 3 nodes do not fit: exchange alone: alternating exponential ring, ",
        ),
        ("--only=nobody", "only = 'nobody' leaves nobody on 4x1; there are: compute a"),
    ],
)
def test_bad_input_gets_a_sentence_before_anything_runs(options, sentence, tmp_path):
    # A box around the sentence would break it into lines.
    out = ("--out", str(tmp_path / "race"))
    with race(*options.split(), *out, COLUMNS="200") as process:
        output, _ = process.communicate(timeout=100)
    assert process.returncode in (1, 2)
    assert sentence in output
    assert "Traceback" not in output
    assert not (tmp_path / "race").exists()


@needs_root
def test_a_race_is_written_down_and_drawn(tmp_path):
    only = f"^({'|'.join(OURS)})$"
    options = (*TINY.split(), "--rounds", "2", "--only", only, "--out", str(tmp_path))
    with race(*options, "--clusters", "2x1", "3x1") as process:
        output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    facts = json.loads((tmp_path / "race.json").read_text())
    late = [f"{name} with a straggler" for name in ("all-reduce", OURS[-1])]
    for cluster in ("2x1", "3x1"):
        rows = facts["clusters"][cluster]
        assert [row["name"] for row in rows] == [*OURS, *late]
        assert all(len(row["rounds"]) == 2 and min(row["rounds"]) > 0 for row in rows)
    text = (tmp_path / "race.md").read_text()
    assert [f"| {name} |" in text for name in OURS] == [True] * len(OURS)
    assert "<svg" in (tmp_path / "race.svg").read_text()


@needs_root
def test_the_death_of_a_worker_ends_the_race_and_names_it(tmp_path):
    marker = uuid.uuid4().hex
    options = (*TINY.split(), "--rounds", "100000", "--only", "all-reduce")
    with race(*options, "--out", str(tmp_path), MARKER=marker) as process:
        assert process.stdout is not None
        while "round 3 of" not in (line := process.stdout.readline()):
            assert line
        os.kill(worker(marker, rank=1), signal.SIGKILL)
        output, _ = process.communicate(timeout=100)
    assert process.returncode == 1
    log = tmp_path / "jax.2x1.1.txt"
    assert "error: jax worker 1 died in the turn of 'all-reduce" in output
    assert f"; the end of {log}:" in output
    assert "Traceback" not in output
    assert not processes_with(marker)


def worker(marker: str, rank: int) -> int:
    def words(pid: int, file: str) -> list[bytes]:
        return Path(f"/proc/{pid}/{file}").read_bytes().split(b"\0")

    (found,) = (
        pid
        for pid in processes_with(marker)
        if b"train.bench.jax_worker" in words(pid, "cmdline")
        and b"RANK=%d" % rank in words(pid, "environ")
    )
    return found


@pytest.mark.parametrize(
    ("name", "nodes", "per_node", "models"),
    [
        ("compute alone", 4, 1, None),
        ("PyTorch alone", 4, 1, None),
        ("all-reduce", 4, 1, 2 * 3 / 4),
        ("PyTorch DDP", 4, 2, 2 * 7 / 8),
        ("exchange alone: ring", 4, 1, 1),
        ("in the step: ring", 3, 1, 2),  # To both neighbours, as there are no pairs.
        ("in the step: ring between nodes", 3, 2, 2),
        ("Decent-DP: one-peer-exp", 4, 1, 1),
        ("in the step: complete", 4, 1, 2 * 3 / 4),
        ("in the background: ring between nodes", 4, 2, 1),
        # A node's link is busy every other step.
        ("in the background: alternating exponential ring", 4, 2, 1 / 2),
        ("Decent-DP: alternating-exp-ring", 4, 2, 1 / 2),
    ],
)
def test_bytes_over_rate_are_those_of_the_busiest_link(name, nodes, per_node, models):
    wanted = None if models is None else pytest.approx(0.04 * models)
    assert link_seconds(Race(work=WORK, rate=RATE), name, nodes, per_node) == wanted


@pytest.mark.parametrize(
    ("name", "numbers"),
    [
        ("compute alone", {1, 2, 3, 4, 5, 6}),
        ("in the step: ring", {1, 2, 3, 4, 5, 6}),
        ("in the step: one-peer exponential", {1, 2, 3, 4, 5, 6}),
        ("in the step: alternating exponential ring", {1, 2, 4}),
        ("Decent-DP: ring", {2, 4, 6}),
        ("Decent-DP: one-peer-exp", {1, 2, 4}),
        ("Decent-DP: alternating-exp-ring", {1, 2, 4}),
        ("Decent-DP: complete", {1, 2, 3, 4, 5, 6}),
    ],
)
def test_a_graph_races_on_the_numbers_of_nodes_that_it_can_have(name, numbers):
    assert {nodes for nodes in range(1, 7) if can_have(name, nodes)} == numbers
    kind, _, graph = name.partition(": ")
    for nodes in numbers if kind == "in the step" else ():
        assert graph_of(graph, 2 * nodes, 2).num_workers == 2 * nodes


ROWS = [
    Row("compute alone", [1.0]),
    Row("all-reduce", [3.0]),
    Row("exchange alone: ring", [2.0]),
    Row("in the background: ring", [2.3, 2.1, 2.2]),
    Row("PyTorch DDP", [2.0]),
    Row("Decent-DP: ring", [4.4]),
    Row("in the background: ring with a straggler", [2.45]),
]


SERVING = """
from train.bench.work import Contestant, serve
serve(1, 1, 2, lambda name: Contestant(lambda: None))
"""


def test_warmup_does_not_count_and_each_worker_is_late_in_turn():
    turns = [("a", 2, 3, 0.0, 0.0), ("a", 0, 4, 0.2, 0.0)]
    answers = subprocess.check_output(
        [sys.executable, "-c", SERVING],
        input="".join(json.dumps(turn) + "\n" for turn in turns),
        cwd=ROOT,
        text=True,
    )
    measured, late = map(json.loads, answers.splitlines())
    assert len(measured) == 3
    assert [seconds > 0.2 for seconds in late] == [False, True, False, True]


def test_the_seconds_of_a_row_are_the_median_of_its_rounds():
    assert Row("a", [1.0, 9.0, 2.0]).seconds == 2.0


def test_the_table_compares_the_medians():
    lines = table(Race(work=WORK, rate=RATE, straggler=0.5), "4x1", ROWS).splitlines()
    background, late = (
        line for line in lines if line.startswith("| in the background: ring |")
    )
    # The limit is the exchange alone, 2 s; one model takes 0.04 s.
    ratios = "1.10 | 55.00 | 0.50 | 1.10"
    wanted = f"| in the background: ring | 2.200 (2.100 to 2.300) | {ratios} |"
    assert background == wanted
    assert late == "| in the background: ring | 2.450 | 2.200 | 50% |"
    assert "| all-reduce | 3.000 (3.000 to 3.000) |  | 50.00 |  | 1.50 |" in lines
    assert "| compute alone | 1.000 (1.000 to 1.000) |  |  |  |  |" in lines


def test_the_figure_has_a_bar_for_each_but_the_stragglers(tmp_path):
    path = tmp_path / "race.svg"
    draw(Race(work=WORK, rate=RATE), {"4x1": ROWS, "4x2": ROWS[:2]}, path)
    text = path.read_text()
    for row in ROWS[:-1]:
        assert f"<!-- {row.name} -->" in text
    assert "straggler" not in text
    assert "<!-- 4 nodes x 2 workers, 200mbit -->" in text
