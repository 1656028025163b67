"""Own values: what a worker of a plan keeps beside its model, and sends with it.

Packed, the state has all that travels as its params, `(model, own values that travel)`,
and the others beside the optimizer's state. So a step needs not know of them.
"""

from typing import Any

import jax
import jax.numpy as jnp

from decentjax._core.collectives import is_mixed
from decentjax.state import OwnState, Values, WorkerState, strong
from decentjax.updates import LocalUpdate, Metrics, kinds


def first_values(plan: Any, params: Any) -> Values:
    """Returns the first own values of a worker, in arrays of their own.

    Raises:
      TypeError: if the plan has no dict of them.
      ValueError: if one that travels is missing, or has nothing to average.
    """
    name, values = type(plan).__name__, plan.own(params)
    if not (isinstance(values, dict) and all(isinstance(x, str) for x in values)):
        raise TypeError(
            f"{name}.own must return a dict of own values by name, got "
            f"{type(values).__name__}"
        )
    # Copies, as a step donates each buffer once.
    values = jax.tree.map(lambda x: strong(jnp.array(x, copy=True)), values)
    for one in plan.travels:
        if one not in values:
            raise ValueError(
                f"{name}.travels names {one!r}, which no worker has: {name}.own "
                f"returns {', '.join(values) or 'nothing'}"
            )
        if not any(map(is_mixed, jax.tree.leaves(values[one]))):
            raise ValueError(
                f"{name}.travels names {one!r}, in which there is no float, and "
                "exchanges average floats: leave it out"
            )
    return values


def sent_with(travels: tuple[str, ...], model: Any, values: Values) -> Any:
    """What travels: the model, and the own values of these names."""
    return model, {name: values[name] for name in travels}


def packed(travels: tuple[str, ...], state: WorkerState) -> WorkerState:
    """The state whose params are all that travels."""
    carried, values = state.extra
    kept = {name: one for name, one in values.items() if name not in travels}
    return state._replace(
        params=sent_with(travels, state.params, values),
        opt_state=(state.opt_state, kept),
        extra=carried,
    )


def unpacked(state: WorkerState) -> WorkerState:
    """The inverse of `packed`."""
    (model, sent), (opt_state, kept) = state.params, state.opt_state
    extra = OwnState(state.extra, kept | sent)
    return state._replace(params=model, opt_state=opt_state, extra=extra)


def update_packed(
    plan: Any, local: LocalUpdate, state: WorkerState, batch: Any, mixed: Any
) -> tuple[WorkerState, Metrics]:
    """The plan's `update` as a local update of packed states."""
    plain, (model, arrived) = unpacked(state), mixed
    values = plain.extra.values
    local.check_keeps_averages(plain)
    given = plain._replace(extra=()), batch, model, values | arrived
    new, now, metrics = _checked(plan, plan.update(local, *given), values)
    new = packed(plan.travels, new._replace(extra=OwnState(state.extra, now)))
    return new, metrics


def _checked(plan: Any, result: Any, before: Values) -> Any:
    """The result of an update; raises a TypeError if it is not that of one."""
    name = f"{type(plan).__name__}.update"
    match result:
        case (WorkerState(), dict() as values, dict()):
            pass
        case _:
            raise TypeError(
                f"{name} must return a WorkerState, the own values and the metrics, "
                f"got the structure {jax.tree.structure(result)}"
            )
    got, wanted = kinds(values), kinds(before)
    if got != wanted:
        wrong = next(x for x in wanted | got if got.get(x) != wanted.get(x))
        raise TypeError(
            f"{name} must return own values like those that it gets: {wrong} was "
            f"{wanted.get(wrong)} and is {got.get(wrong)}"
        )
    return result
