"""The bench of transports: sockets on the loopback, what it refuses, its tables."""

import importlib.util

import pytest

pytest.importorskip("pyroute2", reason="needs the extra: pip install -e '.[emulate]'")

from benches.transports import __main__ as bench
from benches.transports import measures, worker
from benches.transports.carriers import CARRIERS
from benches.transports.keys import write_keys
from train.job.processes import Process

SIZE = 4_000_000
both = pytest.mark.parametrize("name", ["sockets", "sockets-tls"])


@pytest.fixture
def place(tmp_path):
    write_keys(tmp_path / "keys")

    def worker(rank, argv):
        return Process(str(rank), list(argv), {})

    log = tmp_path / "log.txt"
    return measures.Place(["127.0.0.1"] * 2, worker, tmp_path / "keys", log)


@both
def test_two_workers_swap(place, name):
    found = measures.swap(place, name, 100_000, 20)
    assert found["seconds"] > 0
    assert found["processor"] > 0


@both
def test_random_bytes_stop_no_one(place, name):
    # Messages that are shorter than the random bytes: none may be taken for one.
    assert measures.tried(measures.intrude, place, name, 500), place.log.read_text()


@pytest.mark.slow
@both
def test_a_frozen_reader_gets_the_newest_and_stops_no_one(place, name, monkeypatch):
    monkeypatch.setattr(measures, "PUTS", 20)
    monkeypatch.setattr(measures, "FROZEN_SECONDS", 1.0)
    monkeypatch.setattr(measures, "SETTLING_SECONDS", 1.0)
    three = place._replace(hosts=["127.0.0.1"] * 3)
    found = measures.freeze(three, name, SIZE)
    assert found["newest"]
    assert found["stale"] <= 2  # One was confirmed just then, one was on its way.
    assert found["got"] > 10  # A busy machine may replace some.
    assert found["grown"] < 8 * SIZE


def test_a_lost_worker_ends_its_turn_alone(place):
    place.keys.joinpath("peer.pem").unlink()
    assert measures.tried(measures.swap, place, "sockets-tls", 1000, 1) == {}
    assert measures.tried(measures.swap, place, "sockets", 1000, 1)
    found = measures.middle([{}, {"seconds": 3.0}, {"seconds": 1.0}])
    assert found == {"turns": 3, "lost": 1, "seconds": 2.0}
    assert measures.middle([{}]) == {"turns": 1, "lost": 1}


class PastTheNetwork:
    """As zenoh's shared memory does it."""

    def __init__(self, setting):
        self._setting = setting

    def connect(self, peers):
        pass

    def put(self, peer, message):
        self._setting.arrived(message)


def test_bytes_that_come_past_the_network_are_refused(tmp_path, monkeypatch):
    monkeypatch.setitem(CARRIERS, "past", PastTheNetwork)
    monkeypatch.setattr(worker, "_sent_bytes", lambda: 7)
    one = worker.Worker("past", ("127.0.0.1", 0), 1000, tmp_path)
    with pytest.raises(ValueError, match="of 8 messages only 0 bytes left this node"):
        one.swap(8)


def test_missing_packages_are_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install cryptography pyzmq, or choose"):
        bench.check_packages(["sockets", "pyzmq"])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name != "zmq")
    bench.check_packages(["sockets", "zenoh-drop"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rounds": 0}, "rounds must be at least 1"),
        ({"rates": ("none",)}, "rates must be like 200mbit, got 'none'"),
        ({"carriers": ()}, "carriers must be at least one"),
        ({"megabytes": (float("nan"),)}, "megabytes must be at least 0.01"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        bench.TransportsBench(**options)


def test_tables():
    turns = {"turns": 3, "lost": 1}
    swap = {"rate": "1gbit", "carrier": "sockets"}
    rows = [
        swap | turns | {"megabytes": 4.0, "seconds": 0.04, "processor": 0.005},
        swap | turns | {"megabytes": 0.1, "seconds": 0.001, "processor": 0.001},
        swap | {"megabytes": 24.0, "turns": 3, "lost": 3},
    ]
    assert bench.swap_table(rows).splitlines()[2:] == [
        "| 1gbit | 4 | sockets | 40.00 | 1.25 | 5.00 | 2 of 3 |",
        "| 1gbit | 0.1 | sockets | 1.00 |  | 1.00 | 2 of 3 |",
        "| 1gbit | 24 | sockets | fails |  |  | 0 of 3 |",
    ]
    frozen = {"got": 60.0, "longest": 0.002, "grown": 8e6, "stale": 1.0, "newest": 1.0}
    row = {"carrier": "x", "frozen": turns | frozen, "intruded": turns, "lines": 61}
    shown = bench.fault_table([row]).splitlines()[2]
    assert shown == "| x | 60 | 2.0 | 8 | 1 | yes | 2 of 3 | 61 |"
