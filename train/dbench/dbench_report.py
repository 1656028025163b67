"""The report of a grid: tables, claims, figures, and CSV files."""

import html
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from decentjax.topology import matrices
from train.cli.tables import label, markdown, to_csv, words
from train.dbench.cells import Result, Training
from train.dbench.claims import MEASURE, Claim, accuracy, claims, early, late
from train.figures.dbench_figure import draw_dispersion, draw_points
from train.figures.page import Section, html_table, write_page
from train.figures.style import Format
from train.plain_files import write_whole
from train.run.method import build_method
from train.study.comparison import spread
from train.tasks.task import Headline


def write_report(
    title: str, results: Sequence[Result], training: Training, kind: Format
) -> str:
    """Writes report.html, dbench.md and the CSV files; returns the text.

    Args:
      title: title of the page.
      results: the result of each cell.
      training: how they were trained.
      kind: format of the figures that are files.
    """
    headline, out = training.task.headline, training.out
    heads, rows = table(results, training)
    said = [_say(claim) for claim in claims(results, headline)]
    lines = [markdown(heads, rows), *said]
    write_whole(out / "dbench.md", "\n\n".join(lines) + "\n")
    done = [one for one in results if one.outcome is not None]
    write_whole(out / "dbench.csv", to_csv(_scores(done, training)))
    write_whole(out / "dispersion.csv", to_csv(_dispersion(done, training.seeds)))
    items = "".join(f"<li>{html.escape(line)}</li>" for line in said)
    text = f"{html_table(heads, rows)}<ul>{items}</ul>"
    sections = [Section("Results", None, text), *_figures(done, headline)]
    page = out / "report.html"
    write_page(title, sections, page, out / "figures", kind)
    return "\n\n".join([*lines, f"page    {page}"])


def table(
    results: Sequence[Result], training: Training
) -> tuple[list[str], list[list[str]]]:
    """Returns heads and rows: a row for each cell, with two standard deviations."""
    headline, units = training.task.headline, training.task.units
    grid = training.grid
    heads = ["graph", "workers", label(headline.name, units), "worst worker"]
    heads += [label("training_loss", units), "connections", "kB per worker"]
    heads += ["kB per link", "gini, early", "late"]
    heads += [field.rpartition(".")[2] for field in grid.fields]
    rows = []
    for one in results:
        row = [one.cell.graph, str(one.cell.num_workers)]
        if one.outcome is None:
            rows.append([*row, one.why, *[""] * (len(heads) - 3)])
            continue
        of_workers = one.found.workers[headline.name]
        row += [
            spread(accuracy(one, headline)),
            f"{headline.worst(map(headline.worst, of_workers)):.4f}",
            spread(one.found.training_loss),
            _connections(one),
            f"{np.mean(one.found.sent['per worker']) / 1e3:.4g}",
            f"{np.mean(one.found.sent['per link']) / 1e3:.4g}",
            f"{np.mean(early(one)):.2e}",
            f"{np.mean(late(one)):.2e}",
        ]
        rows.append([*row, *(grid.say(one.best.choice) if one.best else [])])
    return heads, rows


def _connections(one: Result) -> str:
    """Connections of a worker, a mean over the steps; of a policy with their range."""
    assert one.cell.config is not None
    mean = f"{np.mean(one.found.sent['connections']):.3g}"
    policy = build_method(one.cell.config).policy
    if policy is None:
        return mean
    found = [(x != 0).sum() / len(x) - 1 for x in matrices(policy.menu)]
    return f"{mean} of {min(found):.3g} to {max(found):.3g}"


def _figures(done: Sequence[Result], headline: Headline) -> list[Section]:
    if not done:
        return []
    most = max(one.cell.num_workers for one in done)
    largest = [one for one in done if one.cell.num_workers == most]
    steps = [step for step, _ in largest[0].found.dispersion]
    means = {one.cell.graph: (steps, _curve(one)) for one in largest}
    text = f"{MEASURE} of the norms over {most} workers"

    def by(title: str, place: str, of: Callable[[Result], float]) -> Section:
        points = {one.cell.graph: [] for one in done}
        for one in done:
            scores = accuracy(one, headline)
            points[one.cell.graph].append((of(one), scores))
        score, joined = words(headline.name), place == "workers"
        return Section(title, draw_points(points, place, score, joined))

    return [
        by("Accuracy by connections", "connections of a worker", _sent("connections")),
        by("Accuracy by bytes", "kB of a worker in a step", _sent("per worker", 1e3)),
        by("Accuracy by scale", "workers", lambda one: one.cell.num_workers),
        Section("Dispersion over time", draw_dispersion(means, text)),
    ]


def _sent(what: str, unit: float = 1.0) -> Callable[[Result], float]:
    def of(one: Result) -> float:
        return float(np.mean(one.found.sent[what])) / unit

    return of


def _curve(one: Result) -> np.ndarray:
    """The dispersion as a mean over seeds and tensors, [rows]."""
    return np.array([np.mean(row[MEASURE]) for _, row in one.found.dispersion])


def _say(claim: Claim) -> str:
    low, high = claim.interval
    seeds = "1 seed"
    if len(claim.values) > 1:
        interval = f"95 % interval {low:+.2f} to {high:+.2f}"
        seeds = f"{interval}, {len(claim.values)} seeds"
    return (
        f"{claim.text}: {claim.verdict}. Rank correlation {np.mean(claim.values):+.2f} "
        f"({seeds}, p = {claim.p_value:.2g}, over {claim.where})."
    )


def _scores(done: Sequence[Result], training: Training) -> Iterator[list[Any]]:
    """Yields a head, and a row for each cell and seed."""
    headline = training.task.headline
    heads = ["graph", "workers", "seed", headline.name, "training_loss"]
    heads += ["consensus_distance", "connections", "bytes_per_worker", "bytes_per_link"]
    yield [*heads, "early_gini", "late_gini", "chosen"]
    for one in done:
        outcome = one.found
        sent, choice = outcome.sent, one.best.choice if one.best else ()
        columns = zip(
            accuracy(one, headline),
            outcome.training_loss,
            outcome.consensus_distance,
            sent["connections"],
            sent["per worker"],
            sent["per link"],
            early(one),
            late(one),
            strict=True,
        )
        for seed, values in zip(training.seeds, columns, strict=True):
            start = [one.cell.graph, one.cell.num_workers, seed]
            yield [*start, *values, " ".join(choice)]


def _dispersion(done: Sequence[Result], seeds: range) -> Iterator[list[Any]]:
    """Yields a head, and a row for each cell, seed, step and tensor: all measures."""
    head = ["graph", "workers", "seed", "step", "tensor"]
    for one in done:
        for step, measures in one.found.dispersion:
            if head:
                yield [*head, *measures]
                head = []
            values = np.array(list(measures.values()))  # [measures, K, L]
            for row, place in np.ndindex(values.shape[1:]):
                tensor = one.found.tensors[place]
                start = [one.cell.graph, one.cell.num_workers, seeds[row]]
                yield [*start, step, tensor, *values[:, row, place].tolist()]
