"""Tables and figure of the runtime model's comparisons."""

import itertools
from collections.abc import Sequence
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from benches.model import diloco, emulated, imbalance, published, simulator
from benches.model.model_figure import Panel, draw_predictions
from benches.model.published import EXP, FITTED, SCHEMES, SGP, Line
from benches.results import write_results
from train.cli.tables import markdown
from train.figures.style import to_svg

ORDERED = 1.1  # Emulated schemes whose times differ by a larger factor have an order.


class Results(NamedTuple):
    """Rows of each part; empty for parts that were not requested.

    Args:
      emulated: settings on emulated clusters.
      published: rows of Fig 6 of paper 1.
      imbalance: schemes and sizes of paper 2.
      diloco: shares of time spent computing.
      simulator: times of simulations.
    """

    emulated: list[emulated.Comparison]
    published: list[published.Line]
    imbalance: list[imbalance.ImbalanceRow]
    diloco: list[diloco.DilocoRow]
    simulator: list[simulator.SimulationTime]


def write(bench: Any, results: Results) -> str:
    """Writes the tables, the figure and JSON, and returns what `main` prints."""
    tables = (
        emulated_table,
        published_table,
        imbalance_table,
        diloco_table,
        simulator_table,
    )
    parts: Any = zip(tables, results, strict=True)
    text = "\n\n".join(table(rows) for table, rows in parts if rows)
    facts = {"bench": bench, **results._asdict()}
    figure = draw_predictions(_panels(results))
    return write_results(bench.out, "model", facts, text, to_svg(figure))


def emulated_table(rows: list[emulated.Comparison]) -> str:
    """Returns Markdown: predicted and measured seconds, and what they say."""
    schemes = list(dict.fromkeys(row.scheme for row in rows))
    table = markdown(
        ["predicted / measured, s", *schemes],
        [
            [
                f"{cluster}, {rate}" + (f", late by {late:g} s" if late else ""),
                *(
                    f"{cells[x].predicted:.3f} / {cells[x].measured:.3f}"
                    if x in cells
                    else ""
                    for x in schemes
                ),
            ]
            for (cluster, rate, late), cells in _settings(rows).items()
        ],
    )
    errors = [row.error for row in rows]
    num_ordered, wrong = compare_orders(rows)
    return (
        f"{table}\n\n{len(rows)} settings: median error {median(errors):.1%}, largest "
        f"{max(errors):.1%}. Of {num_ordered} pairs of schemes in one setting "
        f"that differ by more than {ORDERED - 1:.0%}, {len(wrong)} were predicted in "
        f"the other order{': ' if wrong else ''}{'; '.join(wrong)}."
    )


def published_table(lines: list[Line]) -> str:
    """Returns Markdown: predictions and measurements, and where they differ."""
    heads = [f"{s} (fitted)" if s in FITTED else s for s in SCHEMES]
    head = ["model / measured, ms", *heads, "AllReduce / AER", "Exp, two cards"]
    rows = []
    for line in lines:
        predicted, measured = line.speed_ups()
        error = f"{predicted / measured - 1:+.0%}"
        cells = [f"{line.predicted[s]:.1f} / {line.measured[s]:.1f}" for s in SCHEMES]
        cells.append(f"{predicted:.2f} / {measured:.2f} ({error})")
        cells.append(f"{line.two_cards[EXP]:.1f}")
        rows.append([_place(line), *cells])
    # The ratio of two ratios, either way: 15 % too fast or too slow.
    logs = [abs(np.log(np.divide(*line.speed_ups()))) for line in lines]
    close = sum(log < np.log(1.15) for log in logs)
    few = [scheme for scheme in SCHEMES if scheme != SGP]
    return "\n".join(
        [
            markdown(head, rows),
            "",
            f"- Fitted speed-up of AER over all-reduce within 15 %: {close} of "
            f"{len(lines)}.",
            f"- Order of all: {_order(lines, SCHEMES, two_cards=False)}",
            f"- Order without SGP: {_order(lines, few, two_cards=False)}",
            f"- Order without SGP, two cards: {_order(lines, few, two_cards=True)}",
            f"- Measured faster than bytes over rate: {_too_fast(lines)}.",
            *(
                f"- Fitted to {name}: compute {1e3 * x.fixed:.1f} ms + {x.shared:.3g} s"
                f" / N, sigma {x.sigma:.3f}."
                for name, x in {line.cluster: line.fitted for line in lines}.items()
            ),
        ]
    )


def imbalance_table(lines: list[imbalance.ImbalanceRow]) -> str:
    """Returns Markdown: throughputs, and WAGMA's over each."""
    return markdown(
        ["predicted / published", "1000 images/s", "WAGMA over it"],
        [
            [
                f"{line.scheme}, N = {line.num_workers}",
                f"{line.predicted:.1f} / {line.measured:.1f}",
                f"{line.predicted_ratio:.2f} / {line.measured_ratio:.2f}",
            ]
            for line in lines
        ],
    )


def diloco_table(rows: list[diloco.DilocoRow]) -> str:
    """Returns Markdown: DiLoCo's shares of time spent computing."""
    cells: dict[int, list[str]] = {}
    for row in rows:
        shares = [f"{row.predicted:.1%}", f"{row.measured:.1%}"]
        shares += [] if row.emulated is None else [f"{row.emulated:.1%}"]
        cells.setdefault(row.num_steps, []).append(" / ".join(shares))
    head = [
        "predicted / published / emulated",
        *(f"{rate} Mbit/s" for rate in diloco.RATES),
    ]
    table = markdown(head, [[f"H = {x}", *found] for x, found in cells.items()])
    ratios = [row.predicted / row.measured for row in rows]
    return (
        f"{table}\n\nA local step of {1e3 * diloco.fitted():.1f} ms, from the cell of "
        f"H = {diloco.FITTED[0]} at {diloco.FITTED[1]} Mbit/s; predicted over "
        f"published {min(ratios):.2f} to {max(ratios):.2f}."
    )


def simulator_table(rows: list[simulator.SimulationTime]) -> str:
    """Returns Markdown: seconds of each simulation."""
    return markdown(
        ["simulated", "workers", f"s for {simulator.STEPS} steps"],
        [[row.scheme, f"{row.num_workers:,}", f"{row.seconds:.1f}"] for row in rows],
    )


def compare_orders(rows: list[emulated.Comparison]) -> tuple[int, list[str]]:
    """Returns the number of pairs of schemes in one setting that have an order.

    And those of them whose predicted order is not the measured one.
    """
    pairs = [
        (slow, fast)
        for setting in _settings(rows).values()
        for slow, fast in itertools.permutations(setting.values(), 2)
        if slow.measured > ORDERED * fast.measured
    ]
    wrong = [
        f"{slow.scheme} over {fast.scheme} ({slow.cluster}, {slow.rate}, late by "
        f"{slow.straggler:g} s)"
        for slow, fast in pairs
        if slow.predicted <= fast.predicted
    ]
    return len(pairs), wrong


def _settings(
    rows: list[emulated.Comparison],
) -> dict[tuple[str, str, float], dict[str, emulated.Comparison]]:
    """The rows by cluster, rate and straggler, then by scheme."""
    settings = {}
    # A cell is missing where a graph runs on other clusters only.
    for row in rows:
        cells = settings.setdefault((row.cluster, row.rate, row.straggler), {})
        cells[row.scheme] = row
    return settings


def _panels(results: Results) -> list[Panel]:
    emulations: dict[str, list[tuple[float, float]]] = {}
    for row in results.emulated:
        emulations.setdefault(row.scheme, []).append((row.measured, row.predicted))
    # No schemes where the part was not requested, so that the legend has none.
    fig_6 = {
        scheme: [(x.measured[scheme], x.predicted[scheme]) for x in results.published]
        for scheme in SCHEMES
        if results.published
    }
    return [
        Panel("emulated clusters", "s", 0.1, emulations),
        Panel("paper 1, Fig 6, one card", "ms", 0.15, fig_6),
    ]


def _order(lines: list[Line], schemes: Sequence[str], two_cards: bool) -> str:
    wrong = {
        _place(line): pairs
        for line in lines
        if (pairs := line.wrong(line.two_cards if two_cards else {}, schemes))
    }
    where = "".join(f"; {place}: {', '.join(x)}" for place, x in wrong.items())
    return f"right in {len(lines) - len(wrong)} of {len(lines)}{where}."


def _too_fast(lines: list[Line]) -> str:
    found = (
        f"{name}, {_place(line)}: {line.measured[name]:.0f} ms, bytes over rate "
        f"{line.at_least[name]:.0f} ms"
        for line in lines
        for name in (SGP, EXP)
        if line.measured[name] < line.at_least[name]
    )
    return "; ".join(found) or "none"


def _place(line: Line) -> str:
    return f"{line.cluster}, N = {line.num_workers}"
