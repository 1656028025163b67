"""The processes of a worker decide as one, whatever arrives where and when."""

import concurrent.futures
import contextlib
import socket
import threading
import types

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decentjax.links import worker_job
from decentjax.links.inbox import KEPT, Bell, Edge, Inbox, Message, Said
from decentjax.links.worker_job import (
    MOST,
    MOST_OF_FOLLOWER,
    Follower,
    Key,
    Leader,
    OneProcess,
)
from tests.handshakes import LONG, until

EDGE = Edge(0, 1, 0)


class Crew:
    """The processes of a worker, in this one.

    Attributes:
      reported: what process 0 has heard of the others.
    """

    def __init__(self, count: int):
        pairs = [socket.socketpair() for _ in range(count - 1)]
        self.reported, bells = list[tuple[str, tuple]](), [Bell() for _ in range(count)]

        def has(what: str, values: tuple) -> None:
            self.reported.append((what, values))

        first = Leader(Inbox(), has, bells[0], 0, [one for one, _ in pairs])
        others = (
            Follower(bells[n], 0, n, other) for n, (_, other) in enumerate(pairs, 1)
        )
        self.processes: list[OneProcess] = [first, *others]
        self.bells = bells
        self._pool = concurrent.futures.ThreadPoolExecutor(count)

    def all(self, name: str, *arguments) -> list:
        """What a method returns in all processes, which call it at the same time."""
        calls = [
            self._pool.submit(getattr(one, name), *arguments) for one in self.processes
        ]
        return [call.result(LONG) for call in calls]

    def came(self, process: int, life: int, count: int, edge: Edge = EDGE) -> None:
        """A message arrives at a process, with a part that only this one has."""
        message = Message(
            Said(count), f"part {process} of {edge.peer}'s {life} {count}"
        )
        with self.bells[process].lock:
            self.processes[process].came(Key(edge, life, count), message)

    def met(self, life: int, *processes: int, peer: int = 1) -> None:
        for process in processes or range(len(self.processes)):
            with self.bells[process].lock:
                self.processes[process].met(peer, life, 3)

    def take(self, edge: Edge = EDGE) -> list[list[Message]]:
        leader = self.processes[0]
        # What the others have reported before is known after this.
        self.all("gather", "")
        return self.all("take", "take", edge, lambda: leader.inbox.take(edge, 10**6))

    def kept(self) -> list[int]:
        """The number of messages that each process keeps, once all is told."""
        self.all("gather", "")
        return [len(one._kept) for one in self.processes]  # pyright: ignore

    def close(self) -> None:
        for one in self.processes:
            one.close()
        self._pool.shutdown()


@contextlib.contextmanager
def crew_of(count: int):
    crew = Crew(count)
    try:
        yield crew
    finally:
        crew.close()


@st.composite
def arrivals(draw):
    """Processes, and what arrives at each: in order, but where it was overtaken."""
    count = draw(st.integers(2, 4))
    events = []
    for process in range(count):
        own = [
            (process, life, number)
            for life in (1, 2)[: draw(st.integers(1, 2))]
            for number in range(12)
            if draw(st.booleans())
        ]
        events.append(own)
    order = draw(st.permutations([p for p in range(count) for _ in events[p]]))
    left = [iter(own) for own in events]
    return count, [next(left[p]) for p in order], draw(st.integers(1, 10))


@settings(max_examples=60, deadline=None)
@given(arrivals())
def test_all_take_the_same_messages_which_all_have(found):
    count, events, every = found
    with crew_of(count) as crew:
        lives, came = [0] * count, dict[tuple[int, int], set[int]]()
        taken = []
        for n, (process, life, number) in enumerate(events):
            if lives[process] != life:
                lives[process] = life
                crew.met(life, process)
            crew.came(process, life, number)
            came.setdefault((life, number), set()).add(process)
            if n % every:
                continue
            messages = crew.take()
            steps = [[one.said.step for one in own] for own in messages]
            assert all(own == steps[0] for own in steps)
            for process, own in enumerate(messages):
                for one, first in zip(own, messages[0], strict=True):
                    part, what = one.arrays.split(" of ")
                    assert part == f"part {process}"
                    assert what == first.arrays.split(" of ")[1]
                    life, number = map(int, what.split()[1:])
                    assert len(came[life, number]) == count
            new = [tuple(map(int, x.arrays.split()[-2:])) for x in messages[0]]
            assert new == sorted(new)
            assert len(new) <= KEPT
            taken += new
        assert len(set(taken)) == len(taken)
        assert max(crew.kept()) <= KEPT + MOST + 1


def test_what_is_newest_at_all_is_not_missed():
    with crew_of(3) as crew:
        crew.met(7)
        for process, numbers in enumerate([range(6), (0, 3, 5), (1, 3, 4)]):
            for number in numbers:
                crew.came(process, 7, number)
        assert [[one.said.step for one in own] for own in crew.take()] == [[3]] * 3
        crew.came(2, 7, 5)
        assert [[one.said.step for one in own] for own in crew.take()] == [[5]] * 3
        assert crew.kept() == [0, 0, 0]


def test_what_is_given_up_or_replaced_is_dropped_in_all_processes():
    with crew_of(2) as crew:
        crew.met(7)
        crew.all("gather", "")
        for number in range(MOST + 2):
            crew.came(0, 7, number)
        crew.came(1, 7, 0)  # Too late for process 0.
        assert crew.kept() == [MOST, 0]
        for number in range(20, 30):
            crew.came(0, 7, number)
            crew.came(1, 7, number)
        assert crew.kept() == [KEPT, KEPT]


def test_a_peer_is_met_once_all_its_processes_are_and_lost_with_any():
    with crew_of(2) as crew:
        inbox = crew.processes[0].inbox
        crew.met(7, 0)
        crew.all("gather", "")
        assert inbox.alive == set()
        crew.met(7, 1)
        crew.all("gather", "")
        assert inbox.alive == {1}
        crew.came(0, 7, 0)
        crew.came(1, 7, 0)
        crew.processes[1].lost(1)
        crew.all("gather", "")
        assert (inbox.alive, inbox.lost) == (set(), {1})
        crew.met(7, 1)  # The same start of the peer, after a silence.
        crew.all("gather", "")
        assert inbox.alive == {1}
        assert crew.processes[0].floors[1] == 4
        assert [len(own) for own in crew.take()] == [1, 1]
        crew.came(0, 7, 1)
        crew.came(1, 7, 1)
        crew.all("gather", "")
        crew.met(8, 1)  # It has started again; its old messages count no more.
        crew.met(8, 0)
        crew.all("gather", "")
        assert inbox.alive == {1}
        assert crew.processes[0].floors[1] == -1
        assert [len(own) for own in crew.take()] == [0, 0]
        assert crew.kept() == [0, 0]


def test_what_a_process_hears_late_of_an_old_start_of_a_peer_undoes_nothing():
    with crew_of(2) as crew:
        crew.met(7)
        crew.met(8, 0)
        crew.all("gather", "")
        crew.came(0, 8, 0)
        crew.came(1, 7, 0)
        crew.met(7, 1)
        crew.all("gather", "")
        crew.met(8, 1)
        crew.came(1, 8, 0)
        assert [len(own) for own in crew.take()] == [1, 1]
        assert crew.processes[0].inbox.alive == {1}
        for number in range(1, 2 * MOST_OF_FOLLOWER):
            crew.came(1, 8, number)
            crew.all("gather", "")
        crew.came(0, 8, 2 * MOST_OF_FOLLOWER - 1)
        assert [len(own) for own in crew.take()] == [1, 1]
        assert crew.kept() == [0, 0]


def test_the_last_message_of_a_peer_that_leaves_is_awaited_at_all_processes():
    with crew_of(2) as crew:
        inbox = crew.processes[0].inbox
        crew.met(7)
        crew.all("gather", "")
        crew.came(0, 7, 0)
        crew.processes[0].lost(1, has_left=True)
        crew.all("gather", "")
        assert inbox.alive == {1}
        crew.came(1, 7, 0)
        crew.processes[1].lost(1, has_left=True)
        assert [len(own) for own in crew.take()] == [1, 1]
        assert (inbox.alive, inbox.lost) == (set(), {1})


def test_answers_errors_and_texts_are_of_all():
    with crew_of(3) as crew:
        assert crew.all("agree", "x", lambda: {2, 1}) == [{1, 2}] * 3
        assert crew.all("agree", "x", set) == [set()] * 3
        calls = [
            crew._pool.submit(one.gather, f"inf {n}")
            for n, one in enumerate(crew.processes)
        ]
        assert [call.result(LONG) for call in calls] == [
            ["inf 0", "inf 1", "inf 2"]
        ] * 3
        crew.processes[2].report("refused", 1, 'it\'s "no"\npeer')
        crew.all("gather", "")
        assert ("refused", (1, 'it\'s "no"\npeer')) in crew.reported

        def lose():
            raise ConnectionError("it has ended")

        for one in crew.processes:
            with pytest.raises(ConnectionError, match="it has ended"):
                crew._pool.submit(one.agree, "z", lose).result(LONG)

        def fail():
            raise ValueError("no such thing")

        for n, one in enumerate(crew.processes):
            with pytest.raises(ValueError, match="no such thing"):
                crew._pool.submit(one.agree, "y", fail).result(LONG)
            del n


def test_processes_that_ask_different_things_get_an_error():
    with crew_of(2) as crew:
        first, other = crew.processes
        first.agree("alive", set)
        with pytest.raises(
            RuntimeError, match=r"process 0 asks alive, and process 1 x"
        ):
            other.agree("x", set)


@pytest.mark.parametrize("ended", [0, 1])
def test_all_fail_if_one_has_ended(ended):
    with crew_of(2) as crew:
        gone, left = crew.processes[ended], crew.processes[1 - ended]
        sockets = gone._members if ended == 0 else [gone._leader]  # pyright: ignore
        sockets[0].shutdown(socket.SHUT_RDWR)  # As the kernel does for a dead process.

        def fails() -> bool:
            with contextlib.suppress(ConnectionError):
                return left.check() or False
            return True

        until(fails)
        with pytest.raises(ConnectionError, match=f"process {ended} of worker 0 has"):
            left.agree("x", set)


def test_what_was_told_before_the_end_is_answered_and_nothing_after():
    with crew_of(3) as crew:
        first, other, _ = crew.processes
        first.agree("x", lambda: 3)
        first.close()
        assert other.agree("x", set) == 3
        with pytest.raises(ConnectionError, match="process 0 of worker 0 has ended"):
            other.agree("x", set)
    with crew_of(3) as crew:
        waits = crew._pool.submit(crew.processes[0].gather, "")
        crew._pool.submit(crew.processes[1].report, "text", "").result(LONG)
        assert not waits.done()
        crew.processes[2].close()  # After an error of its own.
        with pytest.raises(ConnectionError, match="process 2 of worker 0 has ended"):
            waits.result(LONG)


def test_a_frozen_leader_costs_bounded_memory():
    with crew_of(2) as crew:
        follower = crew.processes[1]
        crew.processes[0]._sending.acquire()  # pyright: ignore
        crew.met(7, 1)

        def come() -> None:
            for number in range(3 * MOST_OF_FOLLOWER):
                crew.came(1, 7, number)

        # The leader drops nothing, as if it was stopped.
        thread = threading.Thread(target=come, daemon=True)
        thread.start()
        until(lambda: len(follower._kept) == MOST_OF_FOLLOWER)  # pyright: ignore
        thread.join(0.2)
        assert thread.is_alive()
        crew.processes[0]._sending.release()  # pyright: ignore
        thread.join(LONG)
        assert not thread.is_alive()
        assert max(crew.kept()) <= MOST


def test_strangers_do_not_keep_the_processes_apart(monkeypatch):
    store = dict[str, str]()
    client = types.SimpleNamespace(
        key_value_set=store.__setitem__,
        blocking_key_value_get=lambda name, _: (
            until(lambda: name in store) or store[name]
        ),
    )
    monkeypatch.setattr(worker_job, "_store", lambda: client)
    monkeypatch.setattr(worker_job, "_numbers", iter([0, 0]))
    monkeypatch.setattr(worker_job, "HANDSHAKE_SECONDS", 0.1)

    def joined(process: int):
        party = types.SimpleNamespace(
            num_processes=2, process=process, workers=[5], bind="127.0.0.1"
        )
        return worker_job.join_worker(party, Inbox(), Bell(), lambda *_: None)

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        first = pool.submit(joined, 0)
        until(lambda: store)
        (text,) = store.values()
        address = text.split("'")[1].split(":")
        for words in (b"", b"GET / HTTP/1.1\n", b"0" * 68, b"\xff" * 1000):
            with socket.create_connection((address[0], int(address[1]))) as stranger:
                stranger.sendall(words)
                if not words:
                    stranger.recv(1)  # Until it is late.
        other = pool.submit(joined, 1)
        (one, life), (two, same) = first.result(LONG), other.result(LONG)
    assert life == same
    assert isinstance(two, Follower)
    assert one.agree("x", lambda: 3) == two.agree("x", set) == 3
    one.close()
    two.close()
