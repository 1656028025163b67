"""Published methods, as plans.

Each is for any optax optimizer inside; with `optax.contrib.muon` inside, `diloco` is
MuLoCo (Thérien et al., 2025).
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import optax

from decentjax._core.butterfly import butterfly_hops, default_group_size
from decentjax._core.collectives import is_mixed, sum_dtype
from decentjax._core.optimizer_state import states_of
from decentjax._rounds.leaves import stacked_rows
from decentjax._rounds.low_rank import LowRank
from decentjax.exchange import Topology
from decentjax.plan import GradientMean
from decentjax.rounds import Rounds, blend, cut_leaves, replace, shift
from decentjax.state import Values, WorkerState
from decentjax.topology import (
    alone,
    butterfly_groups,
    complete,
    random_matching,
    with_mean_every,
)
from decentjax.updates import LocalUpdate, Metrics

__all__ = [
    "all_reduce",
    "diloco",
    "gradient_tracking",
    "local_sgd",
    "noloco",
    "streaming_diloco",
    "wagma",
]


def all_reduce(
    num_workers: int, compression: LowRank | None = None, begin_at: int = 0
) -> GradientMean:
    """All-reduce, the baseline: `x <- x + update(1/N sum_j grad f_j(x))`.

    With `compression=low_rank(rank)` it is PowerSGD. Of a matrix, M_i the gradient of
    worker i and what earlier steps have left out of it, and q a basis that all have:

        p = basis of 1/N sum_i M_i q,   s = 1/N sum_i M_i^T p,   M_i <- M_i - p s^T

    The optimizer gets p s^T, and the next q is a basis of s. Nothing is lost: the rest
    is added to the next gradient. Each step sends two sums, of the rows and columns of
    all leaves. Leaves that would hardly be smaller are averaged whole.

    Args:
      num_workers: N.
      compression: what `decentjax.compression.low_rank` returns; None averages whole
        gradients.
      begin_at: number of steps with whole gradients at the start, whose directions
        change fast.

    Raises:
      TypeError: for another compression.
      ValueError: if the number of steps is negative, or nothing begins after them.

    Examples:
      >>> import optax
      >>> from decentjax import local_update, methods, simulate
      >>> def loss_fn(params, model_state, batch, key):
      ...     return ((params - batch) ** 2).sum(), (model_state, {})
      >>> local = local_update(loss_fn, optax.sgd(0.1))
      >>> train_step = simulate(local, methods.all_reduce(8))
      >>> from decentjax.compression import low_rank
      >>> power_sgd = methods.all_reduce(8, low_rank(4), begin_at=1000)

    Source of low rank: Vogels, Karimireddy, Jaggi: PowerSGD (2019), Algorithm 2, and
    the communication hook of PyTorch.
    """
    return GradientMean(num_workers, compression, begin_at)


def local_sgd(topology: Topology, num_steps: int) -> Rounds:
    """H local steps, then `x_i <- sum_j W_ij x_j`.

    With the complete graph it is local SGD, with another graph decentralized local SGD,
    and with H = 1 adapt-then-combine.

    Args:
      topology: exchanges of the rounds, taken in turn.
      num_steps: H.

    Examples:
      >>> from decentjax import methods, topology
      >>> rounds = methods.local_sgd(topology.complete(8), num_steps=20)
      >>> rounds.topology.name, rounds.every
      ('complete', 20)

    Source: Stich, Local SGD Converges Fast and Communicates Little (2019).
    """
    return Rounds(topology, num_steps, merge=replace)


def diloco(
    num_workers: int,
    num_steps: int = 500,
    learning_rate: optax.ScalarOrSchedule = 0.7,
    momentum: float = 0.9,
) -> Rounds:
    """DiLoCo: H local steps, then Nesterov momentum on the mean of their changes.

        g = z - 1/N sum_i x_i,  v <- b v + g,  z <- z - a (g + b v),  x_i <- z

    Args:
      num_workers: N.
      num_steps: H.
      learning_rate: a; a schedule takes the number of the round.
      momentum: b.

    Examples:
      >>> from decentjax import methods
      >>> rounds = methods.diloco(num_workers=8, num_steps=100, learning_rate=0.7)
      >>> rounds.every
      100

    Source: Douillard et al., DiLoCo: Distributed Low-Communication Training of Language
    Models (2023), Algorithm 1, with the paper's values.
    """
    outer = _sgd(learning_rate, momentum, nesterov=True)
    return Rounds(complete(num_workers), num_steps, outer=outer, merge=replace)


def streaming_diloco(
    num_workers: int,
    params: Any,
    num_steps: int = 100,
    num_fragments: int = 4,
    delay: int = 5,
    share: float = 0.5,
    learning_rate: optax.ScalarOrSchedule = 0.4,
    momentum: float = 0.9,
    stacked: Sequence[int] = (),
) -> Rounds:
    """Streaming DiLoCo: DiLoCo one fragment at a time, hidden behind local steps.

    A fragment is sent every H steps, and merged some steps later, before the update of
    that step as in all rounds:

        x_i <- c x_i + (1 - c) z + update

    The paper merges after the update, and so keeps only the share c of it: here this
    one update in H is kept whole.

    Args:
      num_workers: N.
      params: model, or its shapes, to split into fragments of about equal size.
      num_steps: H.
      num_fragments: P.
      delay: steps until a sent fragment is merged.
      share: c, the worker's own part.
      learning_rate: learning rate of the outer optimizer.
      momentum: its momentum.
      stacked: numbers of the leaves whose leading dim is that of layers, as those of
        `nnx.scan`; fragments then are layers.

    Raises:
      ValueError: if a fragment gets no leaf, the delay is longer than H, or no fragment
        cuts a stacked leaf.

    Examples:
      >>> import jax.numpy as jnp
      >>> from decentjax import methods
      >>> params = {"a": jnp.zeros(100), "b": jnp.zeros(100)}
      >>> rounds = methods.streaming_diloco(8, params, num_steps=100, num_fragments=2)
      >>> rounds.fragments, rounds.delay
      (((0,), (1,)), 5)
      >>> layers = {"embed": jnp.zeros(10), "w": jnp.zeros((6, 50))}
      >>> methods.streaming_diloco(8, layers, num_fragments=2, stacked=[1]).fragments
      ((0, 1, 2, 3), (4, 5, 6))

    Source: Douillard et al., Streaming DiLoCo with overlapping communication (2025),
    Algorithm 2. There the fragments are layers; here they are consecutive leaves, or
    layers of stacked ones.
    """
    leaves = jax.tree.leaves(params)
    sizes: Sequence[int] = [x.size if is_mixed(x) else 0 for x in leaves]
    rows = stacked_rows(params, stacked)
    fragments = cut_leaves(sizes, num_fragments, rows)
    outer = _sgd(learning_rate, momentum, nesterov=True)
    graph = complete(num_workers)
    how = num_steps, delay, fragments, outer, blend(share)
    return Rounds(graph, *how, stacked=rows)


def noloco(
    num_workers: int,
    num_steps: int = 50,
    learning_rate: optax.ScalarOrSchedule = 0.7,
    momentum: float = 0.5,
    period: int = 16,
    seed: int = 0,
) -> Rounds:
    """NoLoCo: H local steps, then momentum on the mean of a random pair.

        m_i <- b m_i + z_i - 1/2 (x_i + x_j),  z_i <- z_i - a m_i,  x_i <- z_i

    This is the released code's `m <- b m + a (mean d + (mean z - z))`, `z <- z + m`
    with d = x - z, where the learning rate is constant.

    Args:
      num_workers: N; if odd, one worker has no partner in a round.
      num_steps: H.
      learning_rate: a.
      momentum: b.
      period: number of random matchings, taken in turn; a compiled step on a mesh has a
        program for each.
      seed: seed of the matchings.

    Examples:
      >>> from decentjax import methods
      >>> rounds = methods.noloco(num_workers=8, num_steps=50, period=4)
      >>> rounds.topology.period
      4

    Source: Kolehmainen et al., NoLoCo: No-all-reduce Low Communication Training Method
    for Large Models (2025), and its code.
    """
    topology = random_matching(num_workers, period, seed)
    outer = _sgd(learning_rate, momentum, nesterov=False)
    return Rounds(topology, num_steps, outer=outer, merge=replace)


@dataclasses.dataclass(frozen=True)
class Tracking(Rounds):
    """Rounds in which workers descend along an estimate y of the mean gradient.

    y travels with the model, and the optimizer gets it as its gradient.

    Raises:
      ValueError: if the rounds would not preserve the sum of all y: with an outer
        optimizer, fragments, a compression, `blend`, or `replace` with a delay.
    """

    travels: ClassVar[tuple[str, ...]] = ("tracker",)
    keeps_sums: ClassVar[bool] = True

    def __post_init__(self):
        super().__post_init__()
        is_kept = self.merge is shift or (self.merge is replace and self.delay <= 1)
        parts = self.outer, self.compression, self.fragments, self.count_tokens
        if any(parts) or not is_kept:
            raise ValueError(
                "tracking averages whole models and estimates, and preserves their "
                "sums: take merge=shift, no outer optimizer, no fragments, no "
                "compression and no count_tokens, got "
                f"{getattr(self.merge, '__name__', self.merge)} with a delay of "
                f"{self.delay}"
                f"{', an outer optimizer' if self.outer else ''}"
                f"{', fragments' if self.fragments else ''}"
                f"{f', {self.compression.name}' if self.compression else ''}"
                f"{', count_tokens' if self.count_tokens else ''}"
            )

    def own(self, params: Any) -> Values:
        # In float32 at least, as the rounding errors of y accumulate.
        return {"tracker": _zeros(params), "gradient": _zeros(params)}

    def update(
        self,
        local: LocalUpdate,
        state: WorkerState,
        batch: Any,
        mixed: Any,
        own: Values,
    ) -> tuple[WorkerState, Values, Metrics]:
        """Descends along `y <- y + g - g_before`.

        Raises:
          TypeError: if the optimizer is an `optax.apply_if_finite`.
        """
        _check_skips_nothing(state.opt_state)
        tracker, found = own["tracker"], local.gradient(state, batch)
        wide = jax.tree.map(lambda y, g: g.astype(y.dtype), tracker, found.grads)
        tracker = jax.tree.map(
            lambda y, g, old: y + jnp.subtract(g, old), tracker, wide, own["gradient"]
        )
        narrow = jax.tree.map(lambda y, g: y.astype(g.dtype), tracker, found.grads)
        new, metrics = local.descend(found._replace(grads=narrow), state, mixed)
        return new, {"tracker": tracker, "gradient": wide}, metrics


def _zeros(params: Any) -> Any:
    def zeros(x: Any) -> jax.Array:
        x = jnp.asarray(x)
        return jnp.zeros_like(x, sum_dtype(x) if is_mixed(x) else x.dtype)

    return jax.tree.map(zeros, params)


def _check_skips_nothing(opt_state: Any) -> None:
    """Raises a TypeError if the optimizer drops updates whose gradient is in y."""
    if states_of(opt_state, optax.ApplyIfFiniteState):
        raise TypeError(
            "gradient tracking averages y: a gradient that is not finite reaches all "
            "workers through it, and optax.apply_if_finite would then drop every later "
            "update. Make gradients finite before, as in optax.chain("
            "optax.zero_nans(), decentralize(...))"
        )


def gradient_tracking(
    topology: Topology, num_steps: int = 1, delay: int = 1
) -> Tracking:
    """Gradient tracking: each worker descends along an estimate of the mean gradient.

        y <- y + g - g_before,  x <- x + update(y),  and in a round  (x, y) <- W (x, y)

    The mean of all y is that of all gradients, so models reach the optimum over all
    data, however heterogeneous. With delay 1 both are sent beside the gradient, with 0
    after the update. The local update needs its two halves, as that of `local_update`
    has, and messages have the dtype of the leaves.

    Args:
      topology: exchanges of the rounds, taken in turn; the columns of each W sum to one
        too.
      num_steps: H; with more than one step it is local gradient tracking.
      delay: steps until messages are merged.

    Raises:
      ValueError: if the delay is longer than H.

    Examples:
      >>> from decentjax import methods, topology
      >>> rounds = methods.gradient_tracking(topology.ring(8))
      >>> rounds.every, rounds.delay
      (1, 1)

    Source: Nedić, Olshevsky, Shi: Achieving Geometric Convergence for Distributed
    Optimization over Time-Varying Graphs (2017), DIGing; Nguyen et al., On the
    Performance of Gradient Tracking with Local Updates (2022).
    """
    return Tracking(topology, num_steps, delay)


def _sgd(
    learning_rate: optax.ScalarOrSchedule, momentum: float, nesterov: bool
) -> optax.GradientTransformation:
    """The outer optimizer, after checking its numbers."""
    if isinstance(learning_rate, float | int) and not learning_rate >= 0:
        raise ValueError(f"learning_rate must be at least 0, got {learning_rate}")
    if isinstance(momentum, float | int) and not 0 <= momentum < 1:
        raise ValueError(f"momentum must be in [0, 1), got {momentum}")
    return optax.sgd(learning_rate, momentum, nesterov=nesterov)


@dataclasses.dataclass(frozen=True)
class Wagma(Rounds):
    """Rounds of every step over the groups of `butterfly_groups`.

    Between peers no group waits for a late member, but in every `period`-th step all
    workers form one, and wait for each other.

    Args:
      group_size: S.
      period: number of steps from one mean of all workers to the next.
    """

    group_size: int = 1
    period: int = 1

    def is_global(self, step: int) -> bool:
        """Whether all workers form one group."""
        return (step + 1) % self.period == 0

    def hops(self, step: int) -> list[int]:
        """The distances to the partners of a step: partner = worker XOR hop."""
        size = self.num_workers if self.is_global(step) else self.group_size
        return butterfly_hops(self.num_workers, size, step)

    def partners(self, worker: int) -> list[int]:
        """The partners of a worker in all steps."""
        every = butterfly_hops(self.num_workers, self.num_workers, 0)
        return [worker ^ hop for hop in every]


def wagma(
    num_workers: int, group_size: int | None = None, period: int = 10, delay: int = 0
) -> Wagma:
    """WAGMA-SGD: in each step means over small groups, which change, at times over all.

        x' = x + update(grad f(x)),    x <- (sum of the models x' of the group) / S

    Groups are those of `butterfly_groups`. Between peers a group waits for no late
    member: the first one begins, late ones take part with the model that they offered
    before, and then add their own, `x <- (sum + x') / (S + 1)`. So a model in a sum is
    at most `period` steps old, and after each mean of all the models are equal. A sum
    takes log2 S models on each link; dead processes are left out.

    Args:
      num_workers: N, a power of two.
      group_size: S, a power of two from 1 to N; by default that of `butterfly_groups`.
      period: steps from one mean of all workers, who wait for each other, to the next.
      delay: 1 averages the models with which a step begins, beside its gradient, as
        the authors' code; 0, after its update, is the paper's.

    Examples:
      >>> from decentjax import methods
      >>> plan = methods.wagma(num_workers=8, group_size=4, period=10)
      >>> plan.hops(0), plan.hops(1), plan.hops(9)
      ([1, 2], [4, 1], [1, 2, 4])

    Source: Li et al., WAGMA-SGD (2020), algorithms 1 and 2; the printed shift of the
    mask accumulates, which does not give the groups of its own example.
    """
    size = default_group_size(num_workers) if group_size is None else group_size
    groups = butterfly_groups(num_workers, size) if size != 1 else alone(num_workers)
    graph = with_mean_every(groups, period)
    return Wagma(graph, delay=delay, group_size=size, period=period)
