"""The schedule of a compiled step: its collectives, and what runs beside each."""

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from decentjax import hlo
from decentjax.hlo import Computation, Instruction, Module
from decentjax.work import NOTHING, Work, work_of

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
        asynchronous.
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
    """

    ops: tuple[Op, ...]
    collectives: tuple[Collective, ...]
    num_devices: int
    uncounted: tuple[str, ...]

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
    ops = reader.ops(module.entry, _Place(1, False, False))
    return Schedule(
        ops,
        tuple(reader.collectives),
        module.num_devices,
        tuple(reader.uncounted),
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
    """Walks the computations of a program and collects its collectives."""

    def __init__(self, module: Module, axes: dict[str, int]):
        self._module = module
        self._axes = axes
        self.collectives: list[Collective] = []
        self.uncounted: list[str] = []

    def ops(self, computation: Computation, place: _Place) -> tuple[Op, ...]:
        ops: list[Op] = []
        started: dict[str, int] = {}  # The place of each start, by its name.
        for instruction in computation.instructions.values():
            name, opcode = instruction.name, instruction.opcode
            if opcode in KINDS:
                self._block(computation, instruction, ops, place)
            elif self._is_start(instruction):
                started[name] = len(ops)
                ops.append(Op(name, NOTHING))
            elif opcode.endswith("-update"):
                if instruction.operands[0] in started:
                    started[name] = started.pop(instruction.operands[0])
            elif opcode.endswith("-done"):
                at = started.pop(instruction.operands[0], None)
                if at is not None:
                    start = computation.instructions[ops[at].name]
                    if '"is_sync":true' not in start.attributes:
                        ops.append(Op(name, NOTHING))
                    self._wait(computation, start, instruction, ops, at, place)
            elif opcode in NESTING:
                ops.append(self._nested(instruction, place))
            else:
                if opcode in ("send", "recv"):
                    self.uncounted.append(name)
                for body in self._module.called(instruction):
                    self._block_inside(body, ops, place)
                work = work_of(self._module, computation, instruction)
                if work != NOTHING:
                    ops.append(Op(name, work))
        return tuple(ops)

    def _block(
        self,
        computation: Computation,
        instruction: Instruction,
        ops: list[Op],
        place: _Place,
    ) -> None:
        """Adds a collective that starts and ends in one place."""
        ops.append(Op(instruction.name, NOTHING))
        self._wait(computation, instruction, instruction, ops, len(ops) - 1, place)

    def _block_inside(self, body: Computation, ops: list[Op], place: _Place) -> None:
        """Adds the collectives of a fusion, as those that block."""
        for instruction in body.instructions.values():
            if instruction.opcode in KINDS:
                self._block(body, instruction, ops, place)
            elif instruction.opcode == "fusion":
                for inner in self._module.called(instruction):
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

    def _is_start(self, instruction: Instruction) -> bool:
        kind, _, suffix = instruction.opcode.rpartition("-")
        if instruction.opcode == "async-start":
            return self._wrapped(instruction) is not None
        return suffix == "start" and kind in KINDS

    def _wrapped(self, instruction: Instruction) -> Instruction | None:
        """The collective that an `async-start` starts."""
        for computation in self._module.called(instruction):
            for inner in computation.instructions.values():
                if inner.opcode in KINDS:
                    return inner
        return None

    def _wait(
        self,
        computation: Computation,
        start: Instruction,
        done: Instruction,
        ops: list[Op],
        at: int,
        place: _Place,
    ) -> None:
        """Adds a collective, which the last op waits for, or that of its start."""
        number = len(self.collectives)
        end = len(ops) - 1 if ops[-1].name == done.name else at
        ops[at] = dataclasses.replace(ops[at], starts=number)
        ops[end] = dataclasses.replace(ops[end], ends=number)
        collective = self._wrapped(start) if start.opcode == "async-start" else start
        assert collective is not None
        kind = collective.opcode.removesuffix("-start")
        groups = hlo.groups(collective.attributes, self._module.num_devices)
        op_name = re.search(r'op_name="([^"]*)"', collective.attributes)
        operands = computation.operands(start)
        if kind == "ragged-all-to-all":  # The others say where the pieces go.
            operands = operands[:1]
        read = sum(operand.num_bytes for operand in operands)
        self.collectives.append(
            Collective(
                name=start.name,
                kind=kind,
                axes=_axes_along(groups, self._axes),
                groups=groups,
                num_bytes=max(read, done.num_bytes),
                calls=place.calls,
                start=at,
                end=end,
                beside=_sum(op.work for op in ops[at + 1 : end]),
                in_conditional=place.in_conditional,
                in_loop=place.in_loop,
                op_name=op_name[1] if op_name else "",
            )
        )


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
