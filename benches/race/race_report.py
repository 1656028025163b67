"""The race's tables, and the bars of its figure."""

from statistics import median
from typing import NamedTuple

from benches.race.contestants import Contestant, Scheme, graph_of
from benches.race.race_figure import Bar
from decentjax import analysis
from train.cli.tables import markdown
from train.job.namespaces import EmulatedCluster, parse_rate

PARTS_OF_A_STEP = (
    Scheme.COMPUTE,
    Scheme.EXCHANGE,
    Scheme.PEERS_EXCHANGE,
    Scheme.TORCH_COMPUTE,
)


class Timing(NamedTuple):
    """Step times of a contestant.

    Args:
      contestant: contestant that was measured.
      rounds: seconds per step of each round, means over steps and workers, [rounds].
    """

    contestant: Contestant
    rounds: list[float]

    @property
    def seconds(self) -> float:
        return median(self.rounds)


def link_seconds(
    contestant: Contestant, cluster: EmulatedCluster, model_bytes: float
) -> float | None:
    """Returns bytes over rate: the seconds of a step that the busiest link needs."""
    # Both average all gradients, which sends as much as the mean of all models.
    flat = contestant.scheme in (Scheme.ALL_REDUCE, Scheme.DDP)
    # Without waiting a newer model replaces one that the link has not carried.
    if contestant.scheme == Scheme.NO_WAIT or not (contestant.graph or flat):
        return None
    per_node, rate = cluster.workers_per_node, parse_rate(cluster.rate)
    assert rate is not None
    topology = graph_of(contestant.graph, cluster.num_workers, per_node)
    sent = [x.node_bytes for x in analysis.traffic(topology, model_bytes, per_node)]
    # Over a period, as each node's link is idle in steps of its own.
    return max(map(sum, zip(*sent, strict=True))) / len(sent) / rate


def size(cluster: EmulatedCluster, devices: int) -> str:
    """Returns the size of a cluster, such as "4 nodes x 1 of 2 devices"."""
    each = cluster.processes_per_worker
    of = f" of {devices} devices" if devices > 1 else ""
    split = f" in {each} processes" if each > 1 else ""
    return f"{cluster.nodes} nodes x {cluster.workers_per_node}{of}{split}"


def table(
    cluster: EmulatedCluster,
    timings: list[Timing],
    model_bytes: float,
    straggler: float,
    devices: int = 1,
) -> str:
    """Returns Markdown: the step times of one cluster, and the effect of stragglers.

    Args:
      cluster: emulated cluster.
      timings: step times of the contestants, with and without a straggler.
      model_bytes: size of the model.
      straggler: delay in the turns with a straggler, in seconds.
      devices: devices of each worker.
    """
    seconds = {x.contestant: x.seconds for x in timings}
    ddp = seconds.get(Contestant(Scheme.DDP))
    rows = []
    for timing in timings:
        contestant = timing.contestant
        if contestant.straggler:
            continue
        # The same graph by Decent-DP, and DDP for all that train a model.
        peer = seconds.get(Contestant(Scheme.DECENT_DP, contestant.graph))
        gossip = contestant.is_gossip
        link = link_seconds(contestant, cluster, model_bytes)
        references = (
            limit(contestant, seconds, link),
            link,
            peer if gossip else None,
            ddp if gossip or contestant.scheme == Scheme.ALL_REDUCE else None,
        )
        low, high = min(timing.rounds), max(timing.rounds)
        rows.append(
            [
                contestant,
                f"{timing.seconds:.3f} ({low:.3f} to {high:.3f})",
                *(f"{timing.seconds / x:.2f}" if x else "" for x in references),
            ]
        )
    head = [
        f"{size(cluster, devices)}, {cluster.rate}",
        "s/step (of the rounds)",
        "/ limit",
        "/ bytes over rate",
        "/ Decent-DP",
        "/ DDP",
    ]
    late_rows = []
    for contestant, late in seconds.items():
        if contestant.straggler:
            plain = contestant._replace(straggler=False)
            # Late by 0.5 s at each step, but each worker in 1 of N steps: without
            # barriers a step takes 0.5 s / N longer, with them the whole 0.5 s.
            share = f"{(late - seconds[plain]) / straggler:.0%}"
            late_rows.append([plain, f"{late:.3f}", f"{seconds[plain]:.3f}", share])
    late_head = [f"worker t mod N late by {straggler:g} s", "s/step", "without"]
    tables = [markdown(head, rows), markdown([*late_head, "passed on"], late_rows)]
    return "\n\n".join(tables[: 2 if late_rows else 1])


def bars(
    cluster: EmulatedCluster, timings: list[Timing], model_bytes: float
) -> list[Bar]:
    """Returns the bars of one cluster's figure: the contestants without a straggler."""
    seconds = {x.contestant: x.seconds for x in timings}
    return [
        Bar(
            str(timing.contestant),
            timing.seconds,
            (min(timing.rounds), max(timing.rounds)),
            limit(
                timing.contestant,
                seconds,
                link_seconds(timing.contestant, cluster, model_bytes),
            ),
            colour(timing.contestant),
        )
        for timing in timings
        if not timing.contestant.straggler
    ]


def limit(
    contestant: Contestant, seconds: dict[Contestant, float], link: float | None
) -> float | None:
    """Returns the larger of compute alone and the same exchange alone.

    That of a step that does not wait is compute alone. For an exchange that is not
    measured alone it is bytes over rate, `link`.
    """
    compute = seconds.get(Contestant(Scheme.COMPUTE))
    if not (contestant.is_gossip or contestant.scheme == Scheme.NO_WAIT):
        return None
    if contestant.scheme == Scheme.NO_WAIT:
        return compute
    by_peers = contestant.scheme == Scheme.PEERS
    alone = Scheme.PEERS_EXCHANGE if by_peers else Scheme.EXCHANGE
    exchange = seconds.get(Contestant(alone, contestant.graph), link)
    return max(compute, exchange) if compute and exchange else None


def colour(contestant: Contestant) -> str:
    """Returns the colour of a contestant's bar: ours, theirs, or a part of a step."""
    if contestant.scheme in PARTS_OF_A_STEP:
        return "0.75"
    return "tab:blue" if contestant.team == "jax" else "tab:orange"
