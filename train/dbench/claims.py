"""The paper's observations as claims, and what the data says of each.

Each seed gives a rank correlation within each block of cells: of graphs at one scale,
or of scales of one graph. The mean over the blocks is a value for each seed, from which
come the mean and its interval. The test permutes the graphs, or the scales, alike in
all blocks and seeds: cells of one scale share initial models and data, so that another
block is no independent repetition. The p-values are corrected by Holm.

Source: Xie et al. (2025), whose three observations are these.
"""

import itertools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats

from train.dbench.cells import Result
from train.dbench.grid import ALL_REDUCE
from train.study.comparison import LEVEL, holm
from train.tasks.task import Headline

MEASURE = "gini"
DRAWS = 9999  # Of permutations.
PART = 10  # Early and late are this part of the run.


class Claim(NamedTuple):
    """A correlation that is expected, and what was found.

    Args:
      text: what is claimed.
      where: names of the blocks.
      sign: sign that the claim expects.
      values: rank correlation of each seed, the mean over the blocks.
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
    peers = [one for one in done if one.cell.graph != ALL_REDUCE]
    by_graph = _blocks(done, lambda one: one.cell.graph)
    by_scale = _blocks(peers, lambda one: str(one.cell.num_workers))
    found = [
        _claim(text, sign, blocks, label, headline, quantity)
        for text, sign, blocks, label, quantity in (
            ("more workers, lower accuracy", -1, by_graph, _scale, _workers),
            ("more connections, higher accuracy", 1, by_scale, _graph, _connections),
            ("more dispersion early, lower accuracy", -1, by_scale, _graph, early),
            ("more dispersion late, lower accuracy", -1, by_scale, _graph, late),
        )
    ]
    made = [claim for claim in found if claim is not None]
    if not made:
        return []
    p_values = holm([claim.p_value for claim in made])
    return [claim._replace(p_value=p) for claim, p in zip(made, p_values, strict=True)]


def _blocks(
    results: Sequence[Result], name_of: Callable[[Result], str]
) -> dict[str, list[Result]]:
    names = dict.fromkeys(map(name_of, results))
    return {name: [one for one in results if name_of(one) == name] for name in names}


def accuracy(one: Result, headline: Headline) -> list[float]:
    """The headline score of the mean model of each seed."""
    return one.found.evaluations[-1][1][headline.name]


def early(one: Result) -> list[float]:
    """The dispersion of each seed in the first part of the run, over all tensors."""
    return _mean_dispersion(one, lambda rows, count: rows[:count])


def late(one: Result) -> list[float]:
    """The dispersion of each seed in the last part of the run, over all tensors."""
    return _mean_dispersion(one, lambda rows, count: rows[-count:])


def _mean_dispersion(one: Result, part: Callable[[list, int], list]) -> list[float]:
    rows = [values[MEASURE] for _, values in one.found.dispersion]
    return np.mean(part(rows, max(1, len(rows) // PART)), axis=(0, 2)).tolist()


def _graph(one: Result) -> Hashable:
    return one.cell.graph


def _scale(one: Result) -> Hashable:
    return one.cell.num_workers


def _workers(one: Result) -> list[float]:
    return [float(one.cell.num_workers)] * len(one.found.training_loss)


def _connections(one: Result) -> list[float]:
    return one.found.sent["connections"]


def _claim(
    text: str,
    sign: int,
    blocks: Mapping[str, Sequence[Result]],
    label: Callable[[Result], Hashable],
    headline: Headline,
    quantity: Callable[[Result], list[float]],
) -> Claim | None:
    """The claim over blocks of labelled cells; None where the labels have no order."""
    up = 1 if headline.better == "higher" else -1
    ranked, names = [], []
    for name, cells in blocks.items():
        places = np.transpose([quantity(one) for one in cells])
        scores = np.transpose([accuracy(one, headline) for one in cells])
        x, y = _ranks(places), _ranks(up * scores)
        if (x.any(1) & y.any(1)).all():  # In each seed the cells differ.
            ranked.append((x, y))
            names.append(name)
    of_blocks = [[label(one) for one in blocks[name]] for name in names]
    labels = list(dict.fromkeys(itertools.chain(*of_blocks)))
    if len(labels) <= 2:  # Of two the order is a coin's.
        return None
    places = [[labels.index(one) for one in of_block] for of_block in of_blocks]
    values = np.mean([(x * y).sum(1) for x, y in ranked], axis=0)
    random, count = np.random.default_rng(0), 0
    for _ in range(DRAWS):
        # One order of all labels, of which each block has its part.
        keys = random.permutation(len(labels))
        orders = [np.argsort(keys[place]) for place in places]
        pairs = zip(ranked, orders, strict=True)
        drawn = [(x * y[:, order]).sum(1) for (x, y), order in pairs]
        count += abs(np.mean(drawn)) >= abs(values.mean()) - 1e-9
    p_value = (count + 1) / (DRAWS + 1)
    return Claim(text, ", ".join(names), sign, values.tolist(), p_value)


def _ranks(values: np.ndarray) -> np.ndarray:
    """Ranks of each row, centred and of length one; 0 where all are equal."""
    ranks = stats.rankdata(values, axis=1)
    centred = ranks - ranks.mean(1, keepdims=True)
    length = np.linalg.norm(centred, axis=1, keepdims=True)
    return np.divide(centred, length, out=np.zeros_like(centred), where=length > 0)
