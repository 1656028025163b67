"""Messages that share a card share its bandwidth, evenly, at each moment."""

import numpy as np


def seats(cards: np.ndarray) -> np.ndarray:
    """Returns the numbers of each card's messages, [K, cards], filled up with -1.

    Args:
      cards: number of the card of each message, int [M].
    """
    order = np.argsort(cards, kind="stable")
    _, columns, counts = np.unique(
        cards[order], return_inverse=True, return_counts=True
    )
    places = np.arange(len(order)) - (np.cumsum(counts) - counts)[columns]
    table = np.full((counts.max(initial=0), len(counts)), -1)
    table[places, columns] = order
    return table


def share(starts: np.ndarray, seconds: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Returns when messages are through, each one's share of its card changing.

    While n messages of a card are under way, each has an nth of it. The events of all
    cards are gone through at once, those of one card in their order.

    Args:
      starts: seconds, [M].
      seconds: that each would take alone, [M].
      table: the messages of each card, [K, cards], as of `seats`.
    """
    if len(table) < 2:
        return starts + seconds
    if len(table) == 2:
        return _share_by_two(starts, seconds, table)
    there = table >= 0
    begins = np.where(there, starts[table], np.inf)  # Of what is not through yet.
    left = np.where(there, seconds[table], np.inf)
    clock = begins.min(0)
    through = np.empty(len(starts))
    while table.shape[1]:
        under_way = begins <= clock
        count = under_way.sum(0)
        shortest = np.where(under_way, left, np.inf).min(0)
        later = np.where(under_way, np.inf, begins).min(0)
        end = clock + shortest * count
        done = under_way & (left <= shortest) & (end <= later)
        through[table[done]] = np.broadcast_to(end, done.shape)[done]
        begins[done] = np.inf
        moment = np.minimum(end, later)
        left -= np.where(under_way, (moment - clock) / count, 0.0)
        # Where nothing is under way, on to the next begin.
        first = begins.min(0)
        clock = np.where(first <= moment, moment, first)
        some = np.isfinite(first)
        if not some.all():
            table, begins, left = table[:, some], begins[:, some], left[:, some]
            clock = clock[some]
    return through


def _share_by_two(
    starts: np.ndarray, seconds: np.ndarray, table: np.ndarray
) -> np.ndarray:
    """Likewise, of cards with two messages at the most; as most are, but faster.

    Both take longer by the time for which both would be under way, or, where the later
    one would be through before the other, by its own.
    """
    pair = table[:, table[1] >= 0]
    by_start = np.take_along_axis(pair, starts[pair].argsort(0), 0)
    first, second = by_start
    overlap = np.maximum(starts[first] + seconds[first] - starts[second], 0)
    through = starts + seconds
    through[by_start] += np.minimum(overlap, seconds[second])
    return through
