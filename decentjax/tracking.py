"""Gradient tracking: rounds that average an estimate of the mean gradient too."""

import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import optax

from decentjax._core.collectives import is_mixed, sum_dtype
from decentjax._core.optimizer_state import states_of
from decentjax.loss import Metrics
from decentjax.rounds import Rounds, RoundState, foreign_state, replace, shift
from decentjax.state import WorkerState, check_arrays
from decentjax.updates import Adapt, halves_of


class TrackingState(NamedTuple):
    """State of a worker that tracks gradients.

    Args:
      carried: state of the rounds of y and x.
      tracker: y, in float32 at least: its rounding errors accumulate.
      gradient: gradient of the last step.
    """

    carried: RoundState
    tracker: Any
    gradient: Any


@dataclasses.dataclass(frozen=True)
class Tracking(Rounds):
    """Rounds in which workers descend along an estimate y of the mean gradient.

    The params that travel are `(y, x)`, and the optimizer gets y as its gradient.

    Raises:
      ValueError: if the rounds would not preserve the sum of all y: with an outer
        optimizer, fragments, a compression, `blend`, or `replace` with a delay.
    """

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
                f"{f', {self.compression.kind.name}' if self.compression else ''}"
                f"{', count_tokens' if self.count_tokens else ''}"
            )

    def travels(self, params: Any) -> Any:
        return params, params

    def init(self, params: Any) -> TrackingState:
        check_arrays(params, "init")
        tracker, gradient = _zeros(params), _zeros(params)
        return TrackingState(super().init((tracker, params)), tracker, gradient)

    def pack(self, state: WorkerState) -> WorkerState:
        one = state.extra
        if not isinstance(one, TrackingState):
            raise foreign_state(one)
        params, opt_state = (one.tracker, state.params), (state.opt_state, one.gradient)
        return state._replace(params=params, opt_state=opt_state, extra=one.carried)

    def unpack(self, state: WorkerState) -> WorkerState:
        (tracker, params), (opt_state, gradient) = state.params, state.opt_state
        extra = TrackingState(state.extra, tracker, gradient)
        return state._replace(params=params, opt_state=opt_state, extra=extra)

    def adapt(self, local: Adapt) -> Adapt:
        """The local update of pairs: `y <- y + g - g_before`.

        Raises:
          TypeError: if it has no halves, or, when traced, if its optimizer is an
            `optax.apply_if_finite`.
        """
        halves = halves_of(local, "gradient tracking")

        def adapt_pair(
            state: WorkerState, batch: Any, mixed: Any
        ) -> tuple[WorkerState, Metrics]:
            (_, params), (opt_state, before) = state.params, state.opt_state
            tracker, model = mixed
            _check_skips_nothing(opt_state)
            state = state._replace(params=params, opt_state=opt_state)
            halves.check_keeps_averages(state)
            found = halves.gradient(state, batch)
            wide = jax.tree.map(lambda y, g: g.astype(y.dtype), tracker, found.grads)
            tracker = jax.tree.map(
                lambda y, g, old: y + jnp.subtract(g, old), tracker, wide, before
            )
            narrow = jax.tree.map(lambda y, g: y.astype(g.dtype), tracker, found.grads)
            new, metrics = halves.descend(found._replace(grads=narrow), state, model)
            params, opt_state = (tracker, new.params), (new.opt_state, wide)
            return new._replace(params=params, opt_state=opt_state), metrics

        return adapt_pair


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
