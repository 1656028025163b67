"""The table, the statements and the figure of a comparison."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure
from scipy import stats

from train.seeds import SeedsOutcome
from train.tasks.task import Headline

LEVEL = 0.05


class Entry(NamedTuple):
    """A config that has been trained.

    Args:
      name: of the config.
      outcome: of all its seeds.
    """

    name: str
    outcome: SeedsOutcome

    def scores(self) -> dict[str, list[float]]:
        """Of the mean models at the end, one for each seed.

        And the training loss, the mean over the last tenth of the steps.
        """
        last, scores = self.outcome.evaluations[-1]
        losses = [losses for step, losses in self.outcome.losses if step > 0.9 * last]
        training_loss = np.mean(losses, axis=0).tolist()
        return {**scores, **self.outcome.judged, "training_loss": training_loss}


def table(entries: Sequence[Entry]) -> str:
    """Returns a Markdown table: means over the seeds +- two standard deviations."""
    names = list(entries[0].scores())
    head = ["", *names, f"{names[0]} of workers", "consensus distance", "seconds"]
    head = [name.replace("_", " ") for name in head]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for entry in entries:
        scores, outcome = entry.scores(), entry.outcome
        of_workers = np.array(outcome.workers[names[0]])
        cells = [
            entry.name,
            *(_spread(scores[name]) for name in names),
            f"{of_workers.min():.4f} to {of_workers.max():.4f}",
            f"{np.mean(outcome.consensus_distance):.2g}",
            f"{outcome.seconds:.0f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def statements(entries: Sequence[Entry], headline: Headline) -> list[str]:
    """Returns, for each pair, whether the seeds tell them apart in a score.

    By Welch's t-test, two-sided, at 5 %; not corrected for the number of pairs.
    """
    pairs = itertools.combinations(entries, 2)
    return [_statement(a, b, headline) for a, b in pairs]


def _statement(a: Entry, b: Entry, headline: Headline) -> str:
    name = headline.name
    x, y = (np.array(entry.scores()[name]) for entry in (a, b))
    if len(x) < 2:
        return f"{a.name} and {b.name}: one seed tells nothing about the spread."
    # Without a spread there is nothing to judge a difference by.
    spread = np.ptp(x) + np.ptp(y) > 0
    result: Any = stats.ttest_ind(x, y, equal_var=False) if spread else None
    if result is None or not result.pvalue < LEVEL:
        p = "" if result is None else f" (p = {result.pvalue:.2g})"
        return (
            f"{a.name} and {b.name} are not told apart in {name}: "
            f"{x.mean():.4f} and {y.mean():.4f}{p}."
        )
    first_is_better = (x.mean() > y.mean()) == (headline.better == "higher")
    better, worse = (a, b) if first_is_better else (b, a)
    low, high = sorted(abs(bound) for bound in result.confidence_interval(1 - LEVEL))
    return (
        f"{better.name} is better than {worse.name} in {name} by "
        f"{abs(x.mean() - y.mean()):.4f} (95 % interval {low:.4f} to {high:.4f}, "
        f"p = {result.pvalue:.2g})."
    )


def draw(entries: Sequence[Entry], headline: Headline, path: Path) -> None:
    """Draws the training losses over the steps, and the scores of all seeds."""
    height = max(3.4, 0.4 * len(entries) + 1.2)
    figure = Figure(figsize=(10, height), layout="constrained")
    curves, ends = figure.subplots(1, 2)
    for number, entry in enumerate(entries):
        steps, losses = zip(*entry.outcome.losses, strict=True)
        values = np.array(losses)
        color = f"C{number}"
        curves.plot(steps, values.mean(1), color=color, label=entry.name)
        curves.fill_between(
            steps, values.min(1), values.max(1), color=color, alpha=0.25, linewidth=0
        )
        scores = entry.scores()[headline.name]
        ends.plot(scores, [number] * len(scores), "o", color=color, alpha=0.5)
        ends.plot(np.mean(scores), number, "|", color="black", markersize=16)
    curves.set(xlabel="step", ylabel="training loss (band: seeds)")
    curves.legend()
    ends.set_yticks(range(len(entries)), [entry.name for entry in entries])
    ends.set_ylim(len(entries) - 0.5, -0.5)
    better = f"{headline.better} is better; a dot for each seed"
    where = "" if headline.name == "training_loss" else "held-out "
    ends.set_xlabel(f"{where}{headline.name.replace('_', ' ')} ({better})")
    figure.savefig(path)


def _spread(values: Sequence[float]) -> str:
    if len(values) < 2:
        return f"{values[0]:.4f}"
    return f"{np.mean(values):.4f} ± {2 * np.std(values, ddof=1):.4f}"
