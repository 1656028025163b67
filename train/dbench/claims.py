"""The paper's observations as claims, and what the data says of each.

Each seed gives a rank correlation over the cells that are compared; from all seeds come
its mean and its interval. The test permutes the cells, alike in all seeds: their number
limits what can be shown, and four cells can show nothing. The p-values are corrected by
Holm.

Source: Xie et al. (2025), whose three observations are these.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats

from train.dbench.cells import Result
from train.dbench.grid import ALL_REDUCE
from train.run.comparison import LEVEL, holm
from train.run.seeds import SeedsOutcome
from train.tasks.task import Headline

MEASURE = "gini"
PART = 10  # Early and late are this part of the run.


class Claim(NamedTuple):
    """A correlation that is expected, and what was found.

    Args:
      text: what is claimed.
      where: the cells that were compared.
      sign: sign that the claim expects.
      values: rank correlation of each seed.
      p_value: two-sided, corrected.
    """

    text: str
    where: str
    sign: int
    values: list[float]
    p_value: float

    @property
    def verdict(self) -> str:
        """What the data says."""
        if not self.p_value < LEVEL:
            return "not shown"
        return "holds" if np.mean(self.values) * self.sign > 0 else "contradicted"

    @property
    def interval(self) -> tuple[float, float]:
        """95 % interval of the mean correlation, not corrected."""
        if len(self.values) < 2:
            return math.nan, math.nan
        mean, error = np.mean(self.values), stats.sem(self.values)
        reach = error * stats.t.ppf(1 - LEVEL / 2, len(self.values) - 1)
        return float(mean - reach), float(mean + reach)


def claims(results: Sequence[Result], headline: Headline) -> list[Claim]:
    """Returns the claims that the results can speak of, with their tests."""
    done = [one for one in results if one.outcome is not None]
    found = []
    for graph in dict.fromkeys(one.cell.graph for one in done):
        cells = [one for one in done if one.cell.graph == graph]
        text = "more workers, lower accuracy"
        found.append(_claim(text, graph, -1, cells, headline, _workers))
    for count in dict.fromkeys(one.cell.num_workers for one in done):
        cells = [one for one in done if one.cell.num_workers == count]
        decentralized = [one for one in cells if one.cell.graph != ALL_REDUCE]
        where = f"{count} workers"
        for text, sign, quantity in (
            ("more connections, higher accuracy", 1, _connections),
            ("more dispersion early, lower accuracy", -1, early),
            ("more dispersion late, lower accuracy", -1, late),
        ):
            found.append(_claim(text, where, sign, decentralized, headline, quantity))
    made = [claim for claim in found if claim is not None]
    if not made:
        return []
    p_values = holm([claim.p_value for claim in made])
    return [claim._replace(p_value=p) for claim, p in zip(made, p_values, strict=True)]


def accuracy(outcome: SeedsOutcome, headline: Headline) -> list[float]:
    """The headline score of the mean model of each seed."""
    return outcome.evaluations[-1][1][headline.name]


def early(one: Result) -> list[float]:
    """The dispersion of each seed in the first part of the run, over all tensors."""
    return _part(one, slice(None, None))


def late(one: Result) -> list[float]:
    """The dispersion of each seed in the last part of the run, over all tensors."""
    return _part(one, slice(None, None, -1))


def _part(one: Result, order: slice) -> list[float]:
    assert one.outcome is not None
    rows = [values[MEASURE] for _, values in one.outcome.dispersion][order]
    return np.mean(rows[: max(1, len(rows) // PART)], axis=(0, 2)).tolist()


def _workers(one: Result) -> list[float]:
    assert one.outcome is not None
    return [float(one.cell.num_workers)] * len(one.outcome.training_loss)


def _connections(one: Result) -> list[float]:
    assert one.outcome is not None
    return one.outcome.sent["connections"]


def _claim(
    text: str,
    where: str,
    sign: int,
    cells: Sequence[Result],
    headline: Headline,
    quantity: Callable[[Result], list[float]],
) -> Claim | None:
    """The claim over some cells; None where they have no order."""
    up = 1 if headline.better == "higher" else -1
    scores = [accuracy(one.outcome, headline) for one in cells if one.outcome]
    places = [quantity(one) for one in cells]
    # Of two cells the order is a coin's.
    if len(cells) < 3:
        return None
    x, y = _ranks(np.transpose(places)), _ranks(up * np.transpose(scores))
    both = x.any(1) & y.any(1)  # Seeds in which the cells differ.
    if not both.any():
        return None
    x, y = x[both], y[both]
    found = stats.permutation_test(
        (np.arange(len(cells)),),
        lambda order: float((x * y[:, order]).sum(1).mean()),
        permutation_type="pairings",
        rng=np.random.default_rng(0),
    )
    values = (x * y).sum(1).tolist()
    return Claim(text, where, sign, values, float(found.pvalue))


def _ranks(values: np.ndarray) -> np.ndarray:
    """Ranks of each row, centred and of length one; 0 where all are equal."""
    ranks = stats.rankdata(values, axis=1)
    centred = ranks - ranks.mean(1, keepdims=True)
    length = np.linalg.norm(centred, axis=1, keepdims=True)
    return np.divide(centred, length, out=np.zeros_like(centred), where=length > 0)
