"""The driver's side of the race's workers."""

import dataclasses
import json
import os
import selectors
import subprocess
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

from train.bench.race.turns import Load, Turn
from train.job.namespaces import EmulatedCluster, Worker


class Team:
    """The workers of one kind, one process each, alive for all rounds.

    Their output goes to files in `out`.
    """

    def __init__(
        self, kind: str, load: Load, out: Path, cluster: EmulatedCluster, worker: Worker
    ):
        self._kind = kind
        self._logs: list[Path] = []
        self._workers: list[tuple[subprocess.Popen, Any]] = []
        for rank in range(cluster.num_workers):
            reader, writer = os.pipe()
            sizes = (*dataclasses.astuple(load), cluster.workers_per_node, writer)
            module = ["-m", f"train.bench.race.{kind}_worker"]
            process = worker(rank, [sys.executable, *module, *map(str, sizes)])
            log = f"{kind}.{cluster.nodes}x{cluster.workers_per_node}.{rank}.txt"
            self._logs.append(out / log)
            with self._logs[-1].open("w") as output:
                popen = subprocess.Popen(
                    process.argv,
                    env={**os.environ, **process.env},
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    pass_fds=[writer],
                    text=True,
                )
            # Only the worker holds this end now, so its death ends the answers.
            os.close(writer)
            self._workers.append((popen, os.fdopen(reader)))

    def take(self, turn: Turn) -> float:
        """Returns the mean seconds of a step, over steps and workers.

        Raises:
          SystemExit: if a worker dies; the others end with the cluster.
        """
        for rank, (popen, _) in enumerate(self._workers):
            assert popen.stdin is not None
            try:
                popen.stdin.write(json.dumps(turn) + "\n")
                popen.stdin.flush()
            except BrokenPipeError as error:
                raise self._death(rank, turn) from error
        means = []
        # In the order of arrival: the others wait for a dead worker, and never answer.
        with selectors.DefaultSelector() as selector:
            for rank, (_, answers) in enumerate(self._workers):
                selector.register(answers, selectors.EVENT_READ, (rank, answers))
            while selector.get_map():
                for key, _ in selector.select():
                    rank, answers = key.data
                    line = answers.readline()
                    if not line.endswith("\n"):
                        raise self._death(rank, turn)
                    selector.unregister(answers)
                    means.append(fmean(json.loads(line)))
        return fmean(means)

    def _death(self, rank: int, turn: Turn) -> SystemExit:
        log = self._logs[rank]
        tail = "".join(log.read_text().splitlines(keepends=True)[-20:])
        return SystemExit(
            f"error: {self._kind} worker {rank} died in the turn of "
            f"{str(turn.contestant)!r}; the end of {log}:\n{tail}"
        )

    def close(self) -> None:
        for popen, _ in self._workers:
            assert popen.stdin is not None
            popen.stdin.close()
        for popen, answers in self._workers:
            popen.wait()
            answers.close()
