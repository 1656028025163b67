"""Reads the schedule of a compiled step: pairs the start of each message with its end.

A collective counts as blocking until its end is found, so that a form of message that
is not known here can only make the result worse, never better.
"""

import dataclasses
import itertools
import math
from collections.abc import Container, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from decentjax.overlap import hlo
from decentjax.overlap.flops import NOTHING, work_of
from decentjax.overlap.hlo import ArrayType, Computation, Instruction
from decentjax.overlap.step_schedule import Collective, Op, StepSchedule

KINDS = (
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-broadcast",
    "collective-permute",
    "ragged-all-to-all",
    "reduce-scatter",
)

CONTEXT = ArrayType("u32", ())  # Context that the result of a start may include.

NESTING = ("async", "call", "conditional", "while")

# The result of a start may reach its end through them.
PASSING = hlo.FORWARDING | {"async-update", "copy", "reshape"}


def read(
    compiled: jax.stages.Compiled | str, axes: Mapping[str, int] | None = None
) -> StepSchedule:
    """Reads the schedule of a compiled step.

    Args:
      compiled: result of `jit(step).lower(...).compile()`, or its text.
      axes: names and sizes of the mesh axes, in order; by default those of the compiled
        step's arguments, or one axis "devices" if they are on no mesh.

    Returns:
      The collectives, and what runs beside them.

    Raises:
      ValueError: if the text is no compiled program, the axes have another number of
        devices, or the groups of a collective have an unknown form.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> from decentjax import overlap
      >>> x = jnp.ones((64, 64))
      >>> schedule = overlap.read(jax.jit(lambda x: x @ x).lower(x).compile())
      >>> schedule.num_devices, schedule.collectives
      (1, ())
    """
    if isinstance(compiled, str):
        text = compiled
    else:
        text = compiled.as_text()
        axes = _axes_of(compiled) if axes is None else axes
    module = hlo.parse(text or "")
    axes = {"devices": module.num_devices} if axes is None else dict(axes)
    if math.prod(axes.values()) != module.num_devices:
        raise ValueError(
            f"the program runs on {module.num_devices} devices, the axes {axes} have "
            f"{math.prod(axes.values())}"
        )
    walk = _Walk(module.num_devices, axes)
    place = _Place(1, False, False)
    ops = walk.ops(module.entry, place) + walk.ops_of_the_rest(module, place)
    unpaired = [walk.collectives[number].name for number in sorted(walk.unpaired)]
    return StepSchedule(
        ops,
        tuple(walk.collectives),
        module.num_devices,
        tuple(walk.uncounted),
        tuple(unpaired),
    )


class _Place(NamedTuple):
    """What encloses a computation, and how often a step runs it."""

    calls: float
    in_conditional: bool
    in_loop: bool


class _Walk:
    """Walks the computations of a program and collects its collectives.

    Each collective is recorded as blocking first, and `_end` changes that, so none is
    lost: neither one that ends in another computation nor one without an end.
    """

    def __init__(self, num_devices: int, axes: dict[str, int]):
        self._num_devices, self._axes = num_devices, axes
        self.collectives: list[Collective] = []
        self.uncounted: list[str] = []
        # Indices in `collectives`; names would be ambiguous, as a computation that two
        # instructions call is walked twice.
        self.unpaired: set[int] = set()

    def ops(self, computation: Computation, place: _Place) -> tuple[Op, ...]:
        ops: list[Op] = []
        # Indices in ops of the collectives that each start started: an async-start may
        # run a computation with several.
        started: dict[str, list[int]] = {}
        for instruction in computation:
            name, opcode = instruction.name, instruction.opcode
            if places := self._block(instruction, ops, place):
                if _is_asynchronous(instruction):
                    started[name] = places
            elif opcode.endswith("-done"):
                for at in started.pop(_start_of(instruction, started), ()):
                    self._end(at, name, ops)
            elif instruction.kind in NESTING:
                ops.append(self._nested(instruction, place))
            elif opcode != "async-update":
                if opcode in ("send", "recv"):
                    self.uncounted.append(name)
                self._block_inside(instruction, ops, place)
                if (work := work_of(instruction)) != NOTHING:
                    ops.append(Op(name, work))
        return tuple(ops)

    def ops_of_the_rest(self, module: hlo.Module, place: _Place) -> tuple[Op, ...]:
        """Returns ops for the collectives that no walk from the entry has reached.

        An unknown opcode may run them: they count as sent and not covered.
        """
        ops: list[Op] = []
        seen = {collective.name for collective in self.collectives}
        first = len(self.collectives)
        for instruction in itertools.chain(*module.computations):
            if instruction.kind in KINDS and instruction.name not in seen:
                self._block(instruction, ops, place)
        self.unpaired.update(range(first, len(self.collectives)))
        return tuple(ops)

    def _block_inside(
        self, instruction: Instruction, ops: list[Op], place: _Place
    ) -> None:
        """Adds the collectives inside a fusion, or an unknown opcode, as blocking."""
        for inner in itertools.chain(*instruction.called):
            if not self._block(inner, ops, place):
                self._block_inside(inner, ops, place)

    def _nested(self, instruction: Instruction, place: _Place) -> Op:
        repeats = 1.0
        if instruction.opcode == "conditional":
            # Which branch runs is unknown: each counts as often as the others.
            repeats = 1 / len(instruction.called)
            place = place._replace(in_conditional=True)
        if instruction.opcode == "while":
            trips = instruction.find(r'known_trip_count":\{"n":"(\d+)"')
            if not trips:
                self.uncounted.append(instruction.name)
            repeats = int(trips or 1)
            place = place._replace(in_loop=True)
        place = place._replace(calls=place.calls * repeats)
        inside = tuple(self.ops(body, place) for body in instruction.called)
        if instruction.opcode == "while":  # Body and condition run in turn: one body.
            inside = (tuple(itertools.chain(*inside)),)
        work = sum((op.work for body in inside for op in body), NOTHING)
        return Op(instruction.name, work.times(repeats), bodies=inside, repeats=repeats)

    def _block(
        self, instruction: Instruction, ops: list[Op], place: _Place
    ) -> list[int]:
        """Adds each collective that an instruction is or starts as one blocking op.

        Returns:
          The indices of the ops; empty if the instruction is no collective.
        """
        first = len(ops)
        for collective in _collectives_of(instruction):
            at, number = len(ops), len(self.collectives)
            ops.append(Op(collective.name, NOTHING, starts=number, ends=number))
            groups = hlo.groups(collective, self._num_devices)
            self.collectives.append(
                Collective(
                    name=collective.name,
                    kind=collective.kind,
                    axes=_axes_along(groups, self._axes),
                    groups=groups,
                    num_bytes=_num_bytes(collective),
                    start=at,
                    end=at,
                    beside=NOTHING,
                    op_name=collective.find(r'op_name="([^"]*)"'),
                    **place._asdict(),
                )
            )
            if _is_asynchronous(instruction):
                self.unpaired.add(number)
        return list(range(first, len(ops)))

    def _end(self, at: int, name: str, ops: list[Op]) -> None:
        """Ends the collective that starts at an index here, with an op of its own."""
        number = ops[at].starts
        assert number is not None
        beside = sum((op.work for op in ops[at + 1 :]), NOTHING)
        ops[at] = dataclasses.replace(ops[at], ends=None)
        ops.append(Op(name, NOTHING, ends=number))
        self.collectives[number] = dataclasses.replace(
            self.collectives[number], end=len(ops) - 1, beside=beside
        )
        self.unpaired.remove(number)


def _collectives_of(instruction: Instruction) -> list[Instruction]:
    if instruction.kind in KINDS:
        return [instruction]
    # An async-start wraps a collective that has no start of its own.
    wrapped = instruction.called if instruction.kind == "async" else ()
    return [inner for inner in itertools.chain(*wrapped) if inner.opcode in KINDS]


def _is_asynchronous(instruction: Instruction) -> bool:
    # XLA keeps the form start and done for some collectives that it made synchronous.
    is_start = instruction.opcode.endswith("-start")
    return is_start and '"is_sync":true' not in instruction.attributes


def _start_of(
    value: Instruction, starts: Container[str], path: tuple[int, ...] = ()
) -> str:
    """Returns the start whose result reaches a value, or "" if none is found.

    Args:
      value: an end, or an instruction on the way to it.
      starts: names of the starts that have not ended.
      path: indices into nested tuples: part path[0] of the value, of that part path[1].
    """
    if value.name in starts:
        return value.name
    operands = value.operands
    if value.opcode == "tuple" and not path:
        found = {_start_of(each, starts) for each in operands} - {""}
        return found.pop() if len(found) == 1 else ""
    is_end = value.opcode.endswith("-done")
    if not operands or not (is_end or value.opcode in PASSING):
        return ""
    if value.opcode == "get-tuple-element":
        path = int(value.find(r"\bindex=(\d+)")), *path
    if value.opcode == "tuple":
        return _start_of(operands[path[0]], starts, path[1:])
    return _start_of(operands[0], starts, path)


def _num_bytes(collective: Instruction) -> float:
    """Returns the bytes of the larger of a collective's inputs and outputs."""
    operands = [operand.num_bytes for operand in collective.operands]
    # A start on a GPU also returns contexts, which are no data.
    made = sum(array.num_bytes for array in collective.arrays if array != CONTEXT)
    if collective.opcode.endswith("-start"):
        made -= sum(operands)  # The result of most starts includes their inputs.
    if collective.opcode.startswith("ragged-all-to-all"):
        operands = operands[:1]  # The others are offsets and sizes.
    return max(sum(operands), made)


def _axes_of(compiled: jax.stages.Compiled) -> dict[str, int] | None:
    """Returns the axes of the arguments' mesh, None if they are on none."""
    shardings: Any = jax.tree.leaves(compiled.input_shardings)
    named = [s for s in shardings if isinstance(s, jax.sharding.NamedSharding)]
    return dict(named[0].mesh.shape) if named else None


def _axes_along(
    groups: tuple[tuple[int, ...], ...], axes: dict[str, int]
) -> tuple[str, ...]:
    """Returns the axes along which the members of a group differ."""
    differs = np.zeros(len(axes), bool)
    for group in groups:
        places = np.stack(np.unravel_index(group, tuple(axes.values())))
        differs |= (places != places[:, :1]).any(axis=1)
    return tuple(name for name, is_along in zip(axes, differs, strict=True) if is_along)
