"""The advice as tables, sentences, JSON and a figure."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure
from rich.console import Console

from decentjax import Topology
from train.advise.rank import Findings, Prediction
from train.advise.rounds_advice import RoundsRow
from train.advise.setting import Setting
from train.cli.tables import aligned, counted, write_json
from train.figures.timeline_figure import draw_timelines
from train.network import duration
from train.store.timeline import spans_of

DRAWN_STEPS, DRAWN_WORKERS = 10, 8
COLUMNS = (
    "exposed: communication that compute does not hide. waiting: for the slowest "
    "worker. omega: time of an exchange over that of an all-reduce. factor: what "
    "remains at worst of the models' distance from their mean, after a step and after "
    "a second; 0 if a period of the graph makes all models the exact mean. exact "
    "after: the number of exchanges that this takes. *: the advice."
)
ROUNDS = (
    "Each worker trains alone, and every few steps they average: DiLoCo over all "
    "models, and waits; one_peer_exponential with one peer, and with --overlap "
    "background merges at the next round. The rarer, the more steps to one loss. An "
    "encoded mean of all is a message from each worker to each: from eight workers on "
    "int8 sends more than none, and of more than 64 it is left out. int2 and top_k "
    "drop too much to send models: they have DiLoCo alone. advice.json has the options "
    "of each row."
)


def say(found: Findings, rounds: Sequence[RoundsRow], console: Console) -> None:
    """Prints the question, the predictions and the advice.

    Args:
      found: the predictions.
      rounds: predictions of methods that average every few steps.
      console: where they are printed.
    """
    setting, choice = found.setting, found.advice.choice
    cluster = setting.cluster
    console.print(
        f"{counted(cluster.num_nodes, 'node')} x "
        f"{counted(cluster.workers_per_node, 'worker')}, a model of "
        f"{setting.job.model_bytes / 1e6:.4g} MB\n"
        f"gamma = {found.gamma:.3g} (all-reduce over compute time), "
        f"sigma = {found.sigma:.2g} (deviation of the compute time over its mean)"
    )
    for line in setting.facts:
        console.print(line)
    _say_schemes(found, console)
    console.print(f"\n{COLUMNS}")
    _say_rounds(rounds, console)
    console.print(f"\n{ROUNDS}")
    if found.unfit:
        console.print("\ndoes not fit")
        for name, reason in found.unfit.items():
            console.print(f"  {name}: {reason}")
    console.print(f"\nadvice: {choice.name}\n  {found.advice.reason}")
    if choice is not found.rows[0]:
        console.print(
            "  This is the time of a step: at equal steps all-reduce mostly has the "
            "lower loss."
        )
    console.print(f"  {_command(setting, choice.flags)}")


def _say_schemes(found: Findings, console: Console) -> None:
    """Prints times, and traffic and consensus, of the fastest first."""
    choice = found.advice.choice
    times, traffic = [], []
    for row in sorted(found.rows, key=lambda row: row.step):
        name = f"{row.name} *" if row is choice else row.name
        seconds = row.step, row.compute, row.exposed, row.waiting
        cells = [f"{1e3 * x:.1f}" for x in seconds]
        times.append([name, *cells, f"{row.speed_up:.2f}x"])
        cells = [
            f"{row.messages:.4g}",
            f"{row.worker_bytes / 1e6:.4g}",
            f"{row.node_bytes / 1e6:.4g}",
            f"{1e3 * row.exchange:.1f}",
            f"{row.omega:.2f}",
            _factor(row.consensus_factor),
            _factor(row.consensus_factor_per_second),
            "" if row.exact_after is None else str(row.exact_after),
        ]
        traffic.append([name, *cells])
    heads = ["", "step", "compute", "exposed", "waiting", "speed-up"]
    bold, title = f"{choice.name} *", "time per step, ms"
    console.print("", aligned(heads, times, bold=bold, title=title), sep="\n")
    heads = ["", "messages", "MB of worker", "MB of card", "exchange, ms", "omega"]
    heads += ["factor per step", "per second", "exact after"]
    title = "traffic per step of the busiest worker and card, and consensus"
    console.print("", aligned(heads, traffic, bold=bold, title=title), sep="\n")


def _say_rounds(rounds: Sequence[RoundsRow], console: Console) -> None:
    cells = [
        [
            row.name,
            str(row.every_steps),
            row.codec,
            f"{1e3 * row.step:.1f}",
            f"{row.speed_up:.2f}x",
            f"{row.worker_bytes / 1e6:.4g}",
        ]
        for row in rounds
    ]
    heads = ["", "every", "codec", "ms per step", "speed-up", "MB of worker per step"]
    title = "rounds: averaging every few steps"
    console.print("", aligned(heads, cells, 3, title=title), sep="\n")


def write_advice(path: Path, found: Findings, rounds: Sequence[RoundsRow]) -> None:
    """Writes what `say` prints."""
    setting, advice = found.setting, found.advice
    facts = {
        "cluster": setting.cluster,
        "model_bytes": setting.job.model_bytes,
        "overlap": setting.overlap,
        "facts": setting.facts,
        "gamma": found.gamma,
        "sigma": found.sigma,
        "rows": found.rows,
        "rounds": rounds,
        "does_not_fit": found.unfit,
        "advice": {"choice": advice.choice.name, "reason": advice.reason},
    }
    write_json(path, facts)


def draw_steps(setting: Setting, row: Prediction, topology: Topology) -> Figure:
    """Draws a few steps of a few workers: all-reduce above, the topology below."""
    drawn = min(DRAWN_WORKERS, setting.cluster.num_workers)
    # Both on one scale of time, that of the slower one.
    timelines, seconds = {}, 0.0
    for name, scheme in (("all-reduce", None), (row.name, topology)):
        times = setting.simulate(scheme, DRAWN_STEPS, 0)
        end = float(times.end[-1].max())
        title = f"{name}: {DRAWN_STEPS} steps in {duration(end)}"
        timelines[title] = spans_of(times, drawn)
        seconds = max(seconds, end)
    return draw_timelines(timelines, seconds, "worker")


def _command(setting: Setting, flags: str) -> str:
    """The command that trains as the advice says."""
    cluster = setting.cluster
    start = f"decentjax launch -n {cluster.num_workers} CONFIG.py"
    if cluster.num_nodes > 1:
        start = "srun decentjax train CONFIG.py --distributed.enabled"
    return (
        f"{start} --workers.num-workers {cluster.num_workers} "
        f"--workers.workers-per-node {cluster.workers_per_node} {flags}"
    )


def _factor(factor: float | None) -> str:
    if factor is None:
        return "?"
    # Three digits would show 0.9999 as 1, which never reaches consensus.
    return f"1 - {1 - factor:.1g}" if 0.9995 <= factor < 1 else f"{factor:.3g}"
