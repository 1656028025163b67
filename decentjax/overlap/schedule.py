"""The schedule of a compiled step: its collectives, and what runs beside each."""

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Container, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from decentjax.overlap import hlo
from decentjax.overlap.hlo import Computation, Instruction, Module
from decentjax.overlap.work import NOTHING, Work, work_of

KINDS = (
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-broadcast",
    "collective-permute",
    "ragged-all-to-all",
    "reduce-scatter",
)

NESTING = ("async-start", "call", "call-start", "conditional", "while")

# They pass a value on: what a start made may reach its end through them.
PASSING = {
    "add-dependency",
    "async-update",
    "bitcast",
    "copy",
    "copy-done",
    "copy-start",
    "domain",
    "get-tuple-element",
    "opt-barrier",
    "reshape",
    "tuple",
}


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of a step, and what runs beside it.

    Args:
      name: in the program.
      kind: as in HLO, "collective-permute".
      axes: of the mesh, along which it sends.
      groups: (sender, receiver) of a permute; members of each group of the others.
      num_bytes: of the whole array on one device, before a scatter, after a gather.
      calls: in a step; trips of its loop, 1/B in one of B branches of a conditional.
      start: its place in the schedule of its computation.
      end: the place at which it is waited for; that of its start, if it is not
        asynchronous or its end was not found.
      beside: what runs between, per call.
      in_conditional: whether it stands in a branch.
      in_loop: whether it stands in a loop.
      op_name: the names that jax gave it, outermost first.
    """

    name: str
    kind: str
    axes: tuple[str, ...]
    groups: tuple[tuple[int, ...], ...]
    num_bytes: float
    calls: float
    start: int
    end: int
    beside: Work
    in_conditional: bool
    in_loop: bool
    op_name: str

    @property
    def is_covered(self) -> bool:
        """Whether a matmul or a convolution runs beside it."""
        return any(self.beside.flops.values())


@dataclasses.dataclass(frozen=True)
class Op:
    """One place of a schedule: work, or the start or the end of a collective.

    Args:
      name: in the program.
      work: of all repeats of its bodies.
      starts: the collective that it starts, as a place in `Schedule.collectives`.
      ends: the collective that it waits for.
      bodies: of a loop or a call one, of a conditional each branch.
      repeats: of each body; 1/B of B branches.
    """

    name: str
    work: Work
    starts: int | None = None
    ends: int | None = None
    bodies: tuple[tuple["Op", ...], ...] = ()
    repeats: float = 1


@dataclasses.dataclass(frozen=True)
class Schedule:
    """A compiled step.

    Args:
      ops: in the order in which they are dispatched.
      collectives: of all computations.
      num_devices: that run it.
      uncounted: names of loops whose trips the compiler does not know, so that they
        count once, and of sends and receives, which are not read.
      unpaired: names of collectives whose end was not found, or which stand in a
        computation that no instruction is known to run. They count as sent, and as not
        covered.
    """

    ops: tuple[Op, ...]
    collectives: tuple[Collective, ...]
    num_devices: int
    uncounted: tuple[str, ...]
    unpaired: tuple[str, ...]

    @property
    def work(self) -> Work:
        return _sum(op.work for op in self.ops)

    def sent_bytes(self, axis: str | None = None) -> float:
        """Bytes that a device sends in a step, in the mean, along an axis or all."""
        return sum(self._sent(c) for c in self._along(axis))

    def covered(self, axis: str | None = None) -> float:
        """The share of the sent bytes beside which a matmul or a convolution runs.

        1 where nothing is sent.
        """
        total = self.sent_bytes(axis)
        beside = sum(self._sent(c) for c in self._along(axis) if c.is_covered)
        return beside / total if total else 1.0

    def _along(self, axis: str | None) -> list[Collective]:
        return [c for c in self.collectives if axis is None or axis in c.axes]

    def _sent(self, collective: Collective) -> float:
        sent = sum(link.num_bytes for link in links(collective))
        return collective.calls * sent / self.num_devices


class Link(NamedTuple):
    """What one device sends to another in a collective."""

    sender: int
    receiver: int
    num_bytes: float


def read(
    compiled: jax.stages.Compiled | str, axes: Mapping[str, int] | None = None
) -> Schedule:
    """Reads the schedule of a compiled step.

    Args:
      compiled: a step as `jit(step).lower(...).compile()` returns it, or its text.
      axes: names and sizes of the mesh's axes, in order; taken from the compiled step's
        arguments where they are on a mesh, else all devices are one axis "devices".

    Returns:
      Its collectives, and what runs beside them.

    Raises:
      ValueError: if the text is no compiled program, the axes have not as many devices
        as it, or it has groups of a form that is not known.
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
    reader = _Reader(module, axes)
    place = _Place(1, False, False)
    ops = reader.ops(module.entry, place) + reader.ops_of_the_rest(place)
    return Schedule(
        ops,
        tuple(reader.collectives),
        module.num_devices,
        tuple(reader.uncounted),
        tuple(reader.unpaired),
    )


def links(collective: Collective) -> list[Link]:
    """Who sends how much to whom in one call.

    A permute sends an array for each pair, an all-to-all `1/S` of one to each other
    member of a group of S. All others go around a ring: `2 (1 - 1/S)` arrays from each
    for an all-reduce, else `1 - 1/S`.
    """
    kind, num_bytes = collective.kind, collective.num_bytes
    if kind == "collective-permute":
        found = [
            Link(sender, receiver, num_bytes) for sender, receiver in collective.groups
        ]
    elif kind in ("all-to-all", "ragged-all-to-all"):
        found = [
            Link(sender, receiver, num_bytes / len(group))
            for group in collective.groups
            for sender, receiver in itertools.permutations(group, 2)
        ]
    else:
        passes = 2 if kind == "all-reduce" else 1
        found = [
            Link(sender, receiver, passes * (1 - 1 / len(group)) * num_bytes)
            for group in collective.groups
            for sender, receiver in zip(group, [*group[1:], group[0]], strict=True)
        ]
    return [link for link in found if link.sender != link.receiver]


class _Place(NamedTuple):
    """Where a computation stands, and how often a step runs it."""

    calls: float
    in_conditional: bool
    in_loop: bool


class _Reader:
    """Walks the computations of a program and collects its collectives.

    A collective blocks until its end is found, so that none is lost: not one that ends
    in another computation, nor one that has no end.
    """

    def __init__(self, module: Module, axes: dict[str, int]):
        self._module = module
        self._axes = axes
        self.collectives: list[Collective] = []
        self.uncounted: list[str] = []
        self.unpaired: list[str] = []

    def ops(self, computation: Computation, place: _Place) -> tuple[Op, ...]:
        ops: list[Op] = []
        started: dict[str, list[int]] = {}  # Places of what each start started.
        for instruction in computation.instructions.values():
            name, opcode = instruction.name, instruction.opcode
            if found := self._collectives_of(computation, instruction):
                places = [self._block(*each, ops, place) for each in found]
                if _is_asynchronous(instruction):
                    started[name] = places
            elif opcode.endswith("-done"):
                start = _start_of(computation, instruction, started)
                for at in started.pop(start, ()):
                    self._end(at, name, ops)
            elif opcode in NESTING:
                ops.append(self._nested(instruction, place))
            elif opcode != "async-update":
                if opcode in ("send", "recv"):
                    self.uncounted.append(name)
                self._block_inside(instruction, ops, place)
                work = work_of(self._module, computation, instruction)
                if work != NOTHING:
                    ops.append(Op(name, work))
        self.unpaired += [ops[at].name for places in started.values() for at in places]
        return tuple(ops)

    def ops_of_the_rest(self, place: _Place) -> tuple[Op, ...]:
        """Those of collectives to which no walk from the entry has led."""
        ops: list[Op] = []
        seen = {collective.name for collective in self.collectives}
        for computation in self._module.computations.values():
            for instruction in computation.instructions.values():
                for each in self._collectives_of(computation, instruction):
                    if each[1].name not in seen:
                        seen.add(each[1].name)
                        self.unpaired.append(each[1].name)
                        self._block(*each, ops, place)
        return tuple(ops)

    def _block_inside(
        self, instruction: Instruction, ops: list[Op], place: _Place
    ) -> None:
        """Adds the collectives of a fusion, or the like, as those that block."""
        for body in self._module.called(instruction):
            for inner in body.instructions.values():
                found = self._collectives_of(body, inner)
                places = [self._block(*each, ops, place) for each in found]
                if _is_asynchronous(inner):
                    self.unpaired += [ops[at].name for at in places]
                if not found:
                    self._block_inside(inner, ops, place)

    def _nested(self, instruction: Instruction, place: _Place) -> Op:
        bodies = self._module.called(instruction)
        repeats = 1.0
        if instruction.opcode == "conditional":
            repeats = 1 / len(bodies)
            place = place._replace(in_conditional=True)
        if instruction.opcode == "while":
            trips = hlo.trip_count(instruction)
            if trips is None:
                self.uncounted.append(instruction.name)
            repeats = 1 if trips is None else trips
            place = place._replace(in_loop=True)
        place = place._replace(calls=place.calls * repeats)
        inside = tuple(self.ops(body, place) for body in bodies)
        if instruction.opcode == "while":  # Its body and its condition take turns.
            inside = (tuple(itertools.chain(*inside)),)
        work = _sum(op.work for body in inside for op in body).times(repeats)
        return Op(instruction.name, work, bodies=inside, repeats=repeats)

    def _collectives_of(
        self, computation: Computation, instruction: Instruction
    ) -> list[tuple[Computation, Instruction]]:
        """Those that an instruction is or starts, each where it stands."""
        if instruction.opcode.removesuffix("-start") in KINDS:
            return [(computation, instruction)]
        if instruction.opcode != "async-start":
            return []
        return [
            (body, inner)
            for body in self._module.called(instruction)
            for inner in body.instructions.values()
            if inner.opcode in KINDS
        ]

    def _block(
        self,
        computation: Computation,
        collective: Instruction,
        ops: list[Op],
        place: _Place,
    ) -> int:
        """Adds a collective that starts and ends in one place, and returns that."""
        at, number = len(ops), len(self.collectives)
        ops.append(Op(collective.name, NOTHING, starts=number, ends=number))
        groups = hlo.groups(collective.attributes, self._module.num_devices)
        op_name = re.search(r'op_name="([^"]*)"', collective.attributes)
        self.collectives.append(
            Collective(
                name=collective.name,
                kind=collective.opcode.removesuffix("-start"),
                axes=_axes_along(groups, self._axes),
                groups=groups,
                num_bytes=_num_bytes(computation, collective),
                calls=place.calls,
                start=at,
                end=at,
                beside=NOTHING,
                in_conditional=place.in_conditional,
                in_loop=place.in_loop,
                op_name=op_name[1] if op_name else "",
            )
        )
        return at

    def _end(self, at: int, name: str, ops: list[Op]) -> None:
        """Has the collective that starts at a place end here."""
        number = ops[at].starts
        assert number is not None
        beside = _sum(op.work for op in ops[at + 1 :])
        ops[at] = dataclasses.replace(ops[at], ends=None)
        ops.append(Op(name, NOTHING, ends=number))
        self.collectives[number] = dataclasses.replace(
            self.collectives[number], end=len(ops) - 1, beside=beside
        )


def _is_asynchronous(instruction: Instruction) -> bool:
    is_start = instruction.opcode.endswith("-start")
    return is_start and '"is_sync":true' not in instruction.attributes


def _start_of(
    computation: Computation,
    value: Instruction,
    starts: Container[str],
    path: tuple[int, ...] = (),
) -> str:
    """The start whose result an instruction ends or passes on; "" where none is found.

    Args:
      computation: of both.
      value: an end, or what stands between.
      starts: names of those that have not ended.
      path: which part of a tuple is meant, and of that which part.
    """
    if value.name in starts:
        return value.name
    operands = computation.operands(value)
    if value.opcode == "tuple" and not path:
        found = {_start_of(computation, each, starts) for each in operands} - {""}
        return found.pop() if len(found) == 1 else ""
    is_end = value.opcode.endswith("-done")
    if not operands or not (is_end or value.opcode in PASSING):
        return ""
    if value.opcode == "get-tuple-element":
        path = hlo.tuple_index(value), *path
    if value.opcode == "tuple":
        return _start_of(computation, operands[path[0]], starts, path[1:])
    return _start_of(computation, operands[0], starts, path)


def _num_bytes(computation: Computation, collective: Instruction) -> float:
    """Of the larger of what a collective reads and what it makes."""
    operands = [operand.num_bytes for operand in computation.operands(collective)]
    made = sum(array.num_bytes for array in collective.arrays if array != hlo.CONTEXT)
    if collective.opcode.endswith("-start"):
        made -= sum(operands)  # Most starts pass on what they read.
    if collective.opcode.startswith("ragged-all-to-all"):
        operands = operands[:1]  # The others say where the pieces go.
    return max(sum(operands), made)


def _sum(works: Iterator[Work]) -> Work:
    return functools.reduce(lambda total, work: total + work, works, NOTHING)


def _axes_of(compiled: jax.stages.Compiled) -> dict[str, int] | None:
    """The mesh of the arguments."""
    shardings: Any = jax.tree.leaves(compiled.input_shardings)
    for sharding in shardings:
        if isinstance(sharding, jax.sharding.NamedSharding):
            return dict(sharding.mesh.shape)
    return None


def _axes_along(
    groups: tuple[tuple[int, ...], ...], axes: dict[str, int]
) -> tuple[str, ...]:
    """The axes along which the members of a group differ."""
    differs = np.zeros(len(axes), bool)
    for group in groups:
        places = np.stack(np.unravel_index(group, tuple(axes.values())))
        differs |= (places != places[:, :1]).any(axis=1)
    return tuple(name for name, is_along in zip(axes, differs, strict=True) if is_along)
