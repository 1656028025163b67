"""Accelerators to compile for, present or not: what the compiler needs, and speeds.

The accelerators themselves are in `targets.toml`.
"""

import dataclasses
import tomllib
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


def _table() -> tuple[dict[str, Gpu], dict[str, Tpu]]:
    """Returns the GPUs and the TPUs of `targets.toml`, by name."""
    tables = tomllib.loads(
        Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
    )
    gpus = {
        name: tables["gpu"][own.pop("like", name)] | own
        for name, own in tables["gpu"].items()
    }
    for fields in gpus.values():
        fields["capability"] = tuple(fields["capability"])
    return (
        {name: Gpu(**fields) for name, fields in gpus.items()},
        {name: Tpu(**fields) for name, fields in tables["tpu"].items()},
    )


GPUS, TPUS = _table()
SLICES = ("v4:2x2x4", "v5e:4x4", "v5p:2x2x4", "v6e:4x4")


def __getattr__(name: str) -> Gpu:
    """Returns a GPU by its name in capitals, as files of users import `H100`."""
    if name.lower() not in GPUS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return GPUS[name.lower()]


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
