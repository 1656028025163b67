"""The inbox without a network: what is kept, taken and awaited, and until when."""

import itertools
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decentjax.links.inbox import Bell, Edge, Inbox, Message, Said, run
from tests.handshakes import LONG

EDGE = Edge(worker=0, peer=1, channel=0)


def message(step, number=0):
    return Message(Said(step, number), None)


def steps(messages):
    return [one.said.step for one in messages]


def result_of(wait):
    """The deadlines of a wait that nothing interrupts, and its result."""
    found = []
    while True:
        try:
            found.append(next(wait))
        except StopIteration as end:
            return found, end.value


@given(st.lists(st.one_of(st.integers(0, 9), st.tuples(st.integers(0, 9)))))
def test_takes_are_those_of_a_list(events):
    """Messages of any order arrive, and are taken at any step, here a tuple."""
    inbox, there, taken = Inbox(), [], -1
    for event in events:
        if isinstance(event, int):
            inbox.put(EDGE, message(event))
            there = [*there, event][-2:]
        else:
            (step,) = event
            assert inbox.has(EDGE, step) == any(x >= step for x in (*there, taken))
            due = [x for x in there if x <= step] if step in there else there
            assert steps(inbox.take(EDGE, step)) == sorted(due)
            there = [x for x in there if x not in due] if step in there else []
            taken = max([taken, *due])


def test_a_wait_ends_with_the_message_of_its_step_or_at_its_deadline():
    now = [0.0]
    inbox = Inbox(clock=lambda: now[0])
    wait = inbox.wait(EDGE, 3, deadline=5.0)
    assert next(wait) == 5.0
    inbox.put(EDGE, message(2))
    assert next(wait) == 5.0
    inbox.put(EDGE, message(3))
    inbox.put(EDGE, message(4))
    assert steps([result_of(wait)[1]]) == [3]
    assert steps([result_of(inbox.wait(EDGE, 4, 5.0))[1]]) == [4]
    late = inbox.wait(EDGE, 6, 5.0)
    assert next(late) == 5.0
    inbox.put(EDGE, message(5))
    assert next(late) == 5.0
    now[0] = 5.0
    assert steps([result_of(late)[1]]) == [5]


@pytest.mark.parametrize("kind", ["wait", "wait_for_number"])
def test_nobody_waits_for_who_is_lost_or_has_started_again(kind):
    inbox = Inbox()
    for end in (inbox.lose, inbox.forget):
        inbox.meet(1)
        wait = getattr(inbox, kind)(EDGE, 3, float("inf"))
        next(wait)
        end(1)
        assert result_of(wait) == ([], None)
    # Who has not been met may yet be there in time.
    other = EDGE._replace(peer=2)
    wait = getattr(inbox, kind)(other, 3, float("inf"))
    next(wait)
    inbox.forget(2)
    inbox.meet(2)
    next(wait)


def test_a_number_is_exact_and_earlier_ones_are_dropped():
    inbox = Inbox()
    for number in (4, 5):
        inbox.put(EDGE, message(9, number))
    found = result_of(inbox.wait_for_number(EDGE, 5, 0.0))[1]
    assert found.said.number == 5
    assert inbox.newest_number(EDGE) == -1
    inbox.put(EDGE, message(9, 7))
    # A later one has come: that of this number never will.
    assert result_of(inbox.wait_for_number(EDGE, 6, float("inf"))) == ([], None)
    assert inbox.newest_number(EDGE) == 7


def test_the_patience_begins_once_there_are_enough():
    now = [0.0]
    inbox = Inbox(clock=lambda: now[0])
    for peer in range(4):
        inbox.meet(peer)
    edges = [Edge(9, peer, 0) for peer in range(4)]
    wait = inbox.gather(edges, 0, enough=2, seconds=1.0)
    assert next(wait) == float("inf")
    for now[0], edge in zip([1.0, 2.0], edges, strict=False):
        inbox.put(edge, message(0))
        end = next(wait)
    assert end == 3.0
    now[0] = 2.5
    inbox.put(edges[2], message(1))
    assert next(wait) == 3.0
    now[0] = 3.0
    assert result_of(wait) == ([], {0: 1.0, 1: 2.0, 2: 2.5})
    # Too few of those left are alive to be enough: no longer than for the rest.
    wait = inbox.gather(edges, 5, enough=4, seconds=1.0)
    assert next(wait) == float("inf")
    inbox.lose(3)
    assert next(wait) == 4.0
    for peer in range(3):
        inbox.lose(peer)
    assert result_of(wait) == ([], {})


def test_a_bell_wakes_who_waits_and_who_has_missed_it():
    bell, inbox, checks = Bell(), Inbox(), itertools.count()
    later = threading.Timer(0.1, lambda: (inbox.put(EDGE, message(0)), bell.ring()))
    later.start()
    begin = time.monotonic()
    wait = inbox.wait(EDGE, 0, begin + LONG)
    assert steps([run(wait, bell, lambda: next(checks))]) == [0]
    assert time.monotonic() < begin + LONG / 2
    assert next(checks) >= 2
    later.join()
    heard = bell.count
    bell.ring()
    bell.wait(heard, begin + LONG)
    assert time.monotonic() < begin + LONG / 2
