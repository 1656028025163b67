"""States in the form in which version 0.3 saved them."""

from typing import Any, NamedTuple

from decentjax import WorkerState
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


def as_before(state: WorkerState) -> WorkerState:
    """Returns a state in the form of version 0.3, or the same if that was no other."""
    match state.extra:
        case RoundState(tokens=None) as rounds:
            return state._replace(extra=_Rounds(*rounds[:4]))
        case OwnState(RoundState() as rounds, {"tracker": y, "gradient": g}):
            return state._replace(extra=_Tracking(_Rounds(*rounds[:4]), y, g))
        case _:
            return state


def as_now(state: WorkerState) -> WorkerState:
    """Returns a state in its form of now, the inverse of `as_before`."""
    match state.extra:
        case _Rounds() as rounds:
            return state._replace(extra=RoundState(*rounds))
        case _Tracking(rounds, tracker, gradient):
            own = {"tracker": tracker, "gradient": gradient}
            return state._replace(extra=OwnState(RoundState(*rounds), own))
        case _:
            return state
