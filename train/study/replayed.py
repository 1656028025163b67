"""Runs of peers on one device: from the record of a run, or from a clock alone.

The workers take their steps one after the other, by the code of a real run.
"""

import collections
import itertools
import time
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from decentjax import WorkerState, gossip
from decentjax.updates import Metrics
from train.config import GroupExchange, PeerExchange, QuorumExchange
from train.run.build import build_steps, options_on
from train.run.nonfinite import check_gradients
from train.run.peer_run import amounts_of, at_step, wagma_plan
from train.run.setup import Run
from train.study.clock import Clock
from train.study.lives import WorkerLife
from train.study.outcome import Report, SeedsOutcome, finite_mean, in_turn
from train.study.programs import build_scores, far_apart, judge
from train.study.seeds import train_seeds


def repeat(
    run: Run,
    records: Sequence[gossip.MergeRecord],
    observe: Callable[[int, int, WorkerState, Metrics], None],
    lives: Sequence[WorkerLife] | None = None,
) -> list[WorkerState]:
    """Returns the state of each worker, stacked, [1, ...], after its last record.

    Args:
      run: the run.
      records: what each worker has mixed at each step.
      observe: function that is called with worker, step, state and metrics of each
        step; the next one donates all of the state but its params.
      lives: what each worker has read; by default batch t of its own at step t.

    Raises:
      ValueError: if the record is not whole, or of rounds without a quorum, or the
        lives of an elastic run are not given.
    """
    config, method = run.config, run.method
    has_quorum = isinstance(config.exchange, QuorumExchange)
    if method.rounds is not None and not has_quorum:
        raise ValueError(
            "rounds are repeated where they end with a quorum: those that wait for all "
            "workers have the numbers of exchange = auto"
        )
    if lives is None and run.place.elastic:
        raise ValueError(
            "an elastic run is not repeated: its records do not say who lived when"
        )
    workers = range(config.workers.num_workers)
    start = [run.first_state([worker]) for worker in workers]
    rows = [build_steps(run, [worker]) for worker in workers]

    def batches(worker: int, step: int) -> object:
        shard, at = (worker, step) if lives is None else lives[worker].places[step]
        batch = rows[shard][at]
        assert batch is not None
        return batch.arrays

    done = None
    if lives is not None:
        done = [(list(one.places), one.joined) for one in lives]
    match config.exchange:
        case QuorumExchange() as exchange:
            graph = method.rounds
            way = exchange.build_merge(len(workers), amounts_of(run.task))
            assert graph is not None
        case GroupExchange():
            graph, way = wagma_plan(run), "arrived"
        case PeerExchange(way=way):
            graph = method.graph
        case _:
            raise ValueError("only runs of peers are repeated")
    how = start.copy(), batches, records, done, at_step
    for worker, step, state, metrics in gossip.replay(run.local, graph, way, *how):
        observe(worker, step, state, metrics)
        start[worker] = state
    return start


def train_by_clock(
    run: Run, seeds: range, report: Report, clock: Clock
) -> SeedsOutcome:
    """Trains a run of peers with each seed in turn.

    Args:
      run: the run, whose own seed is ignored.
      seeds: the seeds, of the clock too.
      report: progress.
      clock: how long workers compute: what they mix follows from that.

    Raises:
      ValueError: if there is no clock for such a run.
      FloatingPointError: if a loss is NaN or infinite.
    """
    options_on(None, run.config.step)  # For its errors: no program is on a mesh.

    def train(seed: int, report: Report) -> SeedsOutcome:
        return _train(run.with_seed(seed), report, clock)

    return in_turn(train, seeds, run.config.num_steps, report)


def train_simulated(
    run: Run, seeds: range, report: Report, clock: Clock, at_once: int | None = None
) -> SeedsOutcome:
    """Trains with each seed: all of them together, or peers one after the other."""
    if clock.is_needed(run.config):
        return train_by_clock(run, seeds, report, clock)
    return train_seeds(run, seeds, report, at_once)


def _train(run: Run, report: Report, clock: Clock) -> SeedsOutcome:
    start, config, task = time.monotonic(), run.config, run.task
    timed = clock.run(run, config.seed)
    # All workers live, and each reads its own shard.
    lives = [
        WorkerLife({step: (worker, batch) for batch, step in enumerate(own)})
        for worker, own in enumerate(timed.steps)
    ]
    befores = [dict(itertools.pairwise([*own[::-1], -1])) for own in timed.steps]
    num_workers, every = config.workers.num_workers, config.log.every_steps
    score_means, score_workers = build_scores(task)
    losses = np.full((config.num_steps, num_workers), np.nan)
    models: dict[int, dict[int, WorkerState]] = collections.defaultdict(dict)
    evaluations, num_done = [], 0

    def observe(worker: int, step: int, state: WorkerState, metrics: Metrics) -> None:
        nonlocal num_done
        loss, num_done = float(metrics["loss"][0]), num_done + 1
        if config.step.not_finite == "stop":
            check_gradients(state, worker)
        # Else its update was dropped.
        if config.step.not_finite == "stop" and not np.isfinite(loss):
            raise FloatingPointError(
                f"the loss of worker {worker} is {loss} at step {step}"
            )
        losses[step, worker] = loss
        if num_done % (every * num_workers) == 0:
            report(num_done // num_workers, f"loss {loss:.4f}")
        before = befores[worker][step] if lives else step - 1
        for done in _evaluated(run, before + 1, step + 1):
            # Each worker comes there at its own time.
            kept = jax.tree.map(jnp.copy, state.model_state)
            own = state.params, (), kept, jax.random.key(0)[None]
            models[done][worker] = WorkerState(*own)
            if len(models[done]) == num_workers:
                evaluations.append((done, score_means(_together(models.pop(done)))))

    states = repeat(run, timed.records, observe, lives or None)
    state = _together(dict(enumerate(states)))
    cuts = [*range(0, config.num_steps, every), config.num_steps]
    return SeedsOutcome(
        time.monotonic() - start,
        [(b, [finite_mean(losses[a:b]).item()]) for a, b in itertools.pairwise(cuts)],
        [finite_mean(losses[9 * config.num_steps // 10 :]).item()],
        evaluations,
        judge(task, state),
        score_workers(state),
        far_apart(state),
        tensors=[],
        dispersion=[],
        sent={},
    )


def _evaluated(run: Run, before: int, done: int) -> list[int]:
    """Numbers of steps at which models are evaluated, after `before` to `done`."""
    every, last = run.config.evaluation.every_steps, run.config.num_steps
    return [t for t in range(before + 1, done + 1) if t % every == 0 or t == last]


def _together(states: Mapping[int, WorkerState]) -> WorkerState:
    """One seed of all workers, [1, N, ...], in the order of their numbers."""
    rows = [states[worker] for worker in range(len(states))]
    return jax.tree.map(lambda *x: jnp.concatenate(x)[None], *rows)
