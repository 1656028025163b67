"""FLOPs and bytes of the instructions of a compiled program.

Matmuls and convolutions of libraries count; for all other calls, such as cuDNN's
attention and custom kernels, only the bytes are known. XLA's own cost analysis is
unavailable for programs compiled for a GPU that is not present.
"""

import dataclasses
import json
import math
import re

import numpy as np

from decentjax.overlap.hlo import Array, Computation, Instruction, Module

# They move no data, or data that counts for another instruction.
FREE = {
    "add-dependency",
    "after-all",
    "bitcast",
    "constant",
    "copy-done",
    "copy-start",
    "domain",
    "get-tuple-element",
    "iota",
    "opt-barrier",
    "parameter",
    "partition-id",
    "replica-id",
    "tuple",
}


@dataclasses.dataclass(frozen=True)
class Work:
    """FLOPs and bytes on one device.

    Args:
      flops: FLOPs of matmuls and convolutions by element type; all other ops are bound
        by the memory.
      num_bytes: bytes read and written.
    """

    flops: dict[str, float]
    num_bytes: float

    def __add__(self, other: "Work") -> "Work":
        flops = dict(self.flops)
        for dtype, number in other.flops.items():
            flops[dtype] = flops.get(dtype, 0) + number
        return Work(flops, self.num_bytes + other.num_bytes)

    def times(self, factor: float) -> "Work":
        flops = {dtype: factor * number for dtype, number in self.flops.items()}
        return Work(flops, factor * self.num_bytes)


NOTHING = Work({}, 0)


def work_of(module: Module, computation: Computation, instruction: Instruction) -> Work:
    """Returns the work of one instruction; that of a loop is in its body."""
    if instruction.opcode in FREE:
        return NOTHING
    if instruction.opcode.removesuffix("-start") == "fusion":
        return _work_of_fusion(module, computation, instruction)
    operands = computation.operands(instruction)
    flops = _flops(instruction, operands)
    if instruction.opcode in ("dynamic-slice", "slice", "gather"):
        return Work(flops, 2 * instruction.num_bytes)
    if instruction.opcode == "dynamic-update-slice":
        return Work(flops, 2 * operands[1].num_bytes)
    read = sum(operand.num_bytes for operand in operands)
    made = instruction.arrays
    if "__cu" in instruction.attributes and len(made) > 1:
        made = made[:-1]  # The last array is the library's scratch memory.
    return Work(flops, read + sum(array.num_bytes for array in made))


def _work_of_fusion(
    module: Module, computation: Computation, fusion: Instruction
) -> Work:
    """Returns the matmuls inside, and the bytes of operands or of their slices."""
    (body,) = module.called(fusion)
    users: dict[str, list[Instruction]] = {name: [] for name in body.instructions}
    flops = NOTHING
    for instruction in body.instructions.values():
        for name in instruction.operands:
            users[name].append(instruction)
        if instruction.called and instruction.opcode == "fusion":
            flops += _work_of_fusion(module, body, instruction)
        else:
            flops += Work(_flops(instruction, body.operands(instruction)), 0)
    num_bytes = _written(body, body.instructions[body.root])
    parameters = [i for i in body.instructions.values() if i.opcode == "parameter"]
    for parameter in parameters:
        num_bytes += _read(parameter, users)
    return Work(flops.flops, num_bytes)


def _read(array: Instruction, users: dict[str, list[Instruction]]) -> float:
    slices = 0.0
    for user in users[array.name]:
        is_first = user.operands[0] == array.name
        if is_first and user.opcode in ("dynamic-slice", "slice", "gather"):
            slices += user.num_bytes
        elif user.opcode == "bitcast":
            slices += _read(user, users)
        elif not (is_first and user.opcode == "dynamic-update-slice"):
            return array.num_bytes
    return min(slices, array.num_bytes)


def _written(body: Computation, root: Instruction) -> float:
    if root.opcode == "tuple":
        return sum(_written(body, made) for made in body.operands(root))
    if root.opcode == "bitcast":
        return _written(body, body.operands(root)[0])
    if root.opcode == "dynamic-update-slice":
        return body.operands(root)[1].num_bytes
    return root.num_bytes


def _flops(instruction: Instruction, operands: list[Instruction]) -> dict[str, float]:
    """Returns `2 x outputs x inputs per output` of a matmul or a convolution."""
    attributes = instruction.attributes
    if instruction.opcode == "dot":
        contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", attributes)
        return _dot_flops(instruction, operands, _numbers(contracted[1]))  # pyright: ignore
    if instruction.opcode == "convolution":
        image, kernel = (operand.arrays[0] for operand in operands[:2])
        return _convolution_flops(attributes, image, kernel, instruction.arrays[0])
    if instruction.opcode.removesuffix("-start") != "custom-call":
        return {}
    target = re.search(r'custom_call_target="([^"]*)"', attributes)
    name = target[1] if target else ""
    if name.startswith("__cublas"):
        listed = re.search(r'lhs_contracting_dimensions":(\[[^\]]*\])', attributes)
        dims = map(int, json.loads(listed[1]) if listed else [])
        return _dot_flops(instruction, operands, list(dims))
    if name.startswith("__cudnn$conv"):
        first, second = (operand.arrays[0] for operand in operands[:2])
        made = instruction.arrays[0]
        # The attributes describe the forward convolution, also for the backward ones.
        image, kernel, output = {
            "__cudnn$convBackwardInput": (made, second, first),
            "__cudnn$convBackwardFilter": (first, made, second),
        }.get(name, (first, second, made))
        return _convolution_flops(attributes, image, kernel, output)
    return {}


def _dot_flops(
    dot: Instruction, operands: list[Instruction], contracted: list[int]
) -> dict[str, float]:
    lhs = operands[0].arrays[0]
    inner = math.prod(lhs.dims[dim] for dim in contracted)
    return {lhs.dtype: 2.0 * math.prod(dot.arrays[0].dims) * inner}


def _convolution_flops(
    attributes: str, image: Array, kernel: Array, output: Array
) -> dict[str, float]:
    """Counts no FLOPs for positions of the window in padding or dilation."""
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", attributes)
    assert labels is not None
    of_image, of_kernel, of_output = labels.groups()
    inputs = kernel.dims[of_kernel.index("i")]
    outputs = [
        size
        for size, label in zip(output.dims, of_output, strict=True)
        if label in "bf"
    ]
    flops = 2.0 * math.prod(outputs) * inputs
    for dim in range(len(of_kernel) - 2):
        flops *= _window_places(
            attributes,
            dim,
            image.dims[of_image.index(str(dim))],
            kernel.dims[of_kernel.index(str(dim))],
            output.dims[of_output.index(str(dim))],
        )
    return {kernel.dtype: flops}


def _window_places(
    attributes: str, dim: int, image: int, kernel: int, output: int
) -> int:
    """Returns the pairs of output and window position that hit the image, in a dim."""
    low = _window(attributes, "pad", dim, "0_0").partition("_")[0]
    stride, image_dilation, kernel_dilation = (
        int(_window(attributes, name, dim, "1"))
        for name in ("stride", "lhs_dilate", "rhs_dilate")
    )
    starts = np.arange(output)[:, None] * stride - int(low)
    places = starts + np.arange(kernel) * kernel_dilation
    inside = (places >= 0) & (places <= (image - 1) * image_dilation)
    return int(np.sum(inside & (places % image_dilation == 0)))


def _window(attributes: str, name: str, dim: int, default: str) -> str:
    """Returns a dim's value of `window={size=3x3 pad=1_1x1_1}`: 3, or 1_1."""
    found = re.search(rf"window={{[^}}]*\b{name}=([^ }}]*)", attributes)
    return found[1].split("x")[dim] if found else default


def _numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]
