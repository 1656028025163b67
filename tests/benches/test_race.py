"""The race: what it refuses, a real one of seconds, and its arithmetic."""

import json
import os
import re
import signal
import subprocess
import sys
import uuid
from multiprocessing import Pipe
from pathlib import Path
from threading import Thread

import pytest

pytest.importorskip("pyroute2", reason="needs the extra: pip install -e '.[emulate]'")

from benches.race.contestants import (
    Contestant,
    GraphName,
    Scheme,
    all_contestants,
    graph_of,
)
from benches.race.race import Race, select
from benches.race.race_figure import draw_race
from benches.race.race_report import Timing, bars, link_seconds, table
from benches.race.team import cluster_name, parse_cluster
from benches.race.turns import Load, WorkerTurn, serve
from benches.runner import Runner
from tests.checkout import ENV, ROOT
from tests.jobs import processes_with
from tests.machines import needs_root
from train.job.namespaces import EmulatedCluster

RACE = [sys.executable, "-m", "benches", "race"]
OURS = (
    "compute alone",
    "all-reduce",
    "exchange alone: ring",
    "in the step: ring",
    "in the background: ring",
    "exchange alone, by peers: ring",
    "by peers: ring",
    "by peers, without waiting: ring",
)
IN_SLICES = [OURS[number] for number in (0, 1, 3, 4, 6)]
TINY = (
    "--clusters 2x1 --steps 1 --work.layers 1 --work.width 8 --work.batch 2 "
    "--straggler 0.05"
)
# One model takes 0.04 s over this link.
MODEL_BYTES = Load(layers=1, width=500, batch=1).model_bytes
RATE = "200mbit"


def race(*options: str, **env: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*RACE, *options],
        cwd=ROOT,
        env=ENV | env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.nightly
@needs_root
def test_a_race_is_written_down_and_drawn(tmp_path):
    only = f"^({'|'.join(OURS)})$"
    options = (*TINY.split(), "--rounds", "2", "--only", only, "--out", str(tmp_path))
    with race(*options, "--clusters", "2x1", "3x1") as process:
        output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    facts = json.loads((tmp_path / "race.json").read_text())
    late = [f"{name} with a straggler" for name in ("all-reduce", OURS[4], OURS[-1])]
    for cluster in ("2x1", "3x1"):
        rows = facts["clusters"][cluster]
        assert [row["name"] for row in rows] == [*OURS, *late]
        assert all(len(row["rounds"]) == 2 and min(row["rounds"]) > 0 for row in rows)
    text = (tmp_path / "race.md").read_text()
    assert [f"| {name} |" in text for name in OURS] == [True] * len(OURS)
    assert "<svg" in (tmp_path / "race.svg").read_text()


@pytest.mark.nightly
@needs_root
def test_workers_of_several_processes_race_as_one_job_and_by_peers(tmp_path):
    options = (*TINY.split(), "--rounds", "1", "--only", "compute|reduce|: ring")
    with race(*options, "--devices=2", "--clusters=2x1x2", "--out", str(tmp_path)) as x:
        output, _ = x.communicate(timeout=300)
    assert x.returncode == 0, output
    (rows,) = json.loads((tmp_path / "race.json").read_text())["clusters"].values()
    late = [f"{name} with a straggler" for name in (OURS[1], OURS[4])]
    assert [row["name"] for row in rows] == [*IN_SLICES, *late]
    assert "| 2 nodes x 1 of 2 devices in 2 processes, 200mbit |" in output
    # A job of each worker, whose processes meet on its node.
    logs = tmp_path.glob("peer_worker.2x1x2.?.txt")
    ranks = [re.findall(r"Rank (\d) is connected to (\d)", x.read_text()) for x in logs]
    assert sorted(ranks) == [[("0", "1")]] * 2 + [[("1", "1")]] * 2


@pytest.mark.nightly
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
    log = tmp_path / "jax_worker.2x1.1.txt"
    assert "error: jax_worker 1 died in the turn of 'all-reduce" in output
    assert f"; the end of {log}:" in output
    assert "Traceback" not in output
    assert not processes_with(marker)


def worker(marker: str, rank: int) -> int:
    def words(pid: int, file: str) -> list[bytes]:
        return Path(f"/proc/{pid}/{file}").read_bytes().split(b"\0")

    (found,) = (
        pid
        for pid in processes_with(marker)
        if b"benches.race.jax_worker" in words(pid, "cmdline")
        and b"RANK=%d" % rank in words(pid, "environ")
    )
    return found


@pytest.mark.parametrize(
    ("contestant", "nodes", "per_node", "models"),
    [
        ((Scheme.COMPUTE,), 4, 1, None),
        ((Scheme.TORCH_COMPUTE,), 4, 1, None),
        ((Scheme.ALL_REDUCE,), 4, 1, 2 * 3 / 4),
        ((Scheme.DDP,), 4, 2, 2 * 7 / 8),
        ((Scheme.EXCHANGE, GraphName.RING), 4, 1, 1),
        ((Scheme.PEERS, GraphName.RING), 4, 1, 1),
        ((Scheme.PEERS_EXCHANGE, GraphName.RING), 5, 1, 2),
        # A newer model replaces one that was not sent.
        ((Scheme.NO_WAIT, GraphName.RING), 4, 1, None),
        (
            (Scheme.IN_STEP, GraphName.RING),
            3,
            1,
            2,
        ),  # To both neighbours, as there are no pairs.
        ((Scheme.IN_STEP, GraphName.NODES), 3, 2, 2),
        ((Scheme.DECENT_DP, GraphName.EXPONENTIAL), 4, 1, 1),
        ((Scheme.IN_STEP, GraphName.COMPLETE), 4, 1, 2 * 3 / 4),
        ((Scheme.BACKGROUND, GraphName.NODES), 4, 2, 1),
        # Of two workers each every other step, and nothing between them.
        ((Scheme.BACKGROUND, GraphName.RING), 2, 2, 1),
        # A node's link is busy every other step.
        ((Scheme.BACKGROUND, GraphName.AER), 4, 2, 1 / 2),
        ((Scheme.DECENT_DP, GraphName.AER), 4, 2, 1 / 2),
    ],
)
def test_bytes_over_rate_are_those_of_the_busiest_link(
    contestant, nodes, per_node, models
):
    wanted = None if models is None else pytest.approx(0.04 * models)
    cluster = EmulatedCluster(nodes=nodes, workers_per_node=per_node, rate=RATE)
    assert link_seconds(Contestant(*contestant), cluster, MODEL_BYTES) == wanted


@pytest.mark.parametrize(
    ("contestant", "numbers"),
    [
        ((Scheme.COMPUTE,), {1, 2, 3, 4, 5, 6}),
        ((Scheme.IN_STEP, GraphName.RING), {1, 2, 3, 4, 5, 6}),
        ((Scheme.IN_STEP, GraphName.EXPONENTIAL), {1, 2, 3, 4, 5, 6}),
        ((Scheme.IN_STEP, GraphName.AER), {1, 2, 4}),
        ((Scheme.DECENT_DP, GraphName.RING), {2, 4, 6}),
        ((Scheme.DECENT_DP, GraphName.EXPONENTIAL), {1, 2, 4}),
        ((Scheme.DECENT_DP, GraphName.AER), {1, 2, 4}),
        ((Scheme.DECENT_DP, GraphName.COMPLETE), {1, 2, 3, 4, 5, 6}),
    ],
)
def test_a_graph_races_where_it_is_defined(contestant, numbers):
    found = Contestant(*contestant)
    assert {nodes for nodes in range(1, 7) if found.exists(nodes)} == numbers
    for nodes in numbers if found.scheme == Scheme.IN_STEP else ():
        assert graph_of(found.graph, 2 * nodes, 2).num_workers == 2 * nodes


def test_contestants_have_the_names_that_only_matches():
    found = all_contestants(workers_per_node=2, peers=True)
    graphs = ("alternating exponential ring", "ring between nodes", "complete")
    kinds = ("exchange alone", "in the step", "in the background")
    ours = [f"{kind}: {graph}" for graph in graphs for kind in kinds]
    theirs = ["Decent-DP: alternating-exp-ring", "Decent-DP: complete"]
    first, last = ["compute alone", "all-reduce"], ["PyTorch alone", "PyTorch DDP"]
    assert [str(x) for x in found] == [*first, *ours, *last, *theirs]
    assert {x.team for x in found[-4:]} == {"torch"}
    assert {x.team for x in found[:-4]} == {"jax"}
    late = [str(x) for x in found if x.is_delayed]
    assert late == [first[1], f"{kinds[2]}: {graphs[0]}", last[1], theirs[0]]
    alone = [str(x) for x in all_contestants(workers_per_node=1, peers=True)]
    assert "in the step: one-peer exponential" in alone
    assert alone[-8:-5] == list(OURS[-3:])
    assert alone[-3:] == [
        f"Decent-DP: {x}" for x in ("ring", "one-peer-exp", "complete")
    ]
    late = Contestant(Scheme.DECENT_DP, GraphName.RING, straggler=True)
    assert str(late) == "Decent-DP: ring with a straggler"


@pytest.mark.parametrize("name", ["4x1", "2x2", "2x2x2"])
def test_workers_of_several_devices_race_on_graphs_of_single_workers(name):
    race = Race(clusters=(name,), devices=2, only="compute|reduce|: ring$")
    cluster = parse_cluster(name, race.rate)
    assert cluster_name(cluster) == name
    assert [str(x) for x in select(race, cluster, rivals=True)] == IN_SLICES


ON_RING = Contestant(Scheme.BACKGROUND, GraphName.RING)
TIMINGS = [
    Timing(Contestant(Scheme.COMPUTE), [1.0]),
    Timing(Contestant(Scheme.ALL_REDUCE), [3.0]),
    Timing(Contestant(Scheme.EXCHANGE, GraphName.RING), [2.0]),
    Timing(ON_RING, [2.3, 2.1, 2.2]),
    Timing(Contestant(Scheme.PEERS_EXCHANGE, GraphName.RING), [1.5]),
    Timing(Contestant(Scheme.PEERS, GraphName.RING), [1.8]),
    Timing(Contestant(Scheme.NO_WAIT, GraphName.RING), [1.2]),
    Timing(Contestant(Scheme.DDP), [2.0]),
    Timing(Contestant(Scheme.DECENT_DP, GraphName.RING), [4.4]),
    Timing(ON_RING._replace(straggler=True), [2.45]),
]


@pytest.mark.parametrize(("rank", "each"), [(1, 1), (2, 2), (3, 2)])
def test_warmup_does_not_count_and_each_worker_is_late_in_turn(rank, each, monkeypatch):
    # All processes of a worker are late together.
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", str(2 * each))
    monkeypatch.setenv("DECENTJAX_PROCESSES_PER_WORKER", str(each))
    load, alone = Load(), Contestant(Scheme.COMPUTE)
    made = []

    def make(*what) -> Runner:
        made.append(what)
        return Runner(lambda: None)

    driver, worker = Pipe()
    driver.send(load)
    driver.send(WorkerTurn(alone, warmup=2, steps=3))
    driver.send(WorkerTurn(alone, warmup=0, steps=4, straggler=0.2))
    server = Thread(target=serve, args=(worker, make))
    server.start()
    measured, late = driver.recv(), driver.recv()
    driver.close()  # Ends it.
    server.join()
    assert made == [(load, alone)]
    assert len(measured) == 3
    assert [step.delay for step in late] == [0.0, 0.2, 0.0, 0.2]
    assert [step.seconds > 0.2 for step in late] == [False, True, False, True]


def test_the_seconds_of_a_contestant_are_the_median_round():
    assert Timing(ON_RING, [1.0, 9.0, 2.0]).seconds == 2.0


def test_the_table_compares_the_medians():
    cluster = EmulatedCluster(nodes=4, rate=RATE)
    lines = table(cluster, TIMINGS, MODEL_BYTES, straggler=0.5).splitlines()
    background, late = (
        line for line in lines if line.startswith("| in the background: ring |")
    )
    # The limit is the exchange alone, 2 s; one model takes 0.04 s.
    ratios = "1.10 | 55.00 | 0.50 | 1.10"
    wanted = f"| in the background: ring | 2.200 (2.100 to 2.300) | {ratios} |"
    assert background == wanted
    assert late == "| in the background: ring | 2.450 | 2.200 | 50% |"
    assert (
        "| by peers: ring | 1.800 (1.800 to 1.800) | 1.20 | 45.00 | 0.41 | 0.90 |"
        in (lines)
    )
    no_wait = (
        "| by peers, without waiting: ring | 1.200 (1.200 to 1.200) | 1.20 |  |  |"
    )
    assert f"{no_wait}  |" in lines
    assert "| all-reduce | 3.000 (3.000 to 3.000) |  | 50.00 |  | 1.50 |" in lines
    assert "| compute alone | 1.000 (1.000 to 1.000) |  |  |  |  |" in lines
    assert "| worker t mod N late by 0.5 s | s/step | without | passed on |" in lines


def test_the_table_names_the_devices_and_processes_of_a_worker():
    plain, slices, jobs = (
        table(parse_cluster(name, RATE), TIMINGS[:1], MODEL_BYTES, 0.5, devices)
        for name, devices in (("4x1", 1), ("2x2", 2), ("2x2x2", 4))
    )
    assert plain.startswith("| 4 nodes x 1, 200mbit |")
    assert slices.startswith("| 2 nodes x 2 of 2 devices, 200mbit |")
    assert jobs.startswith("| 2 nodes x 2 of 4 devices in 2 processes, 200mbit |")


def test_the_figure_has_a_bar_for_each_but_the_stragglers(tmp_path):
    path = tmp_path / "race.svg"
    cluster = EmulatedCluster(nodes=4, rate="200mbit")
    every, two = (bars(cluster, each, MODEL_BYTES) for each in (TIMINGS, TIMINGS[:2]))
    draw_race({"one": every, "two": two}).savefig(path)
    text = path.read_text()
    for timing in TIMINGS[:-1]:
        assert f"<!-- {timing.contestant} -->" in text
    assert "straggler" not in text
    assert "<!-- two -->" in text
    colours = {bar.name: (bar.colour, bar.limit) for bar in every}
    assert colours["compute alone"] == ("0.75", None)
    assert colours["in the background: ring"] == ("tab:blue", 2.0)
    assert colours["exchange alone, by peers: ring"] == ("0.75", None)
    assert colours["by peers, without waiting: ring"] == ("tab:blue", 1.0)
    assert colours["PyTorch DDP"] == ("tab:orange", None)
    # Of an exchange that is not measured alone: bytes over rate, here the computing.
    alone = [x for x in TIMINGS if x.contestant.scheme != Scheme.EXCHANGE]
    limits = {x.name: x.limit for x in bars(cluster, alone, MODEL_BYTES)}
    assert limits["in the background: ring"] == 1.0
