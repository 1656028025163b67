"""A run with several seeds at once: workers and seeds simulated as one program."""

import collections
import functools
import time
from collections.abc import Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from decentjax import WorkerState
from decentjax.analysis import traffic
from decentjax.dispersion import NORMS, measures_of, tensor_names
from decentjax.plan import Event, policy_of
from decentjax.process import phases
from decentjax.topology import Topology, matrices
from decentjax.updates import Metrics
from train.config import Config
from train.data.batches import feed
from train.run.build import build_steps
from train.run.check_task import trace_task
from train.run.method import Method
from train.run.nonfinite import QUARANTINED, watch_of
from train.run.policy_choice import is_measured, learn
from train.run.setup import Run
from train.store.log import warn
from train.study import programs
from train.study.outcome import Report, SeedsOutcome, finite_mean, in_turn


def train_seeds(
    run: Run, seeds: range, report: Report, at_once: int | None = None
) -> SeedsOutcome:
    """Trains with each seed, all seeds together.

    In a job of several processes all of them call it, and get the same results.

    Args:
      run: the run, whose own seed is ignored.
      seeds: the K seeds.
      report: progress.
      at_once: number of seeds that fit into the device's memory; by default all.

    Raises:
      ValueError: if the shapes of a step differ between the seeds.
      FloatingPointError: if a loss is NaN or infinite.
    """
    config = run.config
    trace_task(run.task, config.step.batch_per_worker, config.workers.num_workers)
    size = seeds_at_once(config, len(seeds), at_once)
    groups = [seeds[start : start + size] for start in range(0, len(seeds), size)]
    train = functools.partial(_train_together, run)
    return in_turn(train, groups, config.num_steps, report)


def seeds_at_once(config: Config, num_seeds: int, at_once: int | None = None) -> int:
    """Returns how many seeds are trained together, of as many as fit into memory."""
    # Where the dispersion chooses the graph, each seed has its own.
    policy = policy_of(config.plan)
    is_alone = policy is not None and policy.measures
    return 1 if is_alone else at_once or num_seeds


def draws_of(config: Config, seeds: range) -> Hashable:
    """Returns what the initial models and the order of the data depend on.

    If it is equal for two configs, seed k trains both from one initial model on one
    order of the data.
    """
    return (
        tuple(seeds),
        config.task,
        config.data.skew,
        config.workers.num_workers,
        config.step.batch_per_worker,
        config.step.num_micro_batches,
    )


def _train_together(run: Run, seeds: range, report: Report) -> SeedsOutcome:
    runs, workers = [run.with_seed(seed) for seed in seeds], run.place.workers
    run = runs[0]
    config, task, method, mesh = run.config, run.task, run.method, run.mesh
    train_step, policy = programs.build_step(run), method.policy
    states = [one.first_state(workers) for one in runs]
    state = programs.put(jax.tree.map(lambda *rows: jnp.stack(rows), *states), mesh)
    batches = [feed(build_steps(one, workers)) for one in runs]
    score_means, score_workers = programs.build_scores(task)
    start, log = time.monotonic(), _Log(run)
    evaluations, taken = [], []
    for step in range(1, config.num_steps + 1):
        phases.note("computing", step - 1)
        rows = jax.tree.map(_stack_rows, *(next(seed).arrays for seed in batches))
        batch = programs.put(rows, mesh)
        taken.append(method.schedule[step - 1])
        state, metrics = train_step(state, batch, taken[-1])
        if policy is not None and is_measured(config.method, step):
            (norms,) = programs.fetch(metrics[NORMS])  # Of the one seed.
            learn(policy, norms)
        log.add(step, metrics)
        end = step == config.num_steps
        if end or step % config.log.every_steps == 0:
            loss = log.write(step, state, metrics[NORMS])
            report(step, f"loss {loss:.4g}")
        if end or step % config.evaluation.every_steps == 0:
            phases.note("evaluating")
            evaluations.append((step, score_means(state)))
    log.say_dropped()
    one_model = jax.eval_shape(task.init, jax.random.key(0))[0]
    sent = sent_by(method, config.workers.workers_per_node, taken, one_model)
    return SeedsOutcome(
        time.monotonic() - start,
        log.losses,
        log.mean_loss(log.last_tenth).tolist(),
        evaluations,
        programs.judge(task, state),
        score_workers(state),
        programs.far_apart(state, mesh),
        tensor_names(one_model),
        log.dispersion,
        {name: [value] * len(seeds) for name, value in sent.items()},
    )


class _Log:
    """Losses and dispersion of K seeds while they train."""

    def __init__(self, run: Run):
        config = run.config
        self.losses, self.dispersion, self.last_tenth = [], [], []
        self._num_steps, self._mesh, self._recent = config.num_steps, run.mesh, []
        self._drops = config.step.not_finite == "quarantine"
        self._dropped = []

    def add(self, step: int, metrics: Metrics) -> None:
        """Keeps the losses of a step, [K, N], on the device."""
        # Their values would make each step wait for the last.
        self._recent.append(metrics["loss"])
        self._dropped += [metrics[QUARANTINED]] if self._drops else []
        if 10 * step > 9 * self._num_steps:  # At least the last step.
            self.last_tenth.append(metrics["loss"])

    def write(self, step: int, state: WorkerState, norms: jax.Array) -> float:
        """Writes the rows of a step, and returns the mean loss since the last.

        Raises:
          FloatingPointError: if a loss, a gradient or a model has NaN or infinity.
        """
        values = self.mean_loss(self._recent)
        if not self._drops and not np.isfinite(values).all():
            raise FloatingPointError(f"the loss is {values} after step {step}")
        if not self._drops and programs.fetch(watch_of(state).total).any():
            raise FloatingPointError(f"a gradient is not finite after step {step}")
        distances = programs.distances(state.params, self._mesh)
        found = programs.fetch((norms, distances))
        # Finite gradients may be followed by an update that is not.
        if not all(np.isfinite(x).all() for x in found):
            raise FloatingPointError(f"the models are not finite after step {step}")
        self.losses.append((step, values.tolist()))
        self.dispersion.append((step, _spread(*found)))
        self._recent = []
        return values.mean()

    def say_dropped(self) -> None:
        """Warns of updates that were not finite, and so were dropped."""
        if not self._drops:
            return
        counts = np.sum(programs.fetch(self._dropped), (0, 2)).astype(int).tolist()
        if any(counts) and jax.process_index() == 0:
            warn(
                "updates that were not finite were dropped, of the seeds in turn "
                f"{', '.join(map(str, counts))}"
            )

    def mean_loss(self, rows: list[jax.Array]) -> np.ndarray:
        """The mean over steps and workers of each seed, which may be infinite."""
        found = np.array(programs.fetch(rows))
        found = found.astype(np.promote_types(found.dtype, np.float32))
        if self._drops:
            return finite_mean(found, (0, 2))
        with np.errstate(over="ignore", invalid="ignore"):
            return np.mean(found, axis=(0, 2))


def sent_by(
    method: Method, workers_per_node: int, taken: Sequence[Event], one_model: Any
) -> dict[str, float]:
    """What workers and nodes send in a step, as means over the steps.

    Args:
      method: method of a run.
      workers_per_node: number of workers that share a node.
      taken: what each step takes of the method's plan.
      one_model: model as shapes.
    """
    total = {"connections": 0.0, "per worker": 0.0, "per link": 0.0}
    for one, count in collections.Counter(taken).items():
        sent = method.sent(one, one_model)
        if sent is None:
            continue
        graph = Topology("one", (sent.exchange,))
        (found,) = traffic(graph, sent.num_bytes, workers_per_node)
        (matrix,) = matrices(graph)
        total["connections"] += count * ((matrix != 0).sum() / len(matrix) - 1)
        total["per worker"] += count * found.worker_bytes.mean()
        total["per link"] += count * found.node_bytes.max()
    return {name: float(value / len(taken)) for name, value in total.items()}


def _spread(norms: np.ndarray, distances: np.ndarray) -> dict[str, list[list[float]]]:
    """Measures over the workers of norms [K, N, L], and the distances [K, N, L]."""
    measures = measures_of(np.moveaxis(norms, 1, 0))
    found = {name: values.tolist() for name, values in measures.items()}
    return found | {"consensus_distance": distances[:, 0].tolist()}


def _stack_rows(*rows: np.ndarray) -> np.ndarray:
    """Stacks the rows of all seeds.

    Raises:
      ValueError: if their shapes differ.
    """
    shapes = {row.shape for row in rows}
    if len(shapes) > 1:
        raise ValueError(
            f"seeds are trained together on batches of one shape, got {sorted(shapes)}"
        )
    return np.stack(rows)
