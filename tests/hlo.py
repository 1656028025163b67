"""Reads collectives, and what they send, from the text of a compiled program."""

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
BITS = {"pred": 8, "s32": 32, "u32": 32, "bf16": 16, "f16": 16, "f32": 32, "f64": 64}


class Instruction(NamedTuple):
    """One line of a computation."""

    name: str
    opcode: str
    shape: str
    operands: tuple[str, ...]
    called: tuple[str, ...]  # the computations that it runs
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
        header = re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{$", line)
        if header:
            current = "ENTRY" if header[1] else header[2]
            found[current] = []
        elif current and (instruction := _instruction(line)):
            found[current].append(instruction)
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
    return {re.search(r'op_name="([^"]*)"', p.line)[1] for p in parameters}


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


def _instruction(line: str) -> Instruction | None:
    line = re.sub(r"/\*.*?\*/", "", line)
    match = re.match(r"\s*(?:ROOT )?%?([\w.\-]+) = (.*?) ([\w\-]+)\((.*)", line)
    if match is None:
        return None
    name, shape, opcode, rest = match.groups()
    operands, _, attributes = rest.partition(")")
    called = re.findall(
        r"(?:calls|to_apply|body|condition|true_computation|false_computation)"
        r"=%?([\w.\-]+)",
        attributes,
    )
    branches = re.search(r"branch_computations=\{([^}]*)\}", attributes)
    called += re.findall(r"[\w.\-]+", branches[1]) if branches else []
    return Instruction(
        name,
        opcode,
        shape,
        tuple(re.findall(r"%([\w.\-]+)", operands)),
        tuple(called),
        line,
    )


def _is_collective(instruction: Instruction) -> bool:
    assert not instruction.opcode.endswith("-start"), "asynchronous: not read here"
    return instruction.opcode in KINDS


def _collective(instruction: Instruction, num_devices: int) -> Collective:
    if instruction.opcode == "collective-permute":
        pairs = re.search(r"source_target_pairs=\{([\d{},]*)\}", instruction.line)
        groups = _braced(pairs[1])
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
    arrays = re.findall(r"(\w+)\[([\d,]*)\]", shape)
    return sum(
        np.prod([int(d) for d in dims.split(",") if d]) * BITS[dtype] / 8
        for dtype, dims in arrays
    )


def _replica_groups(line: str, num_devices: int) -> tuple[tuple[int, ...], ...]:
    """Reads `{{0,1},{2,3}}`, `[2,4]<=[4,2]T(1,0)` and `mesh['a'=2,'b'=4] {'b'}`."""
    listed = re.search(r"replica_groups=\{([\d{},]*)\}", line)
    if listed:
        return _braced(listed[1]) or (tuple(range(num_devices)),)
    iota = re.search(
        r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line
    )
    if iota:
        shape, source = _numbers(iota[1]), _numbers(iota[2])
        devices = np.arange(np.prod(source)).reshape(source)
        order = _numbers(iota[3]) if iota[3] else range(len(source))
        return _as_groups(devices.transpose(order).reshape(shape))
    mesh = re.search(r"replica_groups=mesh\[([^\]]*)\] ?\{([^}]*)\}", line)
    sizes = {k: int(v) for k, v in re.findall(r"'(\w+)'=(\d+)", mesh[1])}
    axes = re.findall(r"'(\w+)'", mesh[2])
    devices = np.arange(np.prod(list(sizes.values()))).reshape(*sizes.values())
    places = [list(sizes).index(axis) for axis in axes]
    devices = np.moveaxis(devices, places, range(-len(axes), 0))
    return _as_groups(devices.reshape(-1, np.prod([sizes[axis] for axis in axes])))


def _braced(text: str) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(_numbers(group)) for group in re.findall(r"\{([\d,]*)\}", text))


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def _as_groups(array: np.ndarray) -> tuple[tuple[int, ...], ...]:
    return tuple(map(tuple, array.tolist()))


def _reachable(bodies: dict[str, list[Instruction]], names: list[str]) -> set[str]:
    seen: set[str] = set()
    queue = list(names)
    while queue:
        name = queue.pop()
        if name not in seen:
            seen.add(name)
            queue += [called for i in bodies[name] for called in i.called]
    return seen
