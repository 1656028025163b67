"""What a comparison found: its table, and which differences are significant.

Which test: seed k gives all configs of one task and one number of workers the same
initial model and the same order of the data, so the scores of two such configs come in
pairs. The paired t-test keeps its error rate whatever the correlation of the pairs;
Welch's assumes zero correlation. In simulations with three seeds at the 5 % level and
no true difference, Welch's test finds one in 1.4 % of all cases at a correlation of 0.5
and in 7.4 % at -0.5, the paired test in 5 % of both. The paired test has less power:
with three seeds it has 2 degrees of freedom, Welch's up to 4, and below a correlation
of 0.5 Welch's test finds more true differences. The remedy is more seeds. An error
pooled over all configs has more degrees of freedom, but assumes equal spreads, and
those of configs differ tenfold.

Sources: Zimmerman (1997), A note on interpretation of the paired-samples t test; de
Winter (2013), Using the Student's t-test with extremely small sample sizes; Boik
(1981), on pooled errors; Holm (1979), on many tests.
"""

import itertools
import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

from train.cli.tables import label, markdown, words
from train.study.outcome import SeedsOutcome
from train.tasks.task import Headline

LEVEL = 0.05
NO_UNITS: Mapping[str, str] = MappingProxyType({})


class Entry(NamedTuple):
    """A config that has been trained.

    Args:
      name: name of the config.
      outcome: results of all its seeds.
      draws: what initial models and order of the data depend on; the seeds of two
        configs with equal draws pair.
      chosen: cells of the table with its best values, one for each field tuned.
      config: name of the config, if `name` is a label.
    """

    name: str
    outcome: SeedsOutcome
    draws: Hashable
    chosen: Sequence[str] = ()
    config: str = ""

    def scores(self) -> dict[str, list[float]]:
        """Final scores of the mean model of each seed, and its training loss.

        The training loss is the mean over the last tenth of the steps.
        """
        _, scores = self.outcome.evaluations[-1]
        last = {"training_loss": self.outcome.training_loss}
        return scores | self.outcome.judged | last


class Compared(NamedTuple):
    """What the configs of a comparison came to.

    Args:
      entries: the configs.
      headline: score that is compared.
      units: units of the scores, by name.
      ends: when each number of steps is done, [T + 1], by the entry's name; in
        simulated seconds with a clock, else in steps.
      is_timed: whether there is a clock.
    """

    entries: Sequence[Entry]
    headline: Headline
    units: Mapping[str, str] = NO_UNITS
    ends: Mapping[str, Sequence[float]] = MappingProxyType({})
    is_timed: bool = False

    @property
    def best(self) -> str:
        """Name of the config with the best mean score."""
        name = self.headline.name
        means = [float(np.mean(one.scores()[name])) for one in self.entries]
        return self.entries[means.index(self.headline.best(means))].name

    def table(self, fields: Sequence[str] = ()) -> str:
        """Returns a Markdown table: means over the seeds +- two standard deviations.

        The best mean of the score that is compared is bold. Single workers are compared
        by it too, or if it is of the mean model alone, by the first score.

        Args:
          fields: fields that were tuned.
        """
        first, score = self.entries[0], self.headline.name
        names, workers = list(first.scores()), first.outcome.workers
        main = score if score in workers else names[0]
        head = ["", *(label(name, self.units) for name in names)]
        head += [f"{words(main)} of workers", "consensus distance", "seconds"]
        head += ["simulated seconds"] if self.is_timed else []
        head += [field.rpartition(".")[2] for field in fields]
        best = self.best if self.entries[1:] else ""
        rows = []
        for entry in self.entries:
            outcome = entry.outcome
            cells = {name: spread(values) for name, values in entry.scores().items()}
            if entry.name == best:
                cells[score] = f"**{cells[score]}**"
            of_workers = np.array(outcome.workers[main])
            row = [
                entry.name,
                *(cells[name] for name in names),
                f"{of_workers.min():.4f} to {of_workers.max():.4f}",
                f"{np.mean(outcome.consensus_distance):.2g}",
                f"{outcome.seconds:.0f}",
                *([f"{self.ends[entry.name][-1]:.1f}"] if self.is_timed else []),
                *entry.chosen,
            ]
            rows.append(row)
        return markdown(head, rows)

    def rows(self, seeds: Sequence[int]) -> Iterator[list[Any]]:
        """Yields a head, and the numbers of each config and seed."""
        names = list(self.entries[0].scores())
        head = ["config", "label", "seed", *names, "steps", "seconds"]
        yield [*head, *["simulated_seconds"] * self.is_timed, "consensus_distance"]
        for entry in self.entries:
            outcome, scores = entry.outcome, entry.scores()
            steps, _ = outcome.evaluations[-1]
            same = [steps, outcome.seconds]
            same += [self.ends[entry.name][-1]] if self.is_timed else []
            for place, seed in enumerate(seeds):
                of_seed = [scores[name][place] for name in names]
                distance = outcome.consensus_distance[place]
                yield [entry.config, entry.name, seed, *of_seed, *same, distance]


def statements(entries: Sequence[Entry], headline: Headline) -> list[str]:
    """Returns how a score was tested, and for each pair whether it differs.

    By two-sided t-tests at 5 %, paired by seed where the seeds pair, else Welch's. The
    p-values are corrected by Holm for the number of pairs; the intervals are not.
    """
    pairs = list(itertools.combinations(entries, 2))
    if not pairs:
        return []
    # Without a spread there is no error to compare a difference with.
    if len(headline_scores := entries[0].scores()[headline.name]) < 2:
        return ["One seed has no spread: no pair was tested."]
    tested = [_test(a, b, headline.name) for a, b in pairs]
    p_values = holm([result.p_value for result in tested])
    method = (
        f"{len(headline_scores)} seeds; two-sided t-tests, paired by seed where a seed "
        "gives both configs one initial model and one order of the data, else Welch's; "
        f"p-values corrected by Holm for {len(pairs)} pair{'s' * (len(pairs) > 1)}, 95 "
        "% intervals not corrected."
    )
    rows = zip(pairs, tested, p_values, strict=True)
    return [method, *(_statement(a, b, t, p, headline) for (a, b), t, p in rows)]


def holm(p_values: Sequence[float]) -> list[float]:
    """Returns p-values corrected for their number: of m, the kth smallest times m-k+1.

    And none smaller than one before it. Those below a level control the chance of any
    false finding among all of them.

    Source: Holm (1979), A simple sequentially rejective multiple test procedure.
    """
    order = np.argsort(p_values)
    # m = 3: the smallest times 3, the next times 2, the largest times 1.
    scaled = np.array(p_values)[order] * np.arange(len(order), 0, -1)
    corrected = np.empty(len(order))
    corrected[order] = np.minimum(np.maximum.accumulate(scaled), 1)
    return corrected.tolist()


class _Test(NamedTuple):
    """The difference of two configs' means, its 95 % interval, and its p-value."""

    difference: float
    interval: tuple[float, float]
    p_value: float
    kind: str


def _test(a: Entry, b: Entry, name: str) -> _Test:
    x, y = (np.array(entry.scores()[name]) for entry in (a, b))
    is_paired = a.draws == b.draws
    difference = float(x.mean() - y.mean())
    kind = "paired" if is_paired else "Welch's"
    if (np.ptp(x - y) if is_paired else np.ptp(x) + np.ptp(y)) == 0:
        # Without a spread t is infinite or undefined: no difference is significant.
        return _Test(difference, (-math.inf, math.inf), 1.0, kind)
    result: Any = (
        stats.ttest_rel(x, y) if is_paired else stats.ttest_ind(x, y, equal_var=False)
    )
    low, high = result.confidence_interval(1 - LEVEL)
    return _Test(difference, (low, high), float(result.pvalue), kind)


def _statement(
    a: Entry, b: Entry, test: _Test, p_value: float, headline: Headline
) -> str:
    found = f"p = {p_value:.2g}, {test.kind}"
    if not p_value < LEVEL:
        means = (np.mean(entry.scores()[headline.name]) for entry in (a, b))
        return (
            f"No significant difference between {a.name} and {b.name} in "
            f"{headline.name}: {' and '.join(f'{m:.4f}' for m in means)} ({found})."
        )
    first_is_better = (test.difference > 0) == (headline.better == "higher")
    better, worse = (a, b) if first_is_better else (b, a)
    # Of one sign: an interval with 0 inside would not be significant.
    low, high = sorted(abs(bound) for bound in test.interval)
    return (
        f"{better.name} is better than {worse.name} in {headline.name} by "
        f"{abs(test.difference):.4f} (95 % interval {low:.4f} to {high:.4f}, {found})."
    )


def spread(values: Sequence[float], digits: int = 4) -> str:
    """Mean and two standard deviations, as text."""
    mean = f"{np.mean(values):.{digits}f}"
    if len(values) < 2:
        return mean
    return f"{mean} ± {2 * np.std(values, ddof=1):.{digits}f}"
