"""Batches of sentence pairs by length: few shapes, and little padding."""

import dataclasses
import sys
from collections.abc import Sequence
from typing import NamedTuple

import grain
import numpy as np

from train.data.batches import Batch
from train.data.pairs import Pairs, Ragged
from train.data.vocabulary import END, PAD, START

NO_PASS: tuple[int, np.ndarray, list[np.ndarray]] = (-1, np.array([]), [])


class Shapes(NamedTuple):
    """The shapes of batches, and the number of steps of each in a pass.

    Args:
      boxes: widths S and T of source and target, each with `</s>`, int [shapes, 2].
      rows: B, pairs per worker, int [shapes].
      steps: steps in a pass, int [shapes].
      efficiency: share of a pass's tokens that are neither padding nor repeated.
    """

    boxes: np.ndarray
    rows: np.ndarray
    steps: np.ndarray
    efficiency: float


def choose_shapes(
    pairs: Pairs,
    num_workers: int,
    tokens_per_worker: int,
    num_shapes: int = 16,
    multiple_of: int = 1,
) -> Shapes:
    """Returns shapes that pad these pairs little, by a greedy local search.

    A box S x T holds the pairs of at most S and T tokens, and a pair goes into the
    cheapest box, of least S + T, that holds it. The first box holds all pairs; then the
    box that saves most padding is added, again and again; then each box is replaced by
    the best one, as long as that saves padding.

    Pairs that do not fill a step of their box move to the next box that holds them, so
    a box of few pairs has no step, and only the last step of the largest is filled up.

    Args:
      pairs: training pairs.
      num_workers: N.
      tokens_per_worker: largest number of tokens of a worker's source or target, so
        that B = tokens_per_worker // max(S, T).
      num_shapes: largest number of boxes.
      multiple_of: number of micro-batches, which divides B.

    Raises:
      ValueError: if there are no pairs, or the longest sentence has too many tokens.
    """
    if min(num_workers, num_shapes, multiple_of) < 1:
        raise ValueError(
            "num_workers, num_shapes and multiple_of must be at least 1, got "
            f"{num_workers}, {num_shapes} and {multiple_of}"
        )
    if len(pairs) == 0:
        raise ValueError("there are no pairs to make batches of")
    widths = _widths(pairs)
    counts = _count(widths)
    longest = widths.max()
    if tokens_per_worker < longest * multiple_of:
        raise ValueError(
            f"tokens_per_worker = {tokens_per_worker} does not hold the longest "
            f"sentence {multiple_of} time(s), which has {longest} tokens"
        )
    boxes = _search(counts, num_shapes)
    rows = tokens_per_worker // boxes.max(1) // multiple_of * multiple_of
    pairs_per_step = num_workers * rows
    steps = np.zeros(len(boxes), np.int64)
    waiting = [len(members) for members in _members(boxes, widths)]
    for k, above in enumerate(_above(boxes)):
        steps[k], rest = divmod(waiting[k], pairs_per_step[k])
        waiting[above] += rest
    # Rounded up: the pairs that are left over have no larger box to go to.
    steps[-1] = -(-waiting[-1] // pairs_per_step[-1])
    in_all = (steps * pairs_per_step * boxes.sum(1)).sum()
    return Shapes(boxes, rows, steps, float(widths.sum() / in_all))


def length_steps(
    pairs: Pairs,
    num_workers: int,
    tokens_per_worker: int,
    seed: int,
    workers: Sequence[int] | None = None,
    num_shapes: int = 16,
    multiple_of: int = 1,
) -> grain.MapDataset[Batch]:
    """Returns the batches of all steps, a row for each worker; element t is step t's.

    "source" is int32 [W, B, S], with `</s>` at its end; "target" is [W, B, T + 1], from
    `<s>` to `</s>`. Both are padded with 0. Each pass shuffles the pairs of a shape
    again and cuts them into blocks of B, so no two workers see one pair in the same
    pass, except those that fill up the last step of the largest shape. The order of the
    shapes depends on the pass alone, and is the same for all seeds.

    Args:
      pairs: training pairs.
      num_workers: N.
      tokens_per_worker: see `choose_shapes`.
      seed: seed of the shuffles.
      workers: workers whose rows are read; by default all.
      num_shapes: see `choose_shapes`.
      multiple_of: see `choose_shapes`.

    Raises:
      ValueError: see `choose_shapes`.
    """
    shapes = choose_shapes(
        pairs, num_workers, tokens_per_worker, num_shapes, multiple_of
    )
    mine = range(num_workers) if workers is None else workers
    return grain.MapDataset.source(_LengthSteps(pairs, shapes, num_workers, seed, mine))


def length_validation(
    pairs: Pairs, rows: int, num_shapes: int = 4
) -> list[dict[str, np.ndarray]]:
    """Returns batches that hold each pair once, without a dim of workers.

    The last batch of a shape is filled up with rows of padding.

    Args:
      pairs: held-out pairs.
      rows: B, the same in all batches.
      num_shapes: largest number of shapes.
    """
    widths = _widths(pairs)
    boxes = _search(_count(widths), num_shapes)
    batches = []
    for box, members in zip(boxes, _members(boxes, widths), strict=True):
        for start in range(0, len(members), rows):
            batch = _pad(pairs, members[start : start + rows], box)
            missing = ((0, rows - len(batch["source"])), (0, 0))
            batches.append({k: np.pad(side, missing) for k, side in batch.items()})
    return batches


@dataclasses.dataclass(eq=False)
class _LengthSteps:
    """Step t is the j-th of its shape in its pass: blocks j * N + w of that shape."""

    pairs: Pairs
    shapes: Shapes
    num_workers: int
    seed: int
    workers: Sequence[int]

    def __post_init__(self):
        self._members = _members(self.shapes.boxes, _widths(self.pairs))
        # The pass read last, as steps are mostly read in turn: its number, the shape of
        # each step, and the pairs of each shape.
        self._pass = NO_PASS

    def __getstate__(self):
        return self.__dict__ | {"_pass": NO_PASS}  # Large; to be drawn again there.

    def __len__(self) -> int:
        return sys.maxsize

    def __getitem__(self, index: int) -> Batch:
        number, place = divmod(int(index), int(self.shapes.steps.sum()))
        if self._pass[0] != number:
            self._pass = (number, *self._draw(number))
        _, order, dealt = self._pass
        shape = order[place]
        rows = int(self.shapes.rows[shape])
        # N = 2, B = 3: the second step of a shape has its blocks 2 and 3, and worker 1
        # the pairs 9, 10 and 11 of that shape.
        block = np.count_nonzero(order[:place] == shape) * self.num_workers
        starts = (block + np.array(self.workers)) * rows
        chosen = dealt[shape][starts[:, None] + np.arange(rows)]
        batch = _pad(self.pairs, chosen.ravel(), self.shapes.boxes[shape])
        return Batch(
            {side: array.reshape(*chosen.shape, -1) for side, array in batch.items()}
        )

    def _draw(self, number: int) -> tuple[np.ndarray, list[np.ndarray]]:
        """The shape of each step of a pass, and the pairs of each shape in order."""
        boxes, rows, steps, _ = self.shapes
        # Without the seed: runs of several seeds train as one program, of one shape.
        order = np.random.default_rng(number).permutation(
            np.repeat(np.arange(len(steps)), steps)
        )
        random = np.random.default_rng((self.seed, number))
        waiting = [[members] for members in self._members]
        dealt = []
        places = steps * rows * self.num_workers
        for k, above in enumerate(_above(boxes)):
            pairs = random.permutation(np.concatenate(waiting[k]))
            dealt.append(pairs[: places[k]])
            waiting[above].append(pairs[places[k] :])
        last = random.permutation(np.concatenate(waiting[-1]))
        return order, [*dealt, np.resize(last, places[-1])]


def _widths(pairs: Pairs) -> np.ndarray:
    """Tokens of source and target, each with `</s>`, int32 [pairs, 2]."""
    sides = (pairs.source.lengths(), pairs.target.lengths())
    return np.stack([(lengths + 1).astype(np.int32) for lengths in sides], axis=1)


def _count(widths: np.ndarray) -> np.ndarray:
    """Entry (s, t) is the number of pairs of s and t tokens."""
    size = widths.max(0) + 1
    # One number s (max T + 1) + t per pair, which bincount then counts.
    return np.bincount(widths @ [size[1], 1], minlength=size.prod()).reshape(size)


def _search(counts: np.ndarray, num_shapes: int) -> np.ndarray:
    """Boxes with little padding, the cheapest first; the last holds all pairs."""
    # The box of the longest source and the longest target, which stays as it is: any
    # other may be replaced, because this one holds all pairs.
    boxes = np.array([counts.shape]) - 1
    saved = 1
    while len(boxes) < num_shapes and saved > 0:
        box, saved = _best_box(boxes, counts)
        boxes = np.concatenate([boxes, [box]]) if saved > 0 else boxes
    improved = True
    while improved:
        improved = False
        for k in range(1, len(boxes)):
            others = np.delete(boxes, k, axis=0)
            box, saved = _best_box(others, counts)
            if saved > _padded(others, counts) - _padded(boxes, counts):
                boxes[k] = box
                improved = True
    return boxes[np.argsort(boxes.sum(1), kind="stable")]


def _best_box(boxes: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, int]:
    """The box whose addition saves most, and the number of tokens it saves.

    S x T saves sum_k max(0, S_k + T_k - S - T) n_k(S, T), where n_k counts the pairs of
    at most S and T tokens that are now in box k.
    """
    # Costs of all S x T at once: entry (S, T) of each table stands for that box.
    now = _cheapest(boxes, counts.shape)
    cost = np.add.outer(*map(np.arange, counts.shape))
    saved = np.zeros(counts.shape, np.int64)
    for k, box in enumerate(boxes):
        # Summed along both axes: entry (S, T) is n_k(S, T).
        inside = np.where(now == k, counts, 0).cumsum(0).cumsum(1)
        saved += np.maximum(box.sum() - cost, 0) * inside
    best = np.unravel_index(saved.argmax(), saved.shape)
    return np.array(best), int(saved[best])


def _cheapest(boxes: np.ndarray, size: tuple[int, ...]) -> np.ndarray:
    """Entry (s, t) is the number of the cheapest box that holds such a pair."""
    table = np.zeros(size, np.int64)
    # The most expensive first, so that cheaper boxes overwrite it where they hold.
    for k in np.argsort(-boxes.sum(1), kind="stable"):
        table[: boxes[k, 0] + 1, : boxes[k, 1] + 1] = k
    return table


def _padded(boxes: np.ndarray, counts: np.ndarray) -> int:
    """Number of tokens of all pairs, with padding."""
    return int((boxes.sum(1)[_cheapest(boxes, counts.shape)] * counts).sum())


def _above(boxes: np.ndarray) -> list[int]:
    """For each box but the last, the cheapest later one that holds all its pairs."""
    return [
        k + 1 + int((boxes[k + 1 :] >= boxes[k]).all(1).argmax())
        for k in range(len(boxes) - 1)
    ]


def _members(boxes: np.ndarray, widths: np.ndarray) -> list[np.ndarray]:
    """The indices of the pairs of each box."""
    # Narrow types, as WMT14 has up to 36 million pairs.
    table = _cheapest(boxes, tuple(widths.max(0) + 1)).astype(np.uint16)
    box = table[widths[:, 0], widths[:, 1]]
    order = np.argsort(box, kind="stable").astype(np.int32)
    return np.split(order, np.cumsum(np.bincount(box, minlength=len(boxes)))[:-1])


def _pad(pairs: Pairs, rows: np.ndarray, box: np.ndarray) -> dict[str, np.ndarray]:
    """int32 [rows, S] and [rows, T + 1]."""
    target = _fill(pairs.target, rows, box[1])
    starts = np.full((len(rows), 1), START, np.int32)
    return {
        "source": _fill(pairs.source, rows, box[0]),
        "target": np.concatenate([starts, target], axis=1),
    }


def _fill(side: Ragged, rows: np.ndarray, width: int) -> np.ndarray:
    """The tokens of each row, then END, then PAD, int32 [rows, width]."""
    starts = np.asarray(side.offsets[rows])
    lengths = np.asarray(side.offsets[rows + 1]) - starts
    places = np.arange(width)
    inside = places < lengths[:, None]
    filled = np.full((len(rows), width), PAD, np.int32)
    filled[inside] = side.tokens[(starts[:, None] + places)[inside]]
    filled[np.arange(len(rows)), lengths] = END
    return filled
