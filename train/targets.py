"""Accelerators to compile for, present or not: what the compiler needs, and speeds.

FLOP/s are those of dense matmuls in the vendors' data sheets, with TF32 for float32
where a GPU has it, as XLA uses it. Networks are those of the vendors' own servers (DGX;
for T4 and A40 PCIe inside, 50 Gbit/s between): `--between` sets another rate.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from decentjax.overlap import Accelerator, Network
from train.cli.load import load_value
from train.network import ClusterSpec


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gpu:
    """An NVIDIA GPU, as XLA's compiler describes it.

    Args:
      name: name that the driver reports.
      capability: major and minor version of the compute capability.
      cores: number of streaming multiprocessors.
      fpus_per_core: number of float32 units per core.
      threads_per_core: number of resident threads per core.
      shared_memory_per_core: bytes of shared memory per core.
      shared_memory_optin: bytes of shared memory that one block can use.
      l2_bytes: bytes of the L2 cache.
      clock_ghz: boost clock.
      memory_bytes: bytes of device memory.
      memory_bytes_per_second: bandwidth of the memory.
      flops_per_second: FLOP/s of matmuls, by element type.
      inside_bytes_per_second: rate to the GPUs of the node, in each direction.
      between_bytes_per_second: rate of a node to others over all links, in each
        direction.
      links_per_node: number of these links.
    """

    platform: ClassVar = "gpu"

    name: str
    capability: tuple[int, int]
    cores: int
    fpus_per_core: int
    threads_per_core: int
    shared_memory_per_core: int
    shared_memory_optin: int
    l2_bytes: int
    clock_ghz: float
    memory_bytes: int
    memory_bytes_per_second: float
    flops_per_second: Mapping[str, float]
    inside_bytes_per_second: float
    between_bytes_per_second: float
    links_per_node: int

    def accelerator(self) -> Accelerator:
        return Accelerator(self.flops_per_second, self.memory_bytes_per_second)

    def cluster(self, num_nodes: int, devices_per_node: int) -> ClusterSpec:
        return ClusterSpec(
            num_nodes=num_nodes,
            workers_per_node=devices_per_node,
            links_per_node=self.links_per_node,
            between=self.between_bytes_per_second,
            inside=self.inside_bytes_per_second,
            between_latency=Network.between_latency,
            inside_latency=Network.inside_latency,
        )

    def config(self) -> str:
        """XLA's GpuTargetConfigProto, as text."""
        # What has no field here is the same for all GPUs from capability 7.5 on.
        major, minor = self.capability
        return f"""
            gpu_device_info {{
              threads_per_block_limit: 1024
              threads_per_warp: 32
              shared_memory_per_block: 49152
              shared_memory_per_core: {self.shared_memory_per_core}
              threads_per_core_limit: {self.threads_per_core}
              core_count: {self.cores}
              fpus_per_core: {self.fpus_per_core}
              block_dim_limit_x: 2147483647
              block_dim_limit_y: 65535
              block_dim_limit_z: 65535
              memory_bandwidth: {self.memory_bytes_per_second:.0f}
              l2_cache_size: {self.l2_bytes}
              clock_rate_ghz: {self.clock_ghz}
              device_memory_size: {self.memory_bytes}
              shared_memory_per_block_optin: {self.shared_memory_optin}
              cuda_compute_capability {{ major: {major} minor: {minor} }}
              registers_per_core_limit: 65536
              registers_per_block_limit: 65536
            }}
            platform_name: "CUDA"
            dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
            runtime_version {{ major: 12 minor: 9 patch: 0 }}
            device_description_str: "{self.name}"
        """


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tpu:
    """A slice of TPU chips, all on one interconnect.

    Args:
      name: generation and shape in libtpu's form, "v5e:4x8".
      memory_bytes: bytes of memory per chip.
      memory_bytes_per_second: bandwidth of the memory.
      flops_per_second: FLOP/s of matmuls, by element type.
      chip_bytes_per_second: rate of a chip over all its links, in each direction.
      links_per_chip: number of links per chip.
    """

    platform: ClassVar = "tpu"

    name: str
    memory_bytes: int
    memory_bytes_per_second: float
    flops_per_second: Mapping[str, float]
    chip_bytes_per_second: float
    links_per_chip: int

    def accelerator(self) -> Accelerator:
        return Accelerator(self.flops_per_second, self.memory_bytes_per_second)

    def cluster(self, num_nodes: int, devices_per_node: int) -> ClusterSpec:
        """Each chip counts as a node, whichever host it is attached to."""
        return ClusterSpec(
            # All links are between chips, so none are inside a node.
            num_nodes=num_nodes * devices_per_node,
            links_per_node=self.links_per_chip,
            between=self.chip_bytes_per_second,
            inside=self.chip_bytes_per_second,
            between_latency=1e-6,
        )


Target = Gpu | Tpu

T4 = Gpu(
    name="Tesla T4",
    capability=(7, 5),
    cores=40,
    fpus_per_core=64,
    threads_per_core=1024,
    shared_memory_per_core=65536,
    shared_memory_optin=65536,
    l2_bytes=4194304,
    clock_ghz=1.59,
    memory_bytes=15843721216,
    memory_bytes_per_second=320e9,
    # Its tensor cores have no bfloat16.
    flops_per_second={"f16": 65e12, "bf16": 8.1e12, "f32": 8.1e12, "f64": 0.25e12},
    inside_bytes_per_second=16e9,
    between_bytes_per_second=6.25e9,
    links_per_node=1,
)
A40 = Gpu(
    name="NVIDIA A40",
    capability=(8, 6),
    cores=84,
    fpus_per_core=128,
    threads_per_core=1536,
    shared_memory_per_core=102400,
    shared_memory_optin=101376,
    l2_bytes=6291456,
    clock_ghz=1.74,
    memory_bytes=47697362944,
    memory_bytes_per_second=696e9,
    flops_per_second={"bf16": 149.7e12, "f16": 149.7e12, "f32": 74.8e12, "f64": 0.6e12},
    inside_bytes_per_second=32e9,
    between_bytes_per_second=6.25e9,
    links_per_node=1,
)
A100_40 = Gpu(
    name="NVIDIA A100-SXM4-40GB",
    capability=(8, 0),
    cores=108,
    fpus_per_core=64,
    threads_per_core=2048,
    shared_memory_per_core=167936,
    shared_memory_optin=166912,
    l2_bytes=41943040,
    clock_ghz=1.41,
    memory_bytes=42331013120,
    memory_bytes_per_second=1555e9,
    flops_per_second={"bf16": 312e12, "f16": 312e12, "f32": 156e12, "f64": 19.5e12},
    inside_bytes_per_second=300e9,
    between_bytes_per_second=200e9,
    links_per_node=8,
)
A100_80 = dataclasses.replace(
    A100_40,
    name="NVIDIA A100-SXM4-80GB",
    memory_bytes=85100068864,
    memory_bytes_per_second=2039e9,
)
H100 = Gpu(
    name="NVIDIA H100 80GB HBM3",
    capability=(9, 0),
    cores=132,
    fpus_per_core=128,
    threads_per_core=2048,
    shared_memory_per_core=233472,
    shared_memory_optin=232448,
    l2_bytes=52428800,
    clock_ghz=1.98,
    memory_bytes=84942979072,
    memory_bytes_per_second=3352e9,
    flops_per_second={"bf16": 989e12, "f16": 989e12, "f32": 494e12, "f64": 67e12},
    inside_bytes_per_second=450e9,
    between_bytes_per_second=400e9,
    links_per_node=8,
)
# The same chip with another memory, as the A100 with 80 GB.
H200 = dataclasses.replace(
    H100,
    name="NVIDIA H200",
    memory_bytes=151397597184,
    memory_bytes_per_second=4800e9,
)
B200 = dataclasses.replace(
    H100,
    name="NVIDIA B200",
    capability=(10, 0),
    cores=148,
    l2_bytes=132644864,
    clock_ghz=1.965,
    memory_bytes=191514411008,
    memory_bytes_per_second=7672e9,
    flops_per_second={"bf16": 2250e12, "f16": 2250e12, "f32": 1125e12, "f64": 37e12},
    inside_bytes_per_second=900e9,
)
GPUS = {
    "t4": T4,
    "a40": A40,
    "a100_40": A100_40,
    "a100_80": A100_80,
    "h100": H100,
    "h200": H200,
    "b200": B200,
}


def _tpu(
    memory_gib: int, memory: float, flops: float, links: float, links_per_chip: int
) -> Tpu:
    """Float32 matmuls of a TPU run in bfloat16, unless a program sets the precision."""
    return Tpu(
        name="",
        memory_bytes=memory_gib * 2**30,
        memory_bytes_per_second=memory,
        flops_per_second={"bf16": flops, "f32": flops},
        chip_bytes_per_second=links,
        links_per_chip=links_per_chip,
    )


TPUS = {
    "v4": _tpu(32, 1228e9, 275e12, 300e9, 6),
    "v5e": _tpu(16, 819e9, 197e12, 200e9, 4),
    "v5p": _tpu(95, 2765e9, 459e12, 600e9, 6),
    "v6e": _tpu(32, 1640e9, 918e12, 448e9, 4),
}
SLICES = ("v4:2x2x4", "v5e:4x4", "v5p:2x2x4", "v6e:4x4")


def peak_flops(device_kind: str) -> float | None:
    """Returns the FLOP/s of a GPU in bfloat16; None for a device not in the table."""
    peaks = {gpu.name: gpu.flops_per_second["bf16"] for gpu in GPUS.values()}
    return peaks.get(device_kind)


def find(name: str) -> Target:
    """Returns the target of a name, of a TPU slice ("v5e:4x8"), or of a file.

    A file is Python, and defines `target = Gpu(...)` or `Tpu(...)`.

    Raises:
      FileNotFoundError: if the file does not exist.
      ValueError: if the name is unknown, or the file defines no target.
    """
    # "v5e:4x8": the generation has speeds, libtpu reads all of the name.
    generation, _, shape = name.partition(":")
    if name in GPUS:
        return GPUS[name]
    if generation in TPUS and shape:
        return dataclasses.replace(TPUS[generation], name=name)
    if name.endswith(".py"):
        return load_value(Path(name), "target", Target)
    known = ", ".join([*GPUS, *SLICES])
    raise ValueError(f"no target {name!r}: take {known}, or a file NAME.py")
