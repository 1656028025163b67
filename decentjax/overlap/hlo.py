"""Parses the text of a compiled program.

XLA's own parser has no public Python API; the text is complete on every backend.
"""

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

BITS = {
    **{"pred": 8, "token": 0, "opaque": 0, "c64": 64, "c128": 128},
    **{f"{sign}{bits}": bits for sign in "su" for bits in (1, 2, 4, 8, 16, 32, 64)},
    **{"bf16": 16, "f16": 16, "f32": 32, "f64": 64, "f4e2m1fn": 4},
}


class Array(NamedTuple):
    """Element type and dims of an array."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def num_bytes(self) -> float:
        # Floats of 8 bits have many names: f8e4m3fn, f8e5m2, ...
        return math.prod(self.dims) * BITS.get(self.dtype, 8) / 8


CONTEXT = Array("u32", ())  # Context that the result of a start may include.


class Instruction(NamedTuple):
    """One line of a computation.

    Args:
      name: name, unique in the program.
      opcode: opcode, such as "fusion" or "collective-permute-start".
      arrays: arrays of the result; those of nested tuples in order.
      operands: names of instructions of the same computation.
      called: names of the computations that it runs.
      attributes: rest of the line.
    """

    name: str
    opcode: str
    arrays: tuple[Array, ...]
    operands: tuple[str, ...]
    called: tuple[str, ...]
    attributes: str

    @property
    def num_bytes(self) -> float:
        return sum(array.num_bytes for array in self.arrays)


class Computation(NamedTuple):
    """Instructions by name, in the order of the schedule; the last is the root."""

    instructions: dict[str, Instruction]
    root: str

    def operands(self, instruction: Instruction) -> list[Instruction]:
        return [self.instructions[name] for name in instruction.operands]


class Module(NamedTuple):
    """A program.

    Args:
      entry: computation that the program starts with.
      computations: all computations by name.
      num_devices: number of devices that run it.
    """

    entry: Computation
    computations: dict[str, Computation]
    num_devices: int

    def called(self, instruction: Instruction) -> list[Computation]:
        return [self.computations[name] for name in instruction.called]


def parse(text: str) -> Module:
    """Parses a program from the text that `compiled.as_text()` returns.

    Raises:
      ValueError: if the text has no program, the program is not scheduled, or a line of
        a computation is no instruction.
    """
    head, _, _ = text.partition("\n")
    if not head.startswith("HloModule") or "is_scheduled=true" not in head:
        raise ValueError(
            "wanted the text of a compiled program, as jit(f).lower(...).compile()"
            f".as_text() returns it, got {head[:60]!r}"
        )
    computations: dict[str, Computation] = {}
    entry, name, instructions = "", "", {}
    for line in text.splitlines():
        if header := re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{$", line):
            name, instructions = header[2], {}
            entry = name if header[1] else entry
        elif name and line.startswith("}"):
            computations[name] = Computation(instructions, next(reversed(instructions)))
            name = ""
        elif name:
            instruction = _instruction(line)
            instructions[instruction.name] = instruction
    counts = re.findall(r"(?:num_partitions|replica_count)=(\d+)", head)
    return Module(computations[entry], computations, math.prod(map(int, counts)))


def trip_count(loop: Instruction) -> int | None:
    """Returns how often the body of a `while` runs, None if that is unknown."""
    found = re.search(r'known_trip_count":\{"n":"(\d+)"', loop.attributes)
    return int(found[1]) if found else None


def tuple_index(instruction: Instruction) -> int:
    """Returns the index of the part of a tuple that a `get-tuple-element` takes."""
    found = re.search(r"\bindex=(\d+)", instruction.attributes)
    assert found is not None, f"{instruction.name} has no index"
    return int(found[1])


def groups(attributes: str, num_devices: int) -> tuple[tuple[int, ...], ...]:
    """Parses pairs, and groups: `{{0,1},{2,3}}`, `[2,2]<=[4]`, `mesh['a'=2] {'a'}`.

    `[2,2]<=[2,2]T(1,0)` stands for the devices 0 to 3 as a 2 x 2 array, transposed and
    reshaped to 2 groups of 2: (0, 2) and (1, 3).
    """
    pairs = re.search(r"source_target_pairs=\{([\d{},]*)\}", attributes)
    if pairs:
        return _braced(pairs[1])
    all_devices = (tuple(range(num_devices)),)
    given = re.search(r"replica_groups=(.*)", attributes)
    if given is None:
        return all_devices
    text = given[1]
    if listed := re.match(r"\{([\d{},]*)\}", text):
        return _braced(listed[1]) or all_devices
    if iota := re.match(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text):
        source = _numbers(iota[2])
        order = _numbers(iota[3]) if iota[3] else tuple(range(len(source)))
        devices = np.arange(num_devices).reshape(source).transpose(order)
        return _as_groups(devices.reshape(_numbers(iota[1])))
    mesh = re.match(r"mesh\[((?:'[^']+'=\d+,?)+)\] ?\{((?:'[^']+',? ?)*)\}", text)
    if mesh is None:
        raise ValueError(f"groups of a form that is not known: {text[:80]}")
    sizes = {k: int(v) for k, v in re.findall(r"'([^']+)'=(\d+)", mesh[1])}
    inside = [list(sizes).index(axis) for axis in re.findall(r"'([^']+)'", mesh[2])]
    devices = np.arange(num_devices).reshape(tuple(sizes.values()))
    last = np.moveaxis(devices, inside, range(-len(inside), 0))
    size = math.prod(list(sizes.values())[place] for place in inside)
    return _as_groups(last.reshape(-1, size))


def _instruction(line: str) -> Instruction:
    line = re.sub(r"/\*.*?\*/", "", line)
    match = re.match(r"\s+(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)", line)
    if match is None:
        raise ValueError(
            "wanted an instruction in each line of a computation, as in `%name = "
            f"f32[8]{{0}} opcode(%operand)`, got {line.strip()[:80]!r}"
        )
    name, arrays, opcode, rest = match.groups()
    end = _closing(rest)
    operands, attributes = rest[:end], rest[end + 1 :]
    # Metadata and strings contain arbitrary text, which may look like a call.
    names = re.sub(r'metadata=\{[^}]*\}|"(?:[^"\\]|\\.)*"', "", attributes)
    called = re.findall(
        r"(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)",
        names,
    )
    lists = re.findall(r"(?:branch|called)_computations=\{([^}]*)\}", names)
    called += [name for listed in lists for name in re.findall(r"[\w.\-]+", listed)]
    return Instruction(
        name,
        opcode,
        tuple(_arrays(arrays)),
        () if opcode == "constant" else tuple(re.findall(r"%([\w.\-]+)", operands)),
        tuple(called),
        attributes,
    )


def _closing(text: str) -> int:
    """Returns the index of the parenthesis that closes one before the text."""
    depth = 0
    for place, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth < 0:
            return place
    return len(text)


def _arrays(text: str) -> Iterator[Array]:
    for dtype, dims in re.findall(r"([a-z]\w*)\[([\d,<=?]*)\]", text):
        sizes = re.findall(r"\d+", dims)
        yield Array(dtype, tuple(map(int, sizes)))


def _braced(text: str) -> tuple[tuple[int, ...], ...]:
    return tuple(_numbers(group) for group in re.findall(r"\{([\d,]+)\}", text))


def _as_groups(array: np.ndarray) -> tuple[tuple[int, ...], ...]:
    return tuple(map(tuple, array.tolist()))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(","))
