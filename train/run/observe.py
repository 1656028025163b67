"""What a run measures of itself: metrics, consensus distance, scores, and their log."""

import functools
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from decentjax import AXIS, WorkerState, consensus_distance, mean_model, over_workers
from decentjax.gossip import Record
from decentjax.process import phases
from decentjax.updates import Metrics
from train.data.batches import Batch
from train.job.distributed import MetricMeans, gather
from train.run.array_placement import on_first
from train.run.nonfinite import say_quarantined
from train.run.optimizers import build_schedule
from train.run.resume import Begin
from train.run.run_info import peak_seconds
from train.run.scores import build_score
from train.run.setup import Run
from train.run.stop import Stop
from train.store.log import PER_SECOND, Log, warn


class Observer:
    """Measures a run and logs the means over all processes.

    Args:
      run: the run.
      begin: where it begins.
      means: metrics on their way to process 0.
      log: log of all processes; None but in process 0.
      record: function that records an evaluation in the timeline, if there is one.
    """

    def __init__(
        self,
        run: Run,
        begin: Begin,
        means: MetricMeans,
        log: Log | None,
        record: Record | None = None,
    ):
        config, task, mesh, watch = run.config, run.task, run.mesh, run.place.watch
        self.log, self._means, self._watch = log, means, watch
        self._amount, self._per_worker = (
            task.amount,
            config.workers.processes_per_worker,
        )
        self._peak_seconds = peak_seconds(run, begin.state)
        self._record, self._first = record, run.place.first
        self._num_skipped = self._num_counted = 0
        self.mean = build_mean(mesh)
        self._on_evaluation = config.on_evaluation
        self._schedule = jax.jit(build_schedule(config.optimizer, config.num_steps))
        self._consensus = build_consensus(mesh)
        self._score = build_score(task)
        self._step, self._time = begin.step, time.monotonic()
        self._quarantined: dict[int, str] = {}

    def skip(self, num_steps: int, was_away: bool) -> None:
        """Leaves out steps that this process has not done.

        Args:
          num_steps: their number.
          was_away: whether it was not training meanwhile: the time before is left out
            too.
        """
        self._step += num_steps
        if was_away:
            self._time, self._num_counted = time.monotonic(), 0

    def count(self, batch: Batch) -> None:
        """Counts the examples that a step takes and those that were skipped."""
        self._num_skipped += batch.skipped
        self._num_counted += self._amount.count(batch.arrays)

    def measure(
        self, step: int, metrics: Metrics, settled: WorkerState | None = None
    ) -> None:
        """Measures the workers of this process, for a row of the log.

        Args:
          step: number of steps done.
          metrics: metrics of the step, of each worker.
          settled: state whose consensus distance to measure, with no exchange on its
            way: the measurement is a collective of its own.
        """
        means = {name: local_mean(x) for name, x in metrics.items()}
        values = {name: mean for name, (mean, _) in means.items()}
        if self._watch is not None:
            values |= self._watch.values()
            self._watch.say_changes(step, self.log)
        # The workers of one process alone would seem closer than all are.
        elif settled is not None:
            values["consensus_distance"] = self._consensus(settled)
        values["learning_rate"] = float(self._schedule(step - 1))
        now = time.monotonic()
        seconds = max(now - self._time, 1e-9)
        values["steps_per_second"] = rate = (step - self._step) / seconds
        # Times the processes that read different batches, as the log has the mean.
        times = jax.process_count() // self._per_worker
        counted, skipped = (n * times for n in (self._num_counted, self._num_skipped))
        values[self._amount.unit + PER_SECOND] = counted / seconds
        values["skipped_examples"] = skipped
        if self._peak_seconds is not None:
            values["share_of_peak"] = self._peak_seconds * rate
        self._step, self._time = step, now
        self._num_skipped = self._num_counted = 0
        counts = {name: count for name, (_, count) in means.items()}
        self._means.put(step, values, counts)

    def say_quarantined(self, step: int, state: WorkerState, first: int) -> None:
        """Warns of workers whose updates were dropped since the last time.

        Args:
          step: number of steps done.
          state: state of the workers of this process.
          first: number of the worker of the first row.
        """
        said = say_quarantined(state, first)
        is_first = jax.process_index() % self._per_worker == 0  # Of its worker.
        for worker, text in said.items():
            if is_first and self._quarantined.get(worker) != text:
                warn(f"step {step}: {text}")
                if self.log is not None:
                    self.log.note(step, quarantine=text)
        self._quarantined = said

    def flush(self, step: int) -> None:
        """Waits until the rows of all processes have reached process 0; a barrier."""
        self._means.flush()
        gather("rows", step)

    def write_rows(self) -> None:
        """Logs the rows that all processes have measured by now."""
        if self.log is not None:
            for step, values in self._means.rows():
                self.log.metrics(step, values)

    def evaluate(self, step: int, state: WorkerState, stop: Stop) -> None:
        """Logs the scores of the mean model and of each worker's; none if stopped."""
        phases.note("evaluating")
        begin = time.monotonic()
        rows = list(local_rows((state.params, state.model_state)))
        numbers, models = zip(*rows, strict=True) if rows else ((), ())

        # Raised out of the pass over the data: an evaluation may take minutes, and a
        # job scheduler kills what still runs a while after its signal.
        def check_stop() -> None:
            phases.note("evaluating")  # A batch at a time.
            if stop.poll():
                raise _Stopped

        try:
            of_mean, *of_workers = self._score([self.mean(state), *models], check_stop)
        except _Stopped:
            return
        own = [
            (self._first + i, one) for i, one in zip(numbers, of_workers, strict=True)
        ]
        of_all = sorted(pair for pairs in gather("scores", own) for pair in pairs)
        if self.log is not None:
            self.log.evaluation(step, of_mean, dict(of_all))
            if self._on_evaluation is not None:
                self._on_evaluation(step, of_mean)
        self._time = time.monotonic()  # The rate is that of training alone.
        if self._record is not None:
            self._record("evaluate", step - 1, begin, self._time)


class _Stopped(BaseException):
    """A stop signal was received within an evaluation."""


def build_consensus(mesh: Mesh | None) -> Callable[[WorkerState], float]:
    """The consensus distance of a stacked state, over the workers of this process."""
    of_worker = functools.partial(consensus_distance, axis_name=AXIS)
    distances = jax.jit(over_workers(of_worker, mesh))
    return lambda state: local_mean(distances(state.params))[0]


def build_mean(mesh: Mesh | None) -> Callable[[WorkerState], tuple[Any, Any]]:
    """The params and model state of the mean model, in every process."""
    everywhere = None if mesh is None else NamedSharding(mesh, PartitionSpec())
    # Replicated, so each process has the whole mean in any of its devices.
    mean = jax.jit(mean_model, out_shardings=everywhere)

    def of_state(state: WorkerState) -> tuple[Any, Any]:
        models = mean((state.params, state.model_state))
        return jax.tree.map(lambda x: x.addressable_data(0), models)

    return of_state


def local_mean(x: jax.Array) -> tuple[float, int]:
    """The mean over the workers of this process, and of how many it is.

    Those whose number is not finite are left out, as in quarantine; it is NaN where no
    number is.
    """
    # All devices of a worker have its number.
    own = {str(shard.index): shard.data for shard in x.addressable_shards}
    rows = np.concatenate(list(map(np.ravel, own.values())))
    # NumPy would sum bfloat16 in bfloat16, where 1 + 256 is 256.
    rows = rows.astype(np.promote_types(rows.dtype, np.float32))
    finite = rows[np.isfinite(rows)]
    return float(np.mean(finite)) if finite.size else math.nan, finite.size


def local_rows(stacked: Any) -> Iterator[tuple[int, Any]]:
    """The rows of the workers of this process, with the workers' numbers.

    The first process of a worker has its row.
    """
    # Row by row, as a leaf [N, ...] of a job has most of its rows in other processes.
    leaves, structure = jax.tree.flatten(stacked)
    for shards in zip(*map(on_first, leaves), strict=True):
        # A shard has rows `start` to `stop` of all; without a mesh `start` is None.
        first = shards[0].index[0].start or 0
        rows = [shard.data for shard in shards]
        for row in range(len(rows[0])):
            yield first + row, jax.tree.unflatten(structure, _row(rows, row))


@jax.jit  # One program for all rows and leaves, and not one for each leaf.
def _row(stacked: list[jax.Array], row: int) -> list[jax.Array]:
    return [x[row] for x in stacked]
