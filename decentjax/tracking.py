"""Gradient tracking: rounds that average an estimate of the mean gradient too."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import optax

from decentjax._core.collectives import is_mixed, sum_dtype
from decentjax._core.optimizer_state import states_of
from decentjax.loss import Metrics
from decentjax.own_values import Values
from decentjax.rounds import Rounds, replace, shift
from decentjax.state import WorkerState
from decentjax.updates import LocalUpdate


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
                f"{f', {self.compression.kind.name}' if self.compression else ''}"
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
