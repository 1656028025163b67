"""What encloses the update of a transformation: wrappers of optax, and conditionals.

Both are known only while the step is traced, and neither has a public API.
"""

import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

from jax._src import core

from decentjax._core.collectives import AxisName

# They select or arrange leaves, and pass the updates on unchanged.
_KEEP_UPDATES = (
    "flatten",
    "inject_hyperparams",
    "masked",
    "partition",
    "split_real_and_imaginary",
    "with_extra_args_support",
)
_CHAINS = {"chain": "update_fns", "named_chain": "transforms"}


def check_is_last(carried: str, advice: str, *kept: str) -> None:
    """Raises a ValueError if a wrapper of optax changes the updates after this call.

    The updates contain the effect of an exchange: anything that scales, clips, delays
    or drops them would do the same to the exchange.

    Args:
      carried: whose updates they are and what they contain, for the error.
      advice: where the wrapper belongs, for the error.
      kept: further wrappers that are allowed.
    """
    for frame, wrapper in _wrappers():
        is_kept = wrapper in (*_KEEP_UPDATES, *kept) or _is_at_the_end(frame, wrapper)
        if not is_kept:
            raise ValueError(
                f"optax.{wrapper} changes the updates of {carried}: {advice}"
            )


def states_before() -> list[Any]:
    """The states of the transformations that chains around this call have called."""
    chains = [frame.f_locals for frame, name in _wrappers() if name in _CHAINS]
    return [chain.get("new_state") for chain in chains]


def _wrappers() -> Iterator[tuple[FrameType, str]]:
    """The calls of optax around this one, innermost first, and whose they are."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] == "optax":
            yield frame, frame.f_code.co_qualname.partition(".")[0]
        frame = frame.f_back


def _is_at_the_end(frame: FrameType, wrapper: str) -> bool:
    """Whether a chain calls the last of its transformations."""
    transforms = frame.f_locals.get(_CHAINS.get(wrapper, ""), ())
    done = frame.f_locals.get("new_state", ())
    return len(done) + 1 == len(transforms)


def in_conditional(axis_name: AxisName) -> bool:
    """Whether a branch is being traced that only some workers may take.

    A conditional around the mapped axis, where all workers take the same branch, does
    not count.
    """
    # jax's traces form a chain, innermost first: a vmap or shard_map has axis_data, a
    # traced function a frame that states its purpose.
    axes = {axis_name} if isinstance(axis_name, str) else set(axis_name)
    trace = core.trace_ctx.trace
    while trace is not None:
        axis = getattr(trace, "axis_data", None)
        if axis is not None and axis.name in axes:
            return False
        frame = getattr(trace, "frame", None)
        traced_for = frame.debug_info.traced_for if frame is not None else None
        if traced_for in ("cond", "switch"):
            return True
        # The chain of traces ends at jax.shard_map, outside all conditionals.
        trace = getattr(trace, "parent_trace", None)
    return False
