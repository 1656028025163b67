"""States in the form in which version 0.3 saved them."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax

from decentjax import WorkerState
from decentjax.optim import ScaleByAccumAdamState
from decentjax.state import OwnState, RoundState


class _Rounds(NamedTuple):
    """A `RoundState` before it had `tokens`."""

    anchor: Any
    outer: Any
    sent: Any
    coded: Any


class _Tracking(NamedTuple):
    """The state of gradient tracking, whose own values had fields."""

    carried: _Rounds
    tracker: Any
    gradient: Any


class _AccumAdam(NamedTuple):
    """A `ScaleByAccumAdamState` before it had `window`."""

    count: Any
    mu: Any
    nu: Any
    acc: Any


def forms_before(state: WorkerState) -> Iterator[WorkerState]:
    """Yields a state in each form that it may have in checkpoints of version 0.3."""
    optimizer = _each(ScaleByAccumAdamState, _before, state.opt_state)
    for extra in _extras_before(state.extra):
        yield state._replace(opt_state=optimizer, extra=extra)


def _extras_before(extra: Any) -> list[Any]:
    match extra:
        case RoundState(tokens=None) as rounds:
            # ATC, which is rounds without arrays, had none of their state.
            of_atc = [] if jax.tree.leaves(rounds) else [()]
            return [_Rounds(*rounds[:4]), *of_atc]
        case OwnState(RoundState() as rounds, {"tracker": y, "gradient": g}):
            return [_Tracking(_Rounds(*rounds[:4]), y, g)]
        case _:
            return [extra]


def as_now(saved: WorkerState, now: WorkerState) -> WorkerState:
    """Returns a saved state in the form of now, which another state has."""
    saved = saved._replace(
        opt_state=_each(
            _AccumAdam, lambda old: ScaleByAccumAdamState(*old), saved.opt_state
        )
    )
    match saved.extra:
        case _Rounds() as rounds:
            return saved._replace(extra=RoundState(*rounds))
        case _Tracking(rounds, tracker, gradient):
            own = {"tracker": tracker, "gradient": gradient}
            return saved._replace(extra=OwnState(RoundState(*rounds), own))
        case ():
            return saved._replace(extra=now.extra)
        case _:
            return saved


def _before(now: ScaleByAccumAdamState) -> Any:
    return now if now.window else _AccumAdam(*now[:4])


def _each(kind: type, change: Callable[[Any], Any], tree: Any) -> Any:
    """A tree whose nodes of a kind are changed."""

    def is_one(node: Any) -> bool:
        return isinstance(node, kind)

    return jax.tree.map(lambda x: change(x) if is_one(x) else x, tree, is_leaf=is_one)
