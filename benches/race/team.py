"""The driver's side of the race's workers."""

import contextlib
import os
import pickle
import re
import selectors
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

from benches.race.turns import StepTime, WorkerTurn
from train.job.namespaces import EmulatedCluster, Nodes, in_cluster, parse_rate

T = TypeVar("T")


def parse_cluster(name: str, rate: str) -> EmulatedCluster:
    """Returns the emulated cluster NODESxWORKERS_PER_NODE, with links of that rate.

    A third number is that of the processes of each worker.

    Raises:
      ValueError: if the name or the rate is written in another way.
    """
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*){1,2}", name):
        raise ValueError(
            "a cluster is written as 4x2, or 4x2x2 for workers of two processes, got "
            f"{name!r}"
        )
    if parse_rate(rate) is None:
        raise ValueError(f"a bench of clusters needs a rate, such as 200mbit: {rate!r}")
    nodes, per_node, *processes = map(int, name.split("x"))
    return EmulatedCluster(
        nodes=nodes,
        workers_per_node=per_node,
        processes_per_worker=processes[0] if processes else 1,
        rate=rate,
    )


def cluster_name(cluster: EmulatedCluster) -> str:
    """Returns what `parse_cluster` takes."""
    each = cluster.processes_per_worker
    of = f"x{each}" if each > 1 else ""
    return f"{cluster.nodes}x{cluster.workers_per_node}{of}"


def measure_in(cluster: EmulatedCluster, measure: Callable[[Nodes], T]) -> T:
    """Returns measure(nodes), which runs in the cluster's switch; see `in_cluster`.

    Raises:
      SystemExit: if it fails.
      PermissionError: if this process may not create namespaces.
    """
    # The switch is a fork of this process, and shares its open files.
    with tempfile.TemporaryFile() as file:

        def job(nodes: Nodes) -> int:
            pickle.dump(measure(nodes), file)
            file.flush()  # The fork ends without closing it.
            return 0

        if code := in_cluster(cluster, job):
            raise SystemExit(code)
        file.seek(0)
        return pickle.load(file)


class Team:
    """The processes of one kind of worker, alive for all rounds.

    Args:
      module: module of a worker, whose last part is its kind; it calls `serve`.
      load: load of each worker, sent to it first.
      out: folder for their output.
      cluster: the cluster.
      nodes: its nodes.
      env: further variables of their environment.
    """

    def __init__(
        self,
        module: str,
        load: Any,
        out: Path,
        cluster: EmulatedCluster,
        nodes: Nodes,
        env: Mapping[str, str] | None = None,
    ):
        self._kind = module.rpartition(".")[2]
        # Where workers that exchange by peers find each other.
        self._books = tempfile.TemporaryDirectory()
        self._logs: list[Path] = []
        self._popens: list[subprocess.Popen] = []
        self._workers: list[Connection] = []
        # Kept over all turns, as epoll then holds events in the order of their arrival.
        self._selector = selectors.DefaultSelector()
        argv = [sys.executable, "-m", "decentjax", module]
        for rank, process in enumerate(nodes.processes(argv)):
            log = out / f"{self._kind}.{cluster_name(cluster)}.{rank}.txt"
            ours, theirs = Pipe()
            ours.send(load)
            with log.open("w") as output:
                popen = subprocess.Popen(
                    process.argv,
                    env={
                        **os.environ,
                        **process.env,
                        **(env or {}),
                        "BOOKS": self._books.name,
                    },
                    # A socket, which `serve` reads and also writes: jax and gloo print
                    # to standard output.
                    stdin=theirs.fileno(),
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
            # Only the worker holds this end now, so its death ends the answers.
            theirs.close()
            self._logs.append(log)
            self._popens.append(popen)
            self._workers.append(ours)
            self._selector.register(ours, selectors.EVENT_READ, rank)

    def take(self, turn: WorkerTurn) -> float:
        """Returns the mean seconds of a step, over steps and processes; see `times`."""
        return fmean(x.seconds for steps in self.times(turn) for x in steps)

    def times(self, turn: WorkerTurn) -> list[list[StepTime]]:
        """Returns the measured steps of each process, [N][T].

        Raises:
          SystemExit: if a process dies; the others end with the cluster.
        """
        for worker in self._workers:
            # The selector reports a worker that has died.
            with contextlib.suppress(ConnectionError):
                worker.send(turn)
        times: dict[int, list[StepTime]] = {}
        while len(times) < len(self._workers):
            # In the order of events: if a worker dies, the others wait for it in a
            # collective that fails later, and never answer.
            for key, _ in self._selector.select():
                worker: Any = key.fileobj
                try:
                    times[key.data] = worker.recv()
                except (EOFError, ConnectionError) as error:
                    raise self._death(key.data, turn) from error
        return [steps for _, steps in sorted(times.items())]

    def _death(self, rank: int, turn: WorkerTurn) -> SystemExit:
        log = self._logs[rank]
        tail = "".join(log.read_text().splitlines(keepends=True)[-20:])
        return SystemExit(
            f"error: {self._kind} {rank} died in the turn of "
            f"{str(turn.contestant)!r}; the end of {log}:\n{tail}"
        )

    def close(self) -> None:
        # First all of them, then wait: jax's processes wait for each other at exit.
        self._selector.close()
        for worker in self._workers:
            worker.close()
        for popen in self._popens:
            popen.wait()
        self._books.cleanup()
