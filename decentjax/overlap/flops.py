"""FLOPs and bytes of the instructions of a compiled program.

Matmuls and convolutions of libraries count; for all other calls, such as cuDNN's
attention and custom kernels, only the bytes are known. XLA's own cost analysis is
unavailable for programs compiled for a GPU that is not present.
"""

import dataclasses
import math
import re
from collections.abc import Sequence

import numpy as np

from decentjax.overlap import hlo
from decentjax.overlap.hlo import ArrayType, Instruction

# They move no data, or data that counts for another instruction.
FREE = hlo.FORWARDING | {
    "after-all",
    "constant",
    "iota",
    "parameter",
    "partition-id",
    "replica-id",
}
SLICING = "dynamic-slice", "slice", "gather"


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


def work_of(instruction: Instruction) -> Work:
    """Returns the work of one instruction; that of a loop is in its body."""
    operands = instruction.operands
    if instruction.opcode in FREE:
        return NOTHING
    if instruction.kind == "fusion":
        return _work_of_fusion(instruction)
    flops = _flops(instruction)
    # A slice is read and written, whatever the size of the array around it.
    if instruction.opcode in SLICING:
        return Work(flops, 2 * instruction.num_bytes)
    if instruction.opcode == "dynamic-update-slice":
        return Work(flops, 2 * operands[1].num_bytes)
    made = instruction.arrays
    if "__cu" in instruction.attributes and len(made) > 1:
        made = made[:-1]  # The last array is the library's scratch memory.
    return Work(flops, sum(array.num_bytes for array in (*operands, *made)))


def _work_of_fusion(fusion: Instruction) -> Work:
    """Returns the matmuls inside, and the bytes of operands or of their slices."""
    (body,) = fusion.called
    # Values between the instructions of a fusion stay in registers: only the FLOPs of
    # these count, and the bytes of what the fusion reads and writes.
    flops = sum(map(work_of, body), NOTHING).flops
    read = sum(_read(each, body) for each in body if each.opcode == "parameter")
    return Work(flops, _written(body[-1]) + read)


def _read(array: Instruction, body: Sequence[Instruction]) -> float:
    """Returns the bytes that its users read: those of slices, or the whole array."""
    slices = 0.0
    for user in (each for each in body if array in each.operands):
        is_first = user.operands[0] is array
        if is_first and user.opcode in SLICING:
            slices += user.num_bytes
        elif user.opcode == "bitcast":
            slices += _read(user, body)
        elif not (is_first and user.opcode == "dynamic-update-slice"):
            return array.num_bytes
    return min(slices, array.num_bytes)


def _written(root: Instruction) -> float:
    """Returns the bytes that a fusion writes: an update in place only its slice."""
    if root.opcode in ("tuple", "bitcast"):
        return sum(map(_written, root.operands))
    if root.opcode == "dynamic-update-slice":
        return root.operands[1].num_bytes
    return root.num_bytes


def _flops(instruction: Instruction) -> dict[str, float]:
    """Returns `2 x outputs x inputs per output` of a matmul or a convolution."""
    operands = instruction.operands
    target = instruction.find(r'custom_call_target="([^"]*)"')
    if instruction.opcode == "dot" or target.startswith("__cublas"):
        # HLO writes lhs_contracting_dims={1}, the configuration of cuBLAS
        # "lhs_contracting_dimensions":["1"].
        dims = instruction.find(r'lhs_contracting_dim(?:s=\{|ensions":\[)([^\]}]*)')
        lhs, made = operands[0].arrays[0], instruction.arrays[0]
        inner = math.prod(lhs.dims[int(dim)] for dim in re.findall(r"\d+", dims))
        return {lhs.dtype: 2.0 * math.prod(made.dims) * inner}
    if instruction.opcode == "convolution" or target.startswith("__cudnn$conv"):
        first, second = (operand.arrays[0] for operand in operands[:2])
        made = instruction.arrays[0]
        # The attributes describe the forward convolution, also for the backward ones.
        image, kernel, output = {
            "__cudnn$convBackwardInput": (made, second, first),
            "__cudnn$convBackwardFilter": (first, made, second),
        }.get(target, (first, second, made))
        return _convolution_flops(instruction, image, kernel, output)
    return {}


def _convolution_flops(
    instruction: Instruction, image: ArrayType, kernel: ArrayType, output: ArrayType
) -> dict[str, float]:
    """Counts no FLOPs for positions of the window in padding or dilation."""
    # Such as b01f_01io->b01f: b is the batch, f the features, i and o those of the
    # kernel, and numbers are dims of space.
    labels = re.split("_|->", instruction.find(r"dim_labels=([\w\->]+)"))
    sizes = [
        dict(zip(letters, array.dims, strict=True))
        for letters, array in zip(labels, (image, kernel, output), strict=True)
    ]
    flops = 2.0 * sizes[2]["b"] * sizes[2]["f"] * sizes[1]["i"]
    for dim in range(len(kernel.dims) - 2):
        flops *= _window_places(instruction, dim, *(of[str(dim)] for of in sizes))
    return {kernel.dtype: flops}


def _window_places(
    instruction: Instruction, dim: int, image: int, kernel: int, output: int
) -> int:
    """Returns the pairs of output and window position that hit the image, in a dim."""

    def window(name: str, default: int) -> int:
        # Of `window={size=3x3 pad=1_1x2_2}`: 3 or, of low and high padding, the low.
        values = instruction.find(rf"window={{[^}}]*\b{name}=([^ }}]*)")
        return int(values.split("x")[dim].split("_")[0]) if values else default

    # Output o reads at o * stride - pad + k * dilation, of an image with holes between
    # its pixels if it is dilated itself, as in the gradient of a strided convolution.
    starts = np.arange(output)[:, None] * window("stride", 1) - window("pad", 0)
    places = starts + np.arange(kernel) * window("rhs_dilate", 1)
    holes = window("lhs_dilate", 1)
    inside = (places >= 0) & (places <= (image - 1) * holes)
    return int(np.sum(inside & (places % holes == 0)))
