"""Parses the text of a compiled program.

XLA's own parser has no public Python API; the text is complete on every backend.
"""

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

# Opcodes that forward an operand, and move no data or data that counts elsewhere.
FORWARDING = {
    "add-dependency",
    "bitcast",
    "copy-done",
    "copy-start",
    "domain",
    "get-tuple-element",
    "opt-barrier",
    "tuple",
}
BITS = {
    **{"pred": 8, "token": 0, "opaque": 0, "c64": 64, "c128": 128},
    **{f"{sign}{bits}": bits for sign in "su" for bits in (1, 2, 4, 8, 16, 32, 64)},
    **{"bf16": 16, "f16": 16, "f32": 32, "f64": 64, "f4e2m1fn": 4},
}


class ArrayType(NamedTuple):
    """Element type and dims of an array."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def num_bytes(self) -> float:
        # Floats of 8 bits have many names: f8e4m3fn, f8e5m2, ...
        return math.prod(self.dims) * BITS.get(self.dtype, 8) / 8


@dataclasses.dataclass(frozen=True, eq=False)
class Instruction:
    """One line of a computation.

    Args:
      name: name, unique in the program.
      opcode: opcode, such as "fusion" or "collective-permute-start".
      arrays: arrays of the result; those of nested tuples in order.
      operands: instructions of the same computation.
      called: computations that it runs.
      attributes: rest of the line.
    """

    name: str
    opcode: str
    arrays: tuple[ArrayType, ...]
    operands: tuple["Instruction", ...]
    called: tuple["Computation", ...]
    attributes: str

    @property
    def kind(self) -> str:
        """The opcode, whether the instruction is a start or all of the operation."""
        return self.opcode.removesuffix("-start")

    @property
    def num_bytes(self) -> float:
        return sum(array.num_bytes for array in self.arrays)

    def find(self, pattern: str) -> str:
        """Returns the group of a regular expression in the attributes, "" if none."""
        found = re.search(pattern, self.attributes)
        return found[1] if found else ""


Computation = list[Instruction]
"""Instructions in the order of the schedule; the last is the root."""


class Module(NamedTuple):
    """A program.

    Args:
      entry: computation that the program starts with.
      computations: all computations.
      num_devices: number of devices that run it.
    """

    entry: Computation
    computations: list[Computation]
    num_devices: int


def parse(text: str) -> Module:
    """Parses a program from the text that `compiled.as_text()` returns.

    Raises:
      ValueError: if the text has no program, the program is not scheduled, or a line of
        a computation is no instruction.
    """
    head, _, _ = text.partition("\n")
    # Only in a scheduled program is the order of the lines the order of execution.
    if not head.startswith("HloModule") or "is_scheduled=true" not in head:
        raise ValueError(
            "wanted the text of a compiled program, as jit(f).lower(...).compile()"
            f".as_text() returns it, got {head[:60]!r}"
        )
    # What is called, and what is an operand, is printed before its users.
    computations: dict[str, Computation] = {}
    known: dict[str, Instruction] = {}
    entry = current = None
    for line in text.splitlines():
        if header := re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{$", line):
            current, known = [], {}
            computations[header[2]] = current
            entry = current if header[1] else entry
        elif line.startswith("}"):
            current = None
        elif current is not None:
            instruction = _instruction(line, known, computations)
            known[instruction.name] = instruction
            current.append(instruction)
    # A mesh is partitions, `pmap` is replicas; what is 1 is not written.
    counts = re.findall(r"(?:num_partitions|replica_count)=(\d+)", head)
    devices = math.prod(map(int, counts))
    return Module(entry or [], list(computations.values()), devices)


def groups(collective: Instruction, num_devices: int) -> tuple[tuple[int, ...], ...]:
    """Returns pairs, or groups: `{{0,1},{2,3}}`, `[2,2]<=[4]`, `mesh['a'=2] {'a'}`.

    `[2,2]<=[2,2]T(1,0)` stands for the devices 0 to 3 as a 2 x 2 array, transposed and
    reshaped to 2 groups of 2: (0, 2) and (1, 3). So does `mesh['a'=2,'b'=2] {'a'}`.
    """
    text = collective.find("(?:source_target_pairs|replica_groups)=(.*)")
    if listed := re.match(r"\{([\d{},]*)\}", text or "{}"):
        found = tuple(map(_numbers, re.findall(r"\{([\d,]+)\}", listed[1])))
        # No group means all devices; a permute without pairs sends nothing.
        is_permute = collective.kind == "collective-permute"
        return found if found or is_permute else (tuple(range(num_devices)),)
    if iota := re.match(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text):
        shape, source = _numbers(iota[1]), _numbers(iota[2])
        order = _numbers(iota[3] or "") or tuple(range(len(source)))
    elif mesh := re.match(
        r"mesh\[((?:'[^']+'=\d+,?)+)\] ?\{((?:'[^']+',? ?)*)\}", text
    ):
        names, sizes = zip(*re.findall(r"'([^']+)'=(\d+)", mesh[1]), strict=True)
        source = tuple(map(int, sizes))
        inside = [names.index(name) for name in re.findall(r"'([^']+)'", mesh[2])]
        # The named axes come last, so that each row is a group.
        order = (*(i for i in range(len(source)) if i not in inside), *inside)
        shape = -1, math.prod(source[i] for i in inside)
    else:
        raise ValueError(f"groups of a form that is not known: {text[:80]}")
    devices = np.arange(num_devices).reshape(source).transpose(order).reshape(shape)
    return tuple(map(tuple, devices.tolist()))


def _instruction(
    line: str, known: Mapping[str, Instruction], computations: Mapping[str, Computation]
) -> Instruction:
    line = re.sub(r"/\*.*?\*/", "", line)
    # Operands may contain parentheses, of tuple types and tiles: they end at the first
    # one that the end of the line follows, or an attribute.
    match = re.match(
        r"\s+(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*?)\)(, [\w\-]+=.*)?$",
        line,
    )
    if match is None:
        raise ValueError(
            "wanted an instruction in each line of a computation, as in `%name = "
            f"f32[8]{{0}} opcode(%operand)`, got {line.strip()[:80]!r}"
        )
    name, arrays, opcode, operands, attributes = match.groups(default="")
    # Metadata and strings contain arbitrary text, which may look like a call.
    names = re.sub(r'metadata=\{[^}]*\}|"(?:[^"\\]|\\.)*"', "", attributes)
    listed = re.findall(
        r"(?:calls|to_apply|body|condition|(?:true|false)_computation|"
        r"(?:branch|called)_computations)=(\{[^}]*\}|%?[\w.\-]+)",
        names,
    )
    return Instruction(
        name,
        opcode,
        tuple(
            ArrayType(dtype, _numbers(dims))
            for dtype, dims in re.findall(r"([a-z]\w*)\[([\d,<=?]*)\]", arrays)
        ),
        # The text of a constant is a value, not names.
        tuple(
            known[name]
            for name in re.findall(r"%([\w.\-]+)", operands)
            if opcode != "constant"
        ),
        tuple(
            computations[name]
            for name in re.findall(r"[\w.\-]+", " ".join(listed))
            if name in computations
        ),
        attributes,
    )


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", text)))
