"""Messages on the same card share its rate equally at each moment."""

import numpy as np


def slots(cards: np.ndarray) -> np.ndarray:
    """Returns the indices of each card's messages, [K, cards], padded with -1.

    Args:
      cards: card of each message, int [M].
    """
    order = np.argsort(cards, kind="stable")
    _, columns, counts = np.unique(
        cards[order], return_inverse=True, return_counts=True
    )
    # A message's rank among those of its card, as `order` has them side by side:
    # cards 7 7 9 have the counts 2 1, which begin at 0 and 2, so the ranks are 0 1 0.
    places = np.arange(len(order)) - (np.cumsum(counts) - counts)[columns]
    table = np.full((counts.max(initial=0), len(counts)), -1)
    table[places, columns] = order
    return table


def share(starts: np.ndarray, seconds: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Returns when each message ends, [M]: processor sharing.

    While a card has n messages in flight, each gets 1/n of its rate. The loop handles
    one event of every card per iteration, so its length is the events of the busiest.

    Args:
      starts: start of each message in seconds, [M].
      seconds: duration of each message alone on its card, [M].
      table: the messages of each card, int [K, cards], from `slots`.
    """
    if len(table) < 2:
        return starts + seconds
    used = table >= 0
    # Infinite for messages that have ended, and for padding.
    begins = np.where(used, starts[table], np.inf)
    left = np.where(used, seconds[table], np.inf)
    clock = begins.min(0)
    ends = np.empty(len(starts))
    while table.shape[1]:
        in_flight = begins <= clock
        count = in_flight.sum(0)
        shortest = np.where(in_flight, left, np.inf).min(0)
        later = np.where(in_flight, np.inf, begins).min(0)
        # The next event: the shortest message ends, or another one begins.
        end = clock + shortest * count
        done = in_flight & (left <= shortest) & (end <= later)
        ends[table[done]] = np.broadcast_to(end, done.shape)[done]
        begins[done] = np.inf
        moment = np.minimum(end, later)
        left -= np.where(in_flight, (moment - clock) / count, 0.0)
        # If nothing is in flight any more, jump to the next begin.
        first = begins.min(0)
        clock = np.where(first <= moment, moment, first)
        busy = np.isfinite(first)
        if not busy.all():
            table, begins, left = table[:, busy], begins[:, busy], left[:, busy]
            clock = clock[busy]
    return ends
