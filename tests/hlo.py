"""Reads collectives, and what they send, from the text of a compiled program.

An oracle for `decentjax.overlap.hlo`: it splits the text at brackets, and shares no
regular expression with it.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

KINDS = (
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-permute",
    "reduce-scatter",
)
BITS = {
    "pred": 8,
    "s8": 8,
    "u8": 8,
    "u16": 16,
    "s32": 32,
    "u32": 32,
    "bf16": 16,
    "f16": 16,
    "f32": 32,
    "f64": 64,
}


class Instruction(NamedTuple):
    """One line of a computation."""

    name: str
    opcode: str
    shape: str
    operands: tuple[str, ...]
    called: tuple[str, ...]  # names in the rest of the line: computations that it runs
    line: str


class Collective(NamedTuple):
    """A collective, with the bytes of the array it makes on one device."""

    kind: str
    num_bytes: float
    groups: tuple[tuple[int, ...], ...]  # of a permute, (sender, receiver)


class Traffic(NamedTuple):
    """As `decentjax.analysis.Traffic`."""

    messages: np.ndarray
    worker_bytes: np.ndarray
    node_bytes: np.ndarray


def computations(text: str) -> dict[str, list[Instruction]]:
    """Returns the instructions of each computation; that of the program is "ENTRY"."""
    found: dict[str, list[Instruction]] = {}
    current = None
    for line in text.splitlines():
        if line.startswith(" ") and " = " in line and current:
            found[current].append(_instruction(line))
        elif line.endswith("{") and " -> " in line:
            first = line.split()[0]
            current = first if first == "ENTRY" else first.lstrip("%")
            found[current] = []
    return found


def collective_names(text: str) -> list[str]:
    """Of all instructions that are or start a collective, by their opcodes alone."""
    kinds = (*KINDS, "collective-broadcast", "ragged-all-to-all")
    opcodes = [f" {kind}{suffix}(" for kind in kinds for suffix in ("", "-start")]
    return [
        line.split(" = ")[0].split()[-1].lstrip("%")
        for line in text.splitlines()
        if " = " in line and any(opcode in line for opcode in opcodes)
    ]


def collectives(text: str, num_devices: int) -> list[Collective]:
    return [
        _collective(instruction, num_devices)
        for instructions in computations(text).values()
        for instruction in instructions
        if _is_collective(instruction)
    ]


def in_conditionals(text: str) -> list[str]:
    """Returns the names of the collectives inside a branch of a conditional."""
    bodies = computations(text)
    branches = [
        branch
        for instructions in bodies.values()
        for instruction in instructions
        if instruction.opcode == "conditional"
        for branch in instruction.called
    ]
    return [
        instruction.name
        for name in _reachable(bodies, branches)
        for instruction in bodies[name]
        if _is_collective(instruction)
    ]


def inputs_of_collectives(text: str) -> set[str]:
    """Returns the names of the program's arguments that its collectives wait for."""
    entry = {i.name: i for i in computations(text)["ENTRY"]}
    queue = [i for i in entry.values() if _is_collective(i)]
    assert queue, "the program has no collective"
    seen: set[str] = set()
    while queue:
        for name in queue.pop().operands:
            if name not in seen:
                seen.add(name)
                queue.append(entry[name])
    parameters = [entry[name] for name in seen if entry[name].opcode == "parameter"]
    return {p.line.split('op_name="')[1].split('"')[0] for p in parameters}


def traffic(text: str, num_devices: int, workers_per_node: int) -> Traffic:
    """What the collectives send, groups as reduce-scatter and all-gather on a ring."""
    messages = np.zeros(num_devices, int)
    worker_bytes = np.zeros(num_devices)
    node_bytes = np.zeros(num_devices // workers_per_node)
    for collective in collectives(text, num_devices):
        for sender, receiver, num_bytes, count in _links(collective):
            messages[sender] += count
            worker_bytes[sender] += num_bytes
            if sender // workers_per_node != receiver // workers_per_node:
                node_bytes[sender // workers_per_node] += num_bytes
    return Traffic(messages, worker_bytes, node_bytes)


def sent_dtypes(stablehlo: str) -> list[tuple[str, str]]:
    """Returns the kind and the element type of each collective before compilation.

    XLA turns the narrow floats of collectives into float32 on a CPU.
    """
    pattern = r'"stablehlo\.(\w+)"(?:(?!"stablehlo)[\s\S])*?: \(tensor<(?:\d+x)*(\w+)>'
    kinds = {kind.replace("-", "_") for kind in KINDS}
    return [(k, dtype) for k, dtype in re.findall(pattern, stablehlo) if k in kinds]


def _instruction(line: str) -> Instruction:
    """Reads `ROOT %name = shape opcode(operands), attribute=value, ...`."""
    while "/*" in line:  # /*index=5*/
        before, _, rest = line.partition("/*")
        line = before + rest.partition("*/")[2]
    name, _, rest = line.strip().removeprefix("ROOT ").partition(" = ")
    # A tuple has spaces inside its brackets, an array has none.
    end = _end_of_value(rest, " ")
    shape, rest = rest[:end], rest[end + 1 :]
    opcode, _, rest = rest.partition("(")
    end = _end_of_value(rest, ")")
    attributes = "".join(rest[end + 1 :].split('"')[::2])  # Without what is quoted.
    return Instruction(
        name.lstrip("%"), opcode, shape, _names(rest[:end]), _names(attributes), line
    )


def _end_of_value(text: str, end: str) -> int:
    """The place of the first such character outside all brackets."""
    depth = 0
    for place, character in enumerate(text):
        if character == end and depth == 0:
            return place
        depth += (character in "([{") - (character in ")]}")
    return len(text)


def _names(text: str) -> tuple[str, ...]:
    """The words that begin with a percent sign, without it."""
    for bracket in "(){},=":
        text = text.replace(bracket, " ")
    return tuple(word[1:] for word in text.split() if word.startswith("%"))


def _attribute(line: str, name: str) -> str:
    """The value of an attribute, to the comma after it."""
    value = line.partition(f" {name}=")[2]
    return value[: _end_of_value(value, ",")]


def _is_collective(instruction: Instruction) -> bool:
    assert not instruction.opcode.endswith("-start"), "asynchronous: not read here"
    return instruction.opcode in KINDS


def _collective(instruction: Instruction, num_devices: int) -> Collective:
    if instruction.opcode == "collective-permute":
        groups = _braced(_attribute(instruction.line, "source_target_pairs"))
    else:
        groups = _replica_groups(instruction.line, num_devices)
    return Collective(instruction.opcode, _num_bytes(instruction.shape), groups)


def _links(collective: Collective) -> Iterator[tuple[int, int, float, int]]:
    """Yields (sender, receiver, bytes, messages)."""
    kind, num_bytes, groups = collective
    for group in groups:
        others = len(group) - 1
        if kind == "collective-permute":
            if group[0] != group[1]:
                yield (*group, num_bytes, 1)
            continue
        models = {"all-reduce": 2, "reduce-scatter": len(group)}.get(kind, 1)
        rounds = 2 * others if kind == "all-reduce" else others
        for sender, receiver in zip(group, [*group[1:], group[0]], strict=True):
            yield sender, receiver, models * others / len(group) * num_bytes, rounds


def _num_bytes(shape: str) -> float:
    """Of `f32[8,4]{1,0}`, or of all arrays of a tuple: the words before each [...]."""
    total = 0.0
    for piece in shape.split("]")[:-1]:
        before, _, dims = piece.rpartition("[")
        dtype = before.replace("(", " ").replace(",", " ").split()[-1]
        total += np.prod(_numbers(dims)) * BITS[dtype] / 8
    return total


def _replica_groups(line: str, num_devices: int) -> tuple[tuple[int, ...], ...]:
    """Reads `{{0,1},{2,3}}`, `[2,4]<=[4,2]T(1,0)` and `mesh['a'=2,'b'=4] {'b'}`."""
    value = _attribute(line, "replica_groups")
    if value.startswith("{"):
        return _braced(value) or (tuple(range(num_devices)),)
    if value.startswith("["):
        shape, _, source = value.partition("<=")
        source, _, order = source.partition("T")
        devices = np.arange(num_devices).reshape(_numbers(source))
        devices = devices.transpose(_numbers(order) or None)
        return _as_groups(devices.reshape(_numbers(shape)))
    _, axes, inside = value.replace("[", "{").split("{")
    sizes = dict(axis.split("=") for axis in axes.strip("]} ").split(","))
    names = inside.strip("}").replace(" ", "").split(",")
    shape = [int(size) for size in sizes.values()]  # All devices of the program.
    devices = np.arange(np.prod(shape)).reshape(shape)
    places = [list(sizes).index(name) for name in names]
    devices = np.moveaxis(devices, places, range(-len(names), 0))
    return _as_groups(devices.reshape(-1, np.prod([int(sizes[n]) for n in names])))


def _braced(text: str) -> tuple[tuple[int, ...], ...]:
    """Reads `{{0,1},{2,3}}`."""
    groups = text.replace("{", "").split("}")
    return tuple(tuple(_numbers(group)) for group in groups if group)


def _numbers(text: str) -> list[int]:
    return [int(word) for word in text.strip("[]()").split(",") if word]


def _as_groups(array: np.ndarray) -> tuple[tuple[int, ...], ...]:
    return tuple(map(tuple, array.tolist()))


def _reachable(bodies: dict[str, list[Instruction]], names: list[str]) -> set[str]:
    seen: set[str] = set()
    queue = list(names)
    while queue:
        name = queue.pop()
        if name in bodies and name not in seen:
            seen.add(name)
            queue += [called for i in bodies[name] for called in i.called]
    return seen
