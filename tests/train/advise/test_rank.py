"""Advice against closed forms, loops over workers, and hand-made rows."""

import dataclasses
import io
import math
import re
import shlex
import xml.etree.ElementTree as ET
from pathlib import Path

import matplotlib
import numpy as np
import pytest
from rich.console import Console

import train.__main__
from decentjax import runtime, topology
from decentjax.runtime import Cluster, Job
from decentjax.units import rate
from tests import tiny
from tests.changes import changed
from tests.checkout import ROOT
from tests.run_folders import advice_in
from train.advise import __main__ as program
from train.advise import rank
from train.advise.rank import Prediction, advise, candidates, fitting, predict
from train.advise.setting import Flags, Setting
from train.cli.progress import over
from train.config import TopologyConfig, WorkersConfig
from train.network import duration

TINY_FILE = Path(tiny.__file__)
MODEL = 4 * 65e6
FREE = Cluster(num_nodes=8, between_bytes_per_second=math.inf)


def flags(**changes) -> Flags:
    """4 nodes of 4 workers who compute equally long; messages have no latency."""
    made = Flags(
        nodes=4,
        workers_per_node=4,
        between="25gbit",
        inside="600gbit",
        between_latency="0s",
        inside_latency="0s",
        compute="65ms",
        sigma=0.0,
        params="65M",
    )
    return changed(made, **changes)


def rows_of(
    setting: Setting, num_steps: int = 1, seed: int = 0
) -> dict[str, Prediction]:
    """The rows of all schemes that fit, by name."""
    found = rank.compare(setting, num_steps, seed)
    return {row.name: row for row in found.rows}


MANY = ("--workers.num-workers", "8", "--workers.workers-per-node", "1")


def trained_with(path: Path, *arguments: str):
    """The config with which `decentjax train` would begin."""
    begun = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            train.__main__, "run_here", lambda *given, **_: begun.append(given[0])
        )
        train.__main__.main([str(path), *arguments])
    return begun[0]


def test_a_duration_is_read_in_seconds_or_milliseconds():
    texts = [duration(x) for x in (12.345, 1.0, 0.0651234, 2e-5, 0.0)]
    assert texts == ["12.3 s", "1 s", "65.1 ms", "0.02 ms", "0 ms"]


def test_a_setting_is_as_the_flags_say():
    setting = flags(
        nodes=3,
        workers_per_node=2,
        between="8gbit",
        inside="80gbit",
        between_latency="20us",
        inside_latency="5us",
        params="1.5B",
        bytes_per_param=2,
        forward_share=0.25,
        overlap="background",
    ).setting()
    assert dataclasses.asdict(setting.cluster) == pytest.approx(
        {
            "num_nodes": 3,
            "workers_per_node": 2,
            "between_bytes_per_second": 1e9,
            "inside_bytes_per_second": 1e10,
            "between_latency": 20e-6,
            "inside_latency": 5e-6,
        }
    )
    assert setting.job.model_bytes == 3e9
    assert setting.job.forward_share == 0.25
    assert setting.overlap == "background"
    assert not setting.measured


def test_what_the_flags_leave_out_is_as_their_help_says():
    setting = Flags(nodes=2, between="1gbit", compute="1s", params="1M").setting()
    cluster, job = setting.cluster, setting.job
    assert (cluster.num_workers, cluster.workers_per_node) == (2, 1)
    assert cluster.between_latency == pytest.approx(20e-6)
    assert cluster.inside_latency == pytest.approx(5e-6)
    assert job.model_bytes == 4e6
    assert setting.overlap == "in_step"
    drawn = np.stack([job.draw(step, 2, 0) for step in range(2000)])
    assert drawn.std() == pytest.approx(0.05, rel=0.1)


@pytest.mark.parametrize(
    ("overlap", "forward_share"), [("in_step", 1 / 3), ("none", 1), ("background", 1)]
)
def test_only_the_step_sends_parts_of_the_gradient_early(overlap, forward_share):
    assert flags(overlap=overlap).setting().job.forward_share == forward_share
    given = flags(overlap=overlap, forward_share=0.0).setting()
    assert given.job.forward_share == 0


def test_compute_times_have_the_chosen_deviation():
    job = flags(sigma=0.2).setting().job
    wanted = np.random.default_rng((3, 5)).gamma(25.0, 0.065 / 25, 8)
    np.testing.assert_allclose(job.draw(5, 8, 3), wanted)


def test_a_spread_that_nobody_gave_is_said():
    told = flags(sigma=None)
    (line,) = told.setting().facts
    assert line.startswith("sigma = 0.05 is assumed")
    given = changed(told, sigma=0.05).setting()
    assert given.facts == flags().setting().facts == ()
    drawn = [one.job.draw(2, 4, 0) for one in (told.setting(), given)]
    np.testing.assert_array_equal(*drawn)


def test_late_workers_are_late_by_the_given_time():
    job = flags(late_workers=3, late_by="20ms").setting().job
    for step in range(5):
        drawn = sorted(job.draw(step, 8, 0))
        np.testing.assert_allclose(drawn, 5 * [0.065] + 3 * [0.085])


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"between": "0gbit"}, "between must be positive, got '0gbit'"),
        ({"inside": "0gbit"}, "inside must be positive, got '0gbit'"),
        ({"between": "25"}, "between must be a number with one of the units bit, kbi"),
        ({"inside": None}, "nodes of 4 workers need --inside, such as 600gbit"),
        ({"nodes": 0}, "num_nodes must be positive, got 0"),
        ({"workers_per_node": -2, "inside": None}, "workers_per_node must be positive"),
        ({"between_latency": "-1us"}, "between_latency must be a number with one of"),
        ({"inside_latency": "5"}, "inside_latency must be a number with one of"),
        ({"compute": "0ms"}, "compute time must be positive, got 0.0 s"),
        ({"sigma": -0.1}, "sigma must not be negative, got"),
        ({"sigma": math.nan}, "sigma must not be negative"),
        ({"late_workers": 2}, "late_workers and late_by need each other, got 2 and 0s"),
        ({"late_by": "1s"}, "late_workers and late_by need each other, got 0 and 1s"),
        ({"late_workers": -1, "late_by": "1s"}, "must not be negative, got -1 and 1.0"),
        ({"late_workers": 2, "late_by": "soon"}, "late_by must be a number with one o"),
        ({"params": "0"}, "model_bytes must be positive and finite, got 0.0"),
        ({"params": "-1M"}, "params must be a number with one of the units K, M, B"),
        ({"bytes_per_param": -4.0}, "model_bytes must be positive and finite, got -2"),
        ({"forward_share": 1.5}, r"forward_share must be in \[0, 1\], got 1.5"),
    ],
    ids=str,
)
def test_invalid_flags_are_refused(changes, sentence):
    with pytest.raises(ValueError, match=sentence):
        flags(**changes).setting()


@pytest.mark.parametrize("workers_per_node", [1, 2, 3])
@pytest.mark.parametrize("num_workers", [1, 2, 3, 5, 6, 7, 8, 12, 16])
def test_a_topology_fits_or_it_is_said_why_not(num_workers, workers_per_node):
    workers = WorkersConfig(num_workers=num_workers, workers_per_node=workers_per_node)
    fit, unfit = fitting(num_workers, workers_per_node)
    fits = [config for config, _ in fit]
    others = [c for c in candidates(num_workers, workers_per_node) if c not in fits]
    assert len(fits) + len(others) == len(candidates(num_workers, workers_per_node))
    assert all(config.build(workers) == made for config, made in fit)
    assert {made.num_workers for _, made in fit} == {num_workers}
    assert len(unfit) == len(others)
    for config, (name, reason) in zip(others, unfit.items(), strict=True):
        assert name.startswith(config.name)
        with pytest.raises(ValueError, match=", got ") as refused:
            config.build(workers)
        assert str(refused.value) == reason


ANY_NUMBER = {
    *(
        "base_k",
        "complete",
        "exponential",
        "k_peer_exponential",
        "one_peer_exponential",
    ),
    *("random_matching", "ring", "ring_lattice", "star"),
}


@pytest.mark.parametrize(
    ("num_workers", "fits"),
    [(5, ANY_NUMBER), (7, ANY_NUMBER), (6, ANY_NUMBER | {"one_peer_ring", "torus"})],
)
def test_without_a_power_of_two_some_topologies_fit(num_workers, fits):
    fit, unfit = fitting(num_workers, 1)
    assert {config.name for config, _ in fit} == fits
    wanted = f"hypercube needs num_workers to be a power of two, got {num_workers}: "
    assert unfit["hypercube"] == wanted + "base_k takes any number of workers"
    if num_workers != 6:
        assert unfit["torus"].endswith(f"got {num_workers}, a prime")
        wanted = f"one_peer_ring needs an even num_workers, got {num_workers}"
        assert unfit["one_peer_ring"] == wanted


def test_levels_are_looked_at_where_nodes_have_several_workers():
    alone, together = ({c.name for c in candidates(8, n)} for n in (1, 2))
    assert together - alone == {"hierarchical"}
    between = {c.between for c in candidates(8, 2) if c.name == "hierarchical"}
    # On one node each of them would be the complete graph.
    assert {c.name for c in candidates(8, 8)} == alone
    assert between == {"one_peer_ring", "one_peer_exponential", "complete"}


def test_nodes_of_no_power_of_two_have_no_alternating_ring():
    _, unfit = fitting(6, 2)
    assert (
        "needs num_workers / workers_per_node to be a power of two, got 3: base_k"
        in unfit["alternating_exponential_ring"]
    )
    sentence = "one_peer_ring needs an even num_workers, got 3"
    assert unfit["hierarchical (one_peer_ring)"] == sentence


def test_the_topology_that_one_has_is_looked_at_once():
    damped = TopologyConfig(name="ring", factor=0.5)
    same = TopologyConfig(name="torus", degree=7)  # Of which a torus knows nothing.
    own = (damped, same, TopologyConfig(name="ring_lattice", degree=2))
    (*others, last_but_one, last), unfit = fitting(8, 1, own)
    fit, wanted = fitting(8, 1)
    assert [made for _, made in others] == [made for _, made in fit]
    assert unfit == wanted
    assert [config for config, _ in (last_but_one, last)] == [damped, own[2]]
    assert last_but_one[1] == topology.damped(topology.ring(8), 0.5)
    setting = changed(flags(nodes=8, workers_per_node=1).setting(), own=own)
    *_, row, last_row = rows_of(setting).values()
    assert (row.name, last_row.name) == ("ring, damped by 0.5", "ring_lattice (2)")
    config = trained_with(TINY_FILE, *MANY, *shlex.split(row.flags))
    assert config.topology.build(config.workers) == last_but_one[1]


def test_the_name_of_a_topology_says_its_options():
    own = {
        "ring_lattice (6)": TopologyConfig(name="ring_lattice", degree=6),
        "random_matching (3)": TopologyConfig(name="random_matching", period=3),
        "butterfly_groups (2), mean every 3": TopologyConfig(
            name="butterfly_groups", group_size=2, mean_every=3
        ),
    }
    fit, _ = fitting(8, 1, tuple(own.values()))
    setting = flags(nodes=8, workers_per_node=1).setting()
    setting = changed(setting, own=tuple(own.values()))
    rows = rows_of(setting)
    for name, (_, made) in zip(own, fit[-len(own) :], strict=True):
        row = rows[name]
        config = trained_with(TINY_FILE, *MANY, *shlex.split(row.flags))
        assert config.topology.build(config.workers) == made


def test_groups_are_of_the_root_of_the_workers():
    assert topology.butterfly_groups(64, 8) in {made for _, made in fitting(64, 1)[0]}
    assert "butterfly_groups" in {config.name for config, _ in fitting(2, 1)[0]}


def test_every_topology_is_of_one_worker_too():
    fit, unfit = fitting(1, 1)
    assert len(fit) == len(candidates(1, 1))
    assert not unfit


def test_more_workers_than_can_be_looked_at_are_refused(monkeypatch):
    with pytest.raises(ValueError, match=r"up to 4,096 workers, got 4,097; decentjax"):
        fitting(4097, 1)
    monkeypatch.setattr(rank, "MOST_WORKERS", 6)
    assert fitting(6, 1)[0]
    with pytest.raises(ValueError, match="up to 6 workers, got 7"):
        fitting(7, 1)


@pytest.mark.parametrize("forward_share", [0.0, 1 / 3, 1.0])
@pytest.mark.parametrize("between", ["1gbit", "25gbit", "10tbit"])
@pytest.mark.parametrize("nodes", [1, 2, 5])
def test_a_step_of_all_reduce_has_its_closed_form(nodes, between, forward_share):
    asked = flags(nodes=nodes, workers_per_node=1, between=between)
    setting = changed(asked, forward_share=forward_share).setting()
    found = rank.compare(setting, 7, 0)
    row = found.rows[0]
    exchange = 2 * (nodes - 1) / nodes * MODEL / rate("between", between)
    gamma = exchange / 0.065
    in_backward = (1 - forward_share) / 10
    wanted = max(1 + gamma / 10, forward_share + in_backward + gamma)
    assert row.step == pytest.approx(0.065 * wanted)
    assert found.gamma == pytest.approx(gamma)
    assert found.sigma == pytest.approx(0.0, abs=1e-9)
    assert row.exchange == pytest.approx(exchange)
    assert (row.name, row.omega, row.speed_up) == ("all-reduce", 1.0, 1.0)
    assert (row.waiting, row.compute) == pytest.approx((0.0, 0.065))
    assert row.exposed == pytest.approx(0.065 * (wanted - 1))
    assert (row.consensus_factor, row.exact_after) == (0.0, 0 if nodes == 1 else 1)


def test_latencies_and_the_rate_inside_count_in_an_all_reduce():
    asked = flags(between_latency="1ms", inside_latency="3ms", inside="1gbit")
    row = predict(asked.setting(), 1, 0)
    wanted = 2 * 15 / 16 * MODEL / (1e9 / 8) + 2 * 15 * 3e-3
    assert row.exchange == pytest.approx(wanted)


# Of 16 workers on 4 nodes of 4, by hand, in models: what crosses the busiest card and
# what the busiest worker sends, and that in how many messages.
BY_HAND = {
    "all-reduce": (15 / 8, 15 / 8, 30),
    "ring": (2, 2, 2),  # The first of a node sends to the left, the last to the right.
    "one_peer_ring": ((0 + 2) / 2, 1, 1),
    "torus": (2 * 4, 4, 4),
    "exponential": (1 + 2 + 4 + 4, 4, 4),
    "one_peer_exponential": ((1 + 2 + 4 + 4) / 4, 1, 1),
    "hypercube": ((0 + 0 + 4 + 4) / 4, 1, 1),
    "base_k (1)": ((0 + 0 + 4 + 4) / 4, 1, 1),
    "butterfly_groups": ((0 + 4 * 3 / 2) / 2, 3 / 2, 6),
    "ring_lattice (4)": (1 + 2 + 2 + 1, 4, 4),
    # By 1 and 2, 2 and 4, 4 and 8, 8 and 1.
    "k_peer_exponential (2)": ((1 + 2 + 2 + 4 + 4 + 4 + 4 + 1) / 4, 2, 2),
    # Its centre sends to the twelve workers of the other nodes.
    "star": (12, 15, 15),
    "complete": (15 / 8, 15 / 8, 30),
    # In levels: half a mean before and after, a quarter of a model of each worker in
    # every other step.
    "alternating_exponential_ring": ((1 + 0) / 2, 3 / 2 + 1 / 8, 6 + 1 / 2),
    "hierarchical (one_peer_ring)": (1, 3 / 2 + 1 / 4, 7),
    "hierarchical (one_peer_exponential)": (1, 3 / 2 + 1 / 4, 7),
    "hierarchical (complete)": (4 * 3 / 2 / 4, 3 / 2 + 3 / 2 / 4, 12),
}


def test_bytes_are_those_counted_by_hand():
    rows = rows_of(flags().setting())
    assert rows.keys() == {*BY_HAND, "random_matching (8)"}  # Drawn at random.
    for name, (node, worker, messages) in BY_HAND.items():
        row = rows[name]
        assert row.node_bytes == pytest.approx(node * MODEL), name
        assert row.worker_bytes == pytest.approx(worker * MODEL), name
        assert row.messages == pytest.approx(messages), name


def test_an_exchange_takes_its_bytes_over_the_rate_of_the_card():
    rows = rows_of(flags().setting())
    inside = 2 * (1 - 1 / 4) * MODEL / (600e9 / 8)
    card = MODEL / (25e9 / 8)
    for name, wanted in {
        "alternating_exponential_ring": inside + card,
        "hierarchical (one_peer_ring)": inside + card,
        "hierarchical (complete)": inside + 3 / 2 * card,
        "torus": 8 * card,
        "one_peer_exponential": 11 / 4 * card,
    }.items():
        assert rows[name].exchange == pytest.approx(wanted), name
        whole = 15 / 8 * card
        assert rows[name].omega == pytest.approx(wanted / whole), name


@pytest.mark.parametrize(
    ("nodes", "workers_per_node"),
    [(1, 1), (2, 1), (5, 1), (6, 1), (7, 1), (4, 2), (3, 4), (16, 1)],
)
def test_the_consensus_factor_is_that_of_the_matrices(nodes, workers_per_node):
    setting = flags(nodes=nodes, workers_per_node=workers_per_node).setting()
    rows = rows_of(setting)
    size = nodes * workers_per_node
    mean = np.full((size, size), 1 / size)
    for _, made in fitting(size, workers_per_node)[0]:
        (row,) = [r for r in rows.values() if of_name(r.name, made.name)]
        product, exact = np.eye(size), 0 if size == 1 else None
        matrices = topology.matrices(made)
        for step, matrix in enumerate([*matrices, *matrices], start=1):
            product = matrix @ product
            if exact is None and np.abs(product - mean).max() < 1e-12:
                exact = step
            if step == made.period:
                largest = np.linalg.svd(product - mean, compute_uv=False)[0]
        wanted = 0.0 if exact is not None else largest ** (1 / made.period)
        assert row.exact_after == exact, row.name
        assert row.consensus_factor == pytest.approx(wanted, abs=1e-12), row.name
        in_a_second = wanted ** (1 / row.step)
        assert row.consensus_factor_per_second == pytest.approx(in_a_second)
        assert row.reaches_consensus


def of_name(row_name: str, topology_name: str) -> bool:
    """Whether a row is of that topology: "base_k (1)" is of "base_k"."""
    levels = row_name.startswith("hierarchical")
    name = row_name.replace(" ", "") if levels else row_name.split()[0]
    return name == topology_name


def test_time_to_consensus_follows_from_the_factor():
    (row,) = [r for r in rows_of(flags().setting()).values() if r.name == "torus"]
    # Of a ring of 4 and itself: the second eigenvalue is (1 + 2 + 0) / 5.
    assert row.consensus_factor == pytest.approx(3 / 5)
    assert 0.6 ** (row.to_consensus / row.step) == pytest.approx(0.1)
    exact = made_row(step=0.5, consensus_factor=0.0, exact_after=3)
    assert exact.to_consensus == 1.5
    assert made_row(consensus_factor=1.0).to_consensus == math.inf
    assert made_row(consensus_factor=None).to_consensus == math.inf


def test_of_too_many_workers_nothing_is_said_of_consensus(monkeypatch):
    monkeypatch.setattr(rank, "MOST_FOR_CONSENSUS", 15)
    for row in rows_of(flags().setting()).values():
        unknown = row.consensus_factor, row.consensus_factor_per_second, row.exact_after
        assert unknown == (None, None, None)
        assert row.reaches_consensus
    monkeypatch.setattr(rank, "MOST_FOR_CONSENSUS", 16)
    assert all(
        r.consensus_factor is not None for r in rows_of(flags().setting()).values()
    )


@pytest.mark.parametrize("overlap", ["in_step", "background", "none"])
@pytest.mark.parametrize("workers_per_node", [1, 4])
def test_a_step_is_what_is_computed_exposed_and_waited_for(workers_per_node, overlap):
    asked = flags(
        workers_per_node=workers_per_node,
        sigma=0.3,
        between_latency="20us",
        overlap=overlap,
    )
    found = rank.compare(asked.setting(), 12, 0)
    assert found.sigma == pytest.approx(0.3, rel=0.2)
    rows = {row.name: row for row in found.rows}
    for row in rows.values():
        assert row.compute + row.exposed + row.waiting == pytest.approx(row.step)
        assert row.speed_up == pytest.approx(rows["all-reduce"].step / row.step)
        assert row.compute == pytest.approx(0.065, rel=0.2)
    steps = [row.step for row in rows.values()]
    assert len(set(steps)) > 3


def in_step_by_loops(made, compute: np.ndarray) -> np.ndarray:
    """When each worker starts each step, [T + 1, N], where messages take no time."""
    starts = [np.zeros(made.num_workers)]
    matrices = topology.matrices(made)
    for step, own in enumerate(compute):
        linked = matrices[step % made.period] > 0
        ends = starts[-1] + own
        for i, j in np.argwhere(linked | linked.T):
            ends[i] = max(ends[i], starts[-1][j])
        starts.append(ends)
    return np.stack(starts)


def test_a_step_is_the_mean_over_whole_periods():
    """Messages take no time here, so a loop over the peers says when steps end."""
    trace = np.random.default_rng(0).gamma(2, 0.5, (40, 8))
    job = Job(model_bytes=1.0, compute=runtime.trace(trace))
    setting = Setting(cluster=FREE, job=job)
    rows = rows_of(setting, 20)
    # Of all-reduce 2 steps do not count and 20 do.
    wanted = trace[2:22].max(1).mean()
    assert rows["all-reduce"].step == pytest.approx(wanted)
    assert rows["all-reduce"].compute == pytest.approx(trace[2:22].mean())
    assert rows["all-reduce"].waiting == pytest.approx(wanted - trace[2:22].mean())
    # Of a period of three 1 does not count and 7 do: 20 steps are no whole ones.
    made = topology.one_peer_exponential(8)
    starts = in_step_by_loops(made, trace[:24])
    row = rows["one_peer_exponential"]
    assert row.step == pytest.approx((starts[24] - starts[3]).mean() / 21)
    assert row.compute == pytest.approx(trace[3:24].mean())
    assert row.exposed == 0
    assert row.omega == 1


def test_the_seed_decides_what_is_drawn():
    setting = flags(sigma=None).setting()
    config, made = fitting(16, 4)[0][0]
    first, again, other = (predict(setting, 5, seed) for seed in (0, 0, 1))
    assert first == again
    assert first.step != other.step
    rows = [predict(setting, 5, seed, config, made) for seed in (0, 0, 1)]
    assert rows[0] == rows[1]
    assert rows[0].step != rows[2].step
    found = rank.compare(setting, 5, 3)
    drawn = np.stack([setting.job.draw(step, 16, 3) for step in range(5)])
    whole = 2 * 15 / 16 * MODEL / (25e9 / 8)
    assert found.gamma == pytest.approx(whole / drawn.mean())
    assert found.sigma == pytest.approx(drawn.std() / drawn.mean())


MEAN_OF_ALL = topology.complete(4)


@pytest.mark.parametrize(
    ("overlap", "compute", "wanted"),
    [
        ("in_step", "1s", 1.0),
        ("in_step", "10ms", 0.6),
        ("none", "1s", 1.6),
        ("none", "10ms", 0.61),
        # Each bucket leaves when it is updated, and the next step needs it at its end.
        ("background", "1s", 1.0),
        ("background", "10ms", 0.6),
    ],
)
def test_an_exchange_is_hidden_as_the_overlap_says(overlap, compute, wanted):
    asked = flags(workers_per_node=1, between="1gbit", params="12.5M", overlap=overlap)
    setting = changed(asked, compute=compute).setting()
    # 2 * 3 / 4 of 50 MB at 125 MB/s.
    assert setting.exchange_seconds(MEAN_OF_ALL) == pytest.approx(0.6)
    starts = setting.simulate(MEAN_OF_ALL, 5, 0).start
    np.testing.assert_allclose(np.diff(starts, axis=0)[2:], wanted, rtol=1e-6)


def test_only_the_background_sends_bucket_by_bucket():
    asked = flags(workers_per_node=1, sigma=0.5)
    asked = changed(asked, forward_share=0.3)
    made = {}
    for overlap in ("in_step", "background", "none"):
        setting = changed(asked, overlap=overlap).setting()
        made[overlap] = setting.simulate(MEAN_OF_ALL, 9, 2).end[-1].mean()
        cluster, job = setting.cluster, setting.job
        wanted = runtime.background(cluster, job, MEAN_OF_ALL, 9, 2).end[-1].mean()
        assert (made[overlap] == wanted) == (overlap == "background")
    assert made["background"] < made["in_step"] < made["none"]


def test_an_exchange_takes_as_long_as_it_was_measured():
    """Of each topology, in the mean over its exchanges, as all are ready at once."""
    fit, _ = fitting(16, 4)
    measured = {made: 0.01 * (3 + k) for k, (_, made) in enumerate(fit)}
    asked = flags(compute="1s", between_latency="20us", inside_latency="5us").setting()
    setting = changed(asked, measured={None: 0.4, **measured})
    for made, wanted in measured.items():
        assert setting.exchange_seconds(made) == wanted
        longest = setting.simulate(made, made.period, 0).exchange.max(1)
        assert longest.mean() == pytest.approx(wanted), made.name
    unknown = topology.ring_lattice(16, 6)
    assert setting.exchange_seconds(unknown) == asked.exchange_seconds(unknown)
    for got, same in zip(
        setting.simulate(unknown, 2, 0), asked.simulate(unknown, 2, 0), strict=True
    ):
        np.testing.assert_array_equal(got, same)


def test_a_step_that_waits_takes_the_measured_time():
    made = topology.exponential(16)
    asked = flags(compute="1ms", forward_share=1.0).setting()
    setting = changed(asked, measured={None: 0.4, made: 0.3})
    assert setting.gamma_and_sigma(1, 0) == pytest.approx((0.4 / 0.001, 0.0), abs=1e-9)
    assert setting.omega(made) == pytest.approx(0.75)
    np.testing.assert_allclose(np.diff(setting.simulate(made, 4, 0).start, axis=0), 0.3)
    assert setting.exchange_seconds(None) == 0.4
    whole = setting.simulate(None, 4, 0).start
    np.testing.assert_allclose(np.diff(whole, axis=0), 0.401)
    baseline = predict(setting, 4, 0)
    config = TopologyConfig(name="exponential")
    row = predict(setting, 4, 0, config, made, baseline.step)
    assert row.exchange == 0.3
    assert row.omega == pytest.approx(0.3 / 0.4)
    assert row.speed_up == pytest.approx(0.401 / 0.3)


def test_what_was_measured_of_one_worker_is_no_matter():
    alone = topology.complete(1)
    asked = flags(nodes=1, workers_per_node=1).setting()
    setting = changed(asked, measured={None: 0.1, alone: 0.1})
    for scheme in (None, alone):
        times = setting.simulate(scheme, 3, 0)
        assert times.seconds_per_step() == pytest.approx(0.065)


def made_row(name: str = "ring", **changes) -> Prediction:
    """A row of which nothing but the changes matters."""
    numbers = dict.fromkeys(Prediction._fields, 0.5) | {
        "exact_after": None,
        "messages": 1.0,
    }
    row = Prediction(
        **numbers | {"name": name, "flags": f"--topology.name {name}"} | changes
    )
    return row if "speed_up" in changes else row._replace(speed_up=1.0 / row.step)


ALL_REDUCE = made_row(
    "all-reduce", step=1.0, compute=0.4, consensus_factor=0.0, exact_after=1
)


def test_the_fastest_is_advised_with_what_is_exposed_and_waited_for():
    baseline = ALL_REDUCE._replace(exposed=0.114, waiting=0.006)
    best = made_row("b", step=0.5, exposed=0.014, waiting=0.002)
    rows = [made_row("a", step=0.8), best, made_row("c", step=0.6)]
    assert advise(baseline, rows) == (
        best,
        baseline,
        "A step takes 500 ms instead of 1 s. A step of all-reduce has 114 ms of "
        "exposed communication and 6 ms of waiting for the slowest worker; here they "
        "are 14 ms and 2 ms.",
    )


def test_among_the_fastest_consensus_decides():
    rows = [
        made_row("fast", step=0.5, consensus_factor=0.9),
        made_row("sooner", step=0.5095, consensus_factor=0.5),
        made_row("soonest", step=0.515, consensus_factor=0.1),
        made_row("later", step=0.501, consensus_factor=0.95),
    ]
    advice = advise(ALL_REDUCE, rows)
    assert advice.choice.name == "sooner"
    assert advice.reason.endswith(
        "Of the 3 topologies within 2% of the fastest, this one first brings models to "
        "a tenth of their distance."
    )
    # After three steps exactly, or after two nearly so.
    rows.append(made_row("exact", step=0.5, consensus_factor=0.0, exact_after=3))
    assert advise(ALL_REDUCE, rows).choice.name == "exact"
    rows.append(made_row("nearly", step=0.5, consensus_factor=0.3))
    assert advise(ALL_REDUCE, rows).choice.name == "nearly"


def test_of_those_that_agree_as_soon_the_fastest_is_advised():
    unknown = {"consensus_factor": None, "consensus_factor_per_second": None}
    rows = [made_row(name, step=s, **unknown) for name, s in (("a", 0.505), ("b", 0.5))]
    advice = advise(ALL_REDUCE, rows)
    assert advice.choice.name == "b"
    assert "consensus" not in advice.reason


@pytest.mark.parametrize(("speed_up", "goes"), [(1.049, False), (1.051, True)])
def test_what_is_not_a_twentieth_faster_is_not_worth_it(speed_up, goes):
    row = made_row(step=1 / speed_up, omega=0.75, exposed=0.25, waiting=0.125)
    advice = advise(ALL_REDUCE, [row, made_row("slow", step=2.0)])
    assert (advice.choice == row) == goes
    assert (advice.other == row) == (not goes)
    if not goes:
        assert advice.choice == ALL_REDUCE
        assert advice.reason == (
            "No topology is 5% faster (the best, ring, is 1.05x as fast): an exchange "
            "takes 0.75 of the time of an all-reduce; 250 ms of it are exposed, and "
            "125 ms are waiting for other workers. All-reduce averages exactly, so "
            "keep it."
        )


def test_consensus_decides_only_where_the_speed_up_is_worth():
    fast = made_row("fast", step=1 / 1.06, consensus_factor=0.9)
    sooner = made_row("sooner", step=1 / 1.045, consensus_factor=0.1)
    assert advise(ALL_REDUCE, [sooner, fast]).choice == fast
    slow = made_row("slow", step=1 / 1.049, consensus_factor=0.9)
    assert "(the best, slow, is 1.05x as" in advise(ALL_REDUCE, [sooner, slow]).reason


def test_where_nearly_all_is_computing_there_is_nothing_to_gain():
    baseline = ALL_REDUCE._replace(compute=0.98)
    advice = advise(baseline, [made_row(step=0.99)])
    assert advice.choice == baseline
    assert (
        "compute takes 98% of a step of all-reduce, so the speed-up is at most 1.02x"
        in advice.reason
    )


def test_a_topology_whose_workers_never_agree_is_not_advised():
    rows = [
        made_row("never", step=0.1, consensus_factor=1.0),
        made_row("hardly", step=0.2, consensus_factor=1 - 1e-12),
        made_row("at_last", step=0.5, consensus_factor=0.999),
    ]
    assert advise(ALL_REDUCE, rows).choice.name == "at_last"
    late = [*rows[:2], made_row("slow", step=2.0)]
    advice = advise(ALL_REDUCE, late)
    assert (advice.choice, advice.other) == (ALL_REDUCE, late[2])


def test_one_worker_needs_no_advice():
    rows = rows_of(flags(nodes=1, workers_per_node=1).setting())
    baseline = rows.pop("all-reduce")
    advice = advise(baseline, list(rows.values()))
    assert advice.choice == baseline
    assert advice.other is None
    assert advice.reason == "There is one worker, and nothing to average."


# A config that would train with something else in every respect.
OTHER = """
import dataclasses
from pathlib import Path

from train.cli.load import load_config
from train.cli.sections import kind_of
from train.config import TopologyConfig

config = dataclasses.replace(
    load_config(Path({path!r})),
    topology=TopologyConfig(
        name="butterfly_groups",
        degree=3,
        group_size=4,
        between="complete",
        factor=0.5,
    ),
    exchange=kind_of("exchange", {where!r})(),
)
"""


@pytest.mark.parametrize(
    ("num_workers", "per_node", "overlap"),
    [(16, 4, "in_step"), (4, 2, "background"), (6, 2, "none"), (5, 1, "in_step")],
)
def test_flags_train_what_was_simulated(num_workers, per_node, overlap, tmp_path):
    path = tmp_path / "other.py"
    other = "in_step" if overlap == "background" else "background"
    path.write_text(OTHER.format(path=str(TINY_FILE), where=other))
    asked = flags(nodes=num_workers // per_node, workers_per_node=per_node)
    found = rank.compare(changed(asked, overlap=overlap).setting(), 1, 0)
    workers = (
        *("--workers.num-workers", str(num_workers)),
        *("--workers.workers-per-node", str(per_node)),
    )
    _, *rows = found.rows
    for row, made in zip(rows, found.topologies, strict=True):
        config = trained_with(path, *workers, *shlex.split(row.flags))
        assert config.method.name == "awc"
        assert config.topology.build(config.workers) == made
        wanted = "background" if overlap == "background" else "in_step"
        assert config.exchange.name == wanted


@pytest.mark.parametrize("num_workers", [3, 8])
def test_the_flags_of_all_reduce_train_with_it(num_workers):
    """Even where the topology that the config has does not fit the workers."""
    setting = flags(nodes=num_workers, workers_per_node=1).setting()
    row = predict(setting, 1, 0)
    workers = ["--workers.num-workers", str(num_workers)]
    workers += ["--workers.workers-per-node", "1"]
    config = trained_with(TINY_FILE, *workers, *shlex.split(row.flags))
    assert config.method.name == "all_reduce"


ASKED = [
    *("--nodes", "2", "--workers-per-node", "2", "--between", "25gbit"),
    *("--inside", "600gbit", "--compute", "65ms", "--params", "65M"),
]


def texts_of(path: Path) -> str:
    """The words in a picture whose letters are no shapes."""
    return " ".join(
        text for text in ET.parse(path).getroot().itertext() if text.strip()
    )


@pytest.mark.slow
def test_what_was_asked_is_answered_written_and_drawn(tmp_path, capsys):
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        options = ["--steps", "20", "--seed", "3", "--out", str(tmp_path / "a" / "b")]
        assert program.main([*ASKED, *options]) == 0
    printed = capsys.readouterr().out
    asked = Flags(
        nodes=2,
        workers_per_node=2,
        between="25gbit",
        inside="600gbit",
        compute="65ms",
        params="65M",
    )
    found = rank.compare(asked.setting(), 20, 3)
    out = tmp_path / "a" / "b"
    written = advice_in(out)
    assert written["rows"] == [row._asdict() for row in found.rows]
    assert written["does_not_fit"] == found.unfit == fitting(4, 2)[1]
    assert (written["gamma"], written["sigma"]) == (found.gamma, found.sigma)
    assert written["model_bytes"] == MODEL
    assert written["overlap"] == "in_step"
    assert written["cluster"] == dataclasses.asdict(asked.setting().cluster)
    baseline, *others = found.rows
    advice = advise(baseline, others)
    choice, reason = advice.choice.name, advice.reason
    assert choice == "alternating_exponential_ring"
    assert written["advice"] == {"choice": choice, "reason": reason}
    assert f"\nadvice: {choice}\n  {reason}\n" in printed
    (command,) = re.findall(
        "\n  srun decentjax train CONFIG.py --distributed.enabled (.*)\n", printed
    )
    config = trained_with(ROOT / "configs" / "quickstart.py", *shlex.split(command))
    best = topology.alternating_exponential_ring(4, 2)
    assert config.topology.build(config.workers) == best
    assert printed.startswith(
        f"2 nodes x 2 workers, a model of 260 MB\ngamma = {found.gamma:.3g} "
        f"(all-reduce over compute time), sigma = {found.sigma:.2g} ("
    )
    assert f"{out / 'advice.json'}  steps.svg" in printed
    names = [row["name"] for row in sorted(written["rows"], key=lambda x: x["step"])]
    names[names.index(choice)] += " *"
    places = [printed.index(f"\n{name}  ") for name in names]
    assert places == sorted(places)
    assert "\x1b" not in printed
    steps = texts_of(out / "steps.svg")
    for name, scheme in (("all-reduce", None), (choice, best)):
        end = asked.setting().simulate(scheme, 10, 0).end[-1].max()
        assert f"{name}: 10 steps in {duration(end)}" in steps
    assert "worker" in steps


def test_tables_hold_what_each_scheme_takes_and_sends(tmp_path, capsys):
    asked = [*ASKED, "--nodes", "3", "--steps", "5", "--out", str(tmp_path)]
    assert program.main(asked) == 0
    printed = capsys.readouterr().out
    choice = advice_in(tmp_path)["advice"]["choice"]
    assert printed.count(f"\n{choice} *  ") == 2
    printed = printed.replace(f"\n{choice} *  ", f"\n{choice}    ")
    for row in advice_in(tmp_path)["rows"]:
        first, second, *_ = (
            line.removeprefix(row["name"]).split()
            for line in printed.splitlines()
            if line.startswith(f"{row['name']}  ")
        )
        parts = [row[name] for name in ("step", "compute", "exposed", "waiting")]
        assert first == [*(f"{1e3 * x:.1f}" for x in parts), f"{row['speed_up']:.2f}x"]
        numbers = [
            row["messages"],
            row["worker_bytes"] / 1e6,
            row["node_bytes"] / 1e6,
            row["exchange"] * 1e3,
            row["omega"],
            row["consensus_factor"],
            row["consensus_factor_per_second"],
        ]
        np.testing.assert_allclose(
            [float(cell) for cell in second[:7]], numbers, rtol=6e-3, atol=0.05
        )
        exact = row["exact_after"]
        assert second[7:] == ([] if exact is None else [str(exact)])
    assert "\ndoes not fit\n" in printed
    for name, reason in advice_in(tmp_path)["does_not_fit"].items():
        assert f"\n  {name}: {reason}\n" in printed


@pytest.mark.slow
def test_with_all_reduce_the_best_topology_is_drawn_too(tmp_path, capsys):
    slow = [*ASKED, "--compute", "60s", "--steps", "10", "--out", str(tmp_path)]
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        assert program.main([*slow, "--sigma", "0"]) == 0
    assert "\nadvice: all-reduce\n" in capsys.readouterr().out
    written = advice_in(tmp_path)
    assert written["advice"]["choice"] == "all-reduce"
    best = written["advice"]["reason"].split("the best, ")[1].split(", is")[0]
    assert best in [row["name"] for row in written["rows"]]
    assert f"{best}: 10 steps in" in texts_of(tmp_path / "steps.svg")


def test_for_one_worker_nothing_is_drawn(tmp_path, capsys):
    one = [*ASKED, "--nodes", "1", "--workers-per-node", "1", "--steps", "3"]
    del one[one.index("--inside") : one.index("--compute")]
    assert program.main([*one, "--out", str(tmp_path)]) == 0
    assert "There is one worker" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["advice.json"]
    # Inside its node it has no peer, and sends at a rate that is no number in JSON.
    assert advice_in(tmp_path)["cluster"]["inside_bytes_per_second"] is None


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--between", "25"), "error: between must be a number with one of the units"),
        (("--inside", "0gbit"), "error: inside must be positive, got '0gbit'"),
        (("--steps", "0"), "error: steps must be positive, got 0"),
        (("--seed", "-1"), "error: seed must be at least 0, got -1"),
        (("--nodes", "2049"), "error: advice is for up to 4,096 workers, got 4,098"),
        (("--late-workers", "2"), "error: late_workers and late_by need each other"),
        (("--out", str(TINY_FILE)), f"error: .*File exists: '{TINY_FILE}'"),
        (("--measure", "no.py"), "^error: there is no config file no.py$"),
        (("--measure", "README.md"), "^error: a config file must be a Python file"),
    ],
)
def test_bad_input_gets_a_sentence(arguments, sentence, tmp_path):
    given = ASKED if arguments[0] != "--measure" else []
    with pytest.raises(SystemExit, match=sentence):
        program.main([*given, "--out", str(tmp_path), *arguments])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "--nodes"),
        ((*ASKED, "--node", "3"), "--node"),
        ((*ASKED, "--overlap", "often"), "often"),
        ((*ASKED, "--steps", "many"), "many"),
        (("--measure", str(TINY_FILE), "--measured-stps", "3"), "--measured-steps"),
    ],
)
def test_a_wrong_command_line_gets_a_sentence(arguments, words, capsys):
    with pytest.raises(SystemExit) as ended:
        program.main(list(arguments))
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert words in said
    assert "Traceback" not in said


def test_progress_is_shown_to_those_who_look():
    for looks in (True, False):
        seen = io.StringIO()
        console = Console(file=seen, force_terminal=looks, width=80)
        assert list(over([1, 2], "simulating", console)) == [1, 2]
        assert ("simulating" in seen.getvalue()) == looks
