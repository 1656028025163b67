"""The race's table and figure."""

from pathlib import Path

from matplotlib.figure import Figure

from decentjax import analysis
from train.bench.race.graphs import graph_of
from train.bench.race.race import (
    ALL_REDUCE,
    DDP,
    STRAGGLER,
    TOPOLOGIES,
    Race,
    Row,
)
from train.job.namespaces import parse_rate


def link_seconds(race: Race, name: str, nodes: int, per_node: int) -> float | None:
    """Returns bytes over rate: what the busiest node's link needs for a step."""
    num_workers = nodes * per_node
    rate = parse_rate(race.rate)
    assert rate is not None
    model = race.work.model_bytes
    if name in (ALL_REDUCE, DDP):
        return 2 * (1 - 1 / num_workers) * model * 8 / rate
    kind, _, graph = name.partition(": ")
    graph = {peer: ours for ours, peer in TOPOLOGIES.items()}.get(graph, graph)
    if kind not in ("exchange alone", "in the step", "in the background", "Decent-DP"):
        return None
    sent = analysis.traffic(graph_of(graph, num_workers, per_node), model, per_node)
    # Each node's link, over a period: the steps in which it is idle are its own.
    busiest = max(sum(step.node_bytes[k] for step in sent) for k in range(nodes))
    return busiest / len(sent) * 8 / rate


def table(race: Race, cluster: str, rows: list[Row]) -> str:
    """Returns a Markdown table of one cluster."""
    nodes, per_node = map(int, cluster.split("x"))
    seconds = {row.name: row.seconds for row in rows}
    head = [
        f"{nodes} nodes x {per_node}, {race.rate}",
        "s/step (of the rounds)",
        "/ limit",
        "/ bytes over rate",
        "/ Decent-DP",
        "/ DDP",
    ]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for row in rows:
        if row.name.endswith(STRAGGLER):
            continue
        bytes_over_rate = link_seconds(race, row.name, nodes, per_node)
        limit = _limit(row.name, seconds)
        peer = seconds.get(f"Decent-DP: {TOPOLOGIES.get(_graph(row.name), '')}")
        decentralized = row.name.startswith("in the")
        cells = [
            row.name,
            f"{row.seconds:.3f} ({min(row.rounds):.3f} to {max(row.rounds):.3f})",
            _ratio(row.seconds, limit),
            _ratio(row.seconds, bytes_over_rate),
            _ratio(row.seconds, peer if decentralized else None),
            _ratio(row.seconds, seconds.get(DDP) if decentralized else None),
        ]
        if row.name == ALL_REDUCE:
            cells[-1] = _ratio(row.seconds, seconds.get(DDP))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines + _straggler_lines(race, seconds))


def _straggler_lines(race: Race, seconds: dict[str, float]) -> list[str]:
    late = [name for name in seconds if name.endswith(STRAGGLER)]
    if not late:
        return []
    lines = [
        "",
        f"| worker t mod N late by {race.straggler:g} s | s/step | without "
        "| let through |",
        "|---|---|---|---|",
    ]
    for name in late:
        before = seconds[name.removesuffix(STRAGGLER)]
        share = (seconds[name] - before) / race.straggler
        lines.append(
            f"| {name.removesuffix(STRAGGLER)} | {seconds[name]:.3f} | {before:.3f} "
            f"| {share:.0%} |"
        )
    return lines


def draw(race: Race, results: dict[str, list[Row]], path: Path) -> None:
    """Draws a bar for each contestant, and the limit that it could reach."""
    figure = Figure(figsize=(8, 3.6 * len(results)), layout="constrained")
    rows_of_axes = figure.subplots(len(results), sharex=True, squeeze=False)[:, 0]
    for axes, (cluster, rows) in zip(rows_of_axes, results.items(), strict=True):
        seconds = {row.name: row.seconds for row in rows}
        shown = [row for row in rows if not row.name.endswith(STRAGGLER)]
        for place, row in enumerate(shown):
            ours = row.name.startswith(("in the", ALL_REDUCE))
            alone = "alone" in row.name
            color = "0.75" if alone else "tab:blue" if ours else "tab:orange"
            axes.barh(place, row.seconds, color=color)
            low, high = min(row.rounds), max(row.rounds)
            axes.plot([low, high], [place, place], color="black", linewidth=1)
            limit = _limit(row.name, seconds)
            if limit is not None:
                axes.plot([limit, limit], [place - 0.4, place + 0.4], color="tab:red")
        axes.set_yticks(range(len(shown)), [row.name for row in shown])
        axes.invert_yaxis()
        axes.set(title=f"{cluster.replace('x', ' nodes x ')} workers, {race.rate}")
    rows_of_axes[-1].set_xlabel("s/step; in red the limit")
    figure.savefig(path, metadata={"Date": None})


def _graph(name: str) -> str:
    return name.partition(": ")[2]


def _limit(name: str, seconds: dict[str, float]) -> float | None:
    """The larger of compute alone and the same exchange alone."""
    compute = seconds.get("compute alone")
    exchange = seconds.get(f"exchange alone: {_graph(name)}")
    if not name.startswith("in the") or compute is None or exchange is None:
        return None
    return max(compute, exchange)


def _ratio(seconds: float, reference: float | None) -> str:
    return "" if not reference else f"{seconds / reference:.2f}"
