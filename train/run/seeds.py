"""A run with several seeds at once: workers and seeds simulated as one program."""

import dataclasses
import functools
import json
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from decentjax import local_workers
from decentjax.analysis import traffic
from decentjax.dispersion import MEASURES, NORMS, tensor_names
from decentjax.topology import Topology, matrices
from train.cli.tables import write_whole
from train.config import Config
from train.data.batches import feed
from train.run import programs
from train.run.build import build_state, build_steps
from train.run.choose import build_policy, dispersion
from train.run.optimizers import build_optimizer
from train.tasks.task import Task


class SeedsOutcome(NamedTuple):
    """The results of K seeds of a run.

    Args:
      seconds: seconds of training, compilation included.
      losses: rows (step, mean training loss of each seed since the last row).
      training_loss: mean over the last tenth of the steps, [K].
      evaluations: rows (step, scores of the mean model of each seed by name).
      judged: final scores of what each mean model generates, by name.
      workers: final scores of each worker's model by name, [K, N].
      consensus_distance: final consensus distance, [K].
      tensors: names of the model's tensors, [L].
      dispersion: rows (step, for each measure how far the workers' norms are apart
        before they are averaged, [K, L], and under "consensus_distance" how far their
        tensors are apart after the step).
      sent: means over the steps, [K]: "connections" of a worker, and bytes sent "per
        worker" and "per link" of a node, by the busiest one.
    """

    seconds: float
    losses: list[tuple[int, list[float]]]
    training_loss: list[float]
    evaluations: list[tuple[int, dict[str, list[float]]]]
    judged: dict[str, list[float]]
    workers: dict[str, list[list[float]]]
    consensus_distance: list[float]
    tensors: list[str]
    dispersion: list[tuple[int, dict[str, list[list[float]]]]]
    sent: dict[str, list[float]]


def train_seeds(
    config: Config,
    seeds: range,
    report: Callable[[int, str], None],
    at_once: int | None = None,
    task: Task | None = None,
    mesh: Mesh | None = None,
) -> SeedsOutcome:
    """Trains with each seed, all seeds together.

    By default all workers are batched on one device. In a job of several processes all
    of them call it, and get the same results.

    Args:
      config: config of the run, whose own seed is ignored.
      seeds: the K seeds.
      report: function of the number of steps done and a phrase, for a progress line.
      at_once: number of seeds that fit into the device's memory; by default all.
      task: task to train, such as one with a part of the held-out data; by default the
        config's.
      mesh: mesh with a device for each worker; by default they are simulated.

    Raises:
      ValueError: if the shapes of a step differ between the seeds.
      FloatingPointError: if a loss is no longer finite.
    """
    task = task or config.task.build()
    size = seeds_at_once(config, len(seeds), at_once)
    outcomes = []
    for start in range(0, len(seeds), size):
        before = len(outcomes) * config.num_steps

        def report_all(step: int, words: str, before: int = before) -> None:
            report(before + step, words)

        some = seeds[start : start + size]
        outcomes.append(_train_together(config, task, some, report_all, mesh))
    return functools.reduce(join, outcomes)


def seeds_at_once(config: Config, num_seeds: int, at_once: int | None = None) -> int:
    """Returns how many seeds are trained together, of as many as fit into memory."""
    # Where the dispersion chooses the graph, each seed has its own.
    return 1 if build_policy(config).measures else at_once or num_seeds


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


def _train_together(
    config: Config,
    task: Task,
    seeds: range,
    report: Callable[[int, str], None],
    mesh: Mesh | None,
) -> SeedsOutcome:
    optimizer = build_optimizer(config.optimizer, config.num_steps)
    workers = range(config.workers.num_workers) if mesh is None else local_workers(mesh)
    policy = build_policy(config)
    train_step = programs.build_step(config, task, policy.menu, mesh)
    options = config.policy
    configs = [dataclasses.replace(config, seed=seed) for seed in seeds]
    states = [build_state(one, task, optimizer, workers) for one in configs]
    state = programs.put(jax.tree.map(lambda *rows: jnp.stack(rows), *states), mesh)
    batches = [feed(build_steps(one, task, workers)) for one in configs]
    score_means, score_workers = programs.build_scores(task)
    start, losses, evaluations, spread = time.monotonic(), [], [], []
    recent, last_tenth, places = [], [], []
    for step in range(1, config.num_steps + 1):
        rows = jax.tree.map(_stack_rows, *(next(seed).arrays for seed in batches))
        batch = programs.put(rows, mesh)
        places.append(policy(step - 1, (step - 1) / options.epoch_steps))
        state, metrics = train_step(state, batch, places[-1])
        if policy.measures and step % options.every_steps == 0:
            (norms,) = programs.fetch(metrics[NORMS])  # Of the one seed.
            policy(step, step / options.epoch_steps, dispersion(norms, options))
        # Arrays on the device: their values would make each step wait for the last.
        recent.append(metrics["loss"])
        if 10 * step > 9 * config.num_steps:  # At least the last step.
            last_tenth.append(metrics["loss"])
        end = step == config.num_steps
        if end or step % config.log.every_steps == 0:
            values = _mean_loss(recent)
            if not np.isfinite(values).all():
                raise FloatingPointError(f"the loss is {values} after step {step}")
            losses.append((step, values.tolist()))
            distances = programs.distances(state.params, mesh)
            norms, distances = programs.fetch((metrics[NORMS], distances))
            # Finite losses may be followed by an update that is not.
            if not np.isfinite(norms).all():
                raise FloatingPointError(f"the models are not finite after step {step}")
            spread.append((step, _spread(norms, distances)))
            report(step, f"loss {values.mean():.4f}")
            recent = []
        if end or step % config.evaluation.every_steps == 0:
            evaluations.append((step, score_means(state)))
    one_model = jax.eval_shape(task.init, jax.random.key(0))[0]
    per_node = config.workers.workers_per_node
    sent = sent_by(policy.menu, places, one_model, per_node)
    return SeedsOutcome(
        time.monotonic() - start,
        losses,
        _mean_loss(last_tenth).tolist(),
        evaluations,
        programs.judge(task, state),
        score_workers(state),
        programs.far_apart(state, mesh),
        tensor_names(one_model),
        spread,
        {name: [value] * len(seeds) for name, value in sent.items()},
    )


def _mean_loss(rows: list[jax.Array]) -> np.ndarray:
    """The mean over steps and workers of each seed, which may be infinite."""
    with np.errstate(over="ignore", invalid="ignore"):
        return np.mean(programs.fetch(rows), axis=(0, 2))


def sent_by(
    menu: Topology, places: Sequence[int], one_model: Any, workers_per_node: int
) -> dict[str, float]:
    """What workers and nodes send in a step, as means over the steps.

    Args:
      menu: the exchanges.
      places: place of each step's exchange among them.
      one_model: model as shapes.
      workers_per_node: number of consecutive workers that share a node's link.
    """
    num_bytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(one_model))
    counts = np.bincount(places, minlength=menu.period) / len(places)
    found = traffic(menu, num_bytes, workers_per_node)
    peers = [(w != 0).sum() / len(w) - 1 for w in matrices(menu)]
    return {
        "connections": float(counts @ peers),
        "per worker": float(counts @ [each.worker_bytes.mean() for each in found]),
        "per link": float(counts @ [each.node_bytes.max() for each in found]),
    }


def _spread(norms: np.ndarray, distances: np.ndarray) -> dict[str, list[list[float]]]:
    """Measures over the workers of norms [K, N, L], and the distances [K, N, L]."""
    by_worker = np.moveaxis(norms, 1, 0)
    found = {name: f(by_worker).tolist() for name, f in MEASURES.items()}
    return found | {"consensus_distance": distances[:, 0].tolist()}


def join(a: SeedsOutcome, b: SeedsOutcome) -> SeedsOutcome:
    """The results of the seeds of both."""

    def joined(x: dict[str, list], y: dict[str, list]) -> dict[str, list]:
        return {name: x[name] + y[name] for name in x}

    return SeedsOutcome(
        a.seconds + b.seconds,
        [(t, x + y) for (t, x), (_, y) in zip(a.losses, b.losses, strict=True)],
        a.training_loss + b.training_loss,
        [
            (t, joined(x, y))
            for (t, x), (_, y) in zip(a.evaluations, b.evaluations, strict=True)
        ],
        joined(a.judged, b.judged),
        joined(a.workers, b.workers),
        a.consensus_distance + b.consensus_distance,
        a.tensors,
        [
            (t, joined(x, y))
            for (t, x), (_, y) in zip(a.dispersion, b.dispersion, strict=True)
        ],
        joined(a.sent, b.sent),
    )


def keep(path: Path, wanted: Mapping[str, Any], outcome: SeedsOutcome) -> None:
    """Writes results, and what they are results of."""
    # Plain json, which has NaN, and not `to_json`: a later call reads it back.
    write_whole(path, json.dumps({**wanted, "outcome": outcome._asdict()}, indent=2))


def read_kept(path: Path, wanted: Mapping[str, Any]) -> SeedsOutcome | None:
    """Returns the results in a file, if they are of just this; else None."""
    if not path.exists():
        return None
    found = json.loads(path.read_text())
    # Another version of this program may have kept other results.
    is_whole = found.get("outcome", {}).keys() == set(SeedsOutcome._fields)
    if not is_whole or {name: found.get(name) for name in wanted} != wanted:
        return None
    return SeedsOutcome(**found["outcome"])


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
