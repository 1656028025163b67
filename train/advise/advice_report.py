"""The advice as tables, sentences, JSON, and a page with figures."""

import dataclasses
import html
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure
from rich.console import Console

from decentjax import Topology, runtime
from train.advise.rank import Findings, Prediction
from train.advise.rounds_advice import RoundsRow
from train.advise.setting import Setting
from train.cli.progress import over
from train.cli.tables import aligned, counted, write_json
from train.figures.advice_figure import draw_speed_ups
from train.figures.page import Section, html_table, write_page
from train.figures.timeline_figure import draw_timelines
from train.network import duration
from train.store.timeline import spans_of

GAMMAS = np.geomspace(0.03, 10, 11)
SIGMAS = np.linspace(0, 0.4, 7)
DRAWN_STEPS, DRAWN_WORKERS = 10, 8
MAP_STEPS, MAP_SKIPPED = 72, 12  # Simulated steps of each point.
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


class Cells(NamedTuple):
    """A table, for the terminal and for the page.

    Args:
      title: title of the table.
      heads: heads of its columns.
      rows: cells of its rows.
    """

    title: str
    heads: list[str]
    rows: list[list[str]]


def ranked(found: Findings) -> list[tuple[str, Prediction]]:
    """The rows by the time of a step, with their names; a star marks the advice."""
    choice = found.advice.choice.name
    return [
        (f"{row.name} *" if row.name == choice else row.name, row)
        for row in sorted(found.rows, key=lambda row: row.step)
    ]


def times_table(rows: Sequence[tuple[str, Prediction]]) -> Cells:
    """Returns the table of step times."""
    cells = [
        [
            name,
            f"{1e3 * row.step:.1f}",
            f"{1e3 * row.compute:.1f}",
            f"{1e3 * row.exposed:.1f}",
            f"{1e3 * row.waiting:.1f}",
            f"{row.speed_up:.2f}x",
        ]
        for name, row in rows
    ]
    heads = ["", "step", "compute", "exposed", "waiting", "speed-up"]
    return Cells("time per step, ms", heads, cells)


def traffic_table(rows: Sequence[tuple[str, Prediction]]) -> Cells:
    """Returns the table of traffic and consensus."""
    cells = [
        [
            name,
            f"{row.messages:.4g}",
            f"{row.worker_bytes / 1e6:.4g}",
            f"{row.node_bytes / 1e6:.4g}",
            f"{1e3 * row.exchange:.1f}",
            f"{row.omega:.2f}",
            _factor(row.consensus_factor),
            _factor(row.consensus_factor_per_second),
            "" if row.exact_after is None else str(row.exact_after),
        ]
        for name, row in rows
    ]
    heads = ["", "messages", "MB of worker", "MB of card", "exchange, ms", "omega"]
    heads += ["factor per step", "per second", "exact after"]
    title = "traffic per step of the busiest worker and card, and consensus"
    return Cells(title, heads, cells)


def rounds_table(rows: Sequence[RoundsRow]) -> Cells:
    """Returns the table of methods that average every few steps."""
    cells = [
        [
            row.name,
            str(row.every_steps),
            row.codec,
            f"{1e3 * row.step:.1f}",
            f"{row.speed_up:.2f}x",
            f"{row.worker_bytes / 1e6:.4g}",
        ]
        for row in rows
    ]
    heads = ["", "every", "codec", "ms per step", "speed-up", "MB of worker per step"]
    return Cells("rounds: averaging every few steps", heads, cells)


def say(found: Findings, rounds: Sequence[RoundsRow], console: Console) -> None:
    """Prints the question, the predictions and the advice.

    Args:
      found: the predictions.
      rounds: those of methods that average every few steps.
      console: where they are printed.
    """
    for line in question(found):
        console.print(line)
    choice, rows = found.advice.choice, ranked(found)
    for title, heads, cells in (times_table(rows), traffic_table(rows)):
        table = aligned(heads, cells, bold=f"{choice.name} *", title=title)
        console.print("", table, sep="\n")
    console.print(f"\n{COLUMNS}")
    title, heads, cells = rounds_table(rounds)
    console.print("", aligned(heads, cells, 3, title=title), sep="\n")
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
    console.print(f"  {command_of(found)}")


def question(found: Findings) -> list[str]:
    """Returns the lines that say for which cluster and job the advice is."""
    setting, cluster = found.setting, found.setting.cluster
    return [
        f"{counted(cluster.num_nodes, 'node')} x "
        f"{counted(cluster.workers_per_node, 'worker')}, a model of "
        f"{setting.job.model_bytes / 1e6:.4g} MB",
        f"gamma = {found.gamma:.3g} (all-reduce over compute time), "
        f"sigma = {found.sigma:.2g} (deviation of the compute time over its mean)",
        *setting.facts,
    ]


def command_of(found: Findings) -> str:
    """Returns the command that trains as the advice says."""
    return _command(found.setting, found.advice.choice.flags)


def write_advice_page(
    out: Path,
    found: Findings,
    rounds: Sequence[RoundsRow],
    figures: Sequence[Section],
) -> None:
    """Writes advice.html, with the advice first, and the figures as files too."""
    choice, _, reason = found.advice
    lines = "<br>".join(map(html.escape, question(found)))
    unfit = [[name, reason] for name, reason in found.unfit.items()]
    sections = [
        Section(
            f"Advice: {choice.name}",
            None,
            f"<p>{html.escape(reason)}</p><pre>{html.escape(command_of(found))}</pre>"
            f"<p>{lines}</p>",
        ),
        *(
            Section(title[0].upper() + title[1:], None, html_table(heads, cells))
            for title, heads, cells in (
                times_table(ranked(found)),
                traffic_table(ranked(found)),
                rounds_table(rounds),
            )
        ),
        Section("Columns", None, f"<p>{html.escape(COLUMNS)}</p><p>{ROUNDS}</p>"),
        *figures,
    ]
    if unfit:
        sections.append(Section("Does not fit", None, html_table(["", ""], unfit)))
    write_page("Topologies on your cluster", sections, out / "advice.html", out)


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


def speed_ups(setting: Setting, topology: Topology, console: Console) -> np.ndarray:
    """Returns the topology's speed-up over all-reduce, [len(SIGMAS), len(GAMMAS)].

    The cluster stays, the compute times are gamma distributed with other means and
    deviations.
    """
    whole = setting.exchange_seconds(None)
    ratios = []
    points = list(itertools.product(SIGMAS, GAMMAS))
    for sigma, gamma in over(points, "drawing the map", console):
        # gamma is whole over compute, so this compute time has the wanted gamma.
        job = dataclasses.replace(
            setting.job, compute=runtime.gamma(whole / gamma, sigma)
        )
        point = dataclasses.replace(setting, job=job)
        instead, step = (
            point.simulate(scheme, MAP_STEPS, 0).seconds_per_step(MAP_SKIPPED)
            for scheme in (None, topology)
        )
        ratios.append(instead / step)
    return np.reshape(ratios, (len(SIGMAS), len(GAMMAS)))


def draw_map(
    found: Findings, row: Prediction, topology: Topology, console: Console
) -> Figure:
    """Draws a topology's speed-up over gamma and sigma, and the setting's point."""
    cluster = found.setting.cluster
    return draw_speed_ups(
        GAMMAS,
        SIGMAS,
        speed_ups(found.setting, topology, console),
        (found.gamma, found.sigma),
        row.speed_up,
        f"{row.name} on {counted(cluster.num_nodes, 'node')} x "
        f"{cluster.workers_per_node}",
    )


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
