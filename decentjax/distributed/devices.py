"""The devices of a process, and the mesh of those of all processes."""

import os
from typing import Any

import jax
from jax.sharding import Mesh

from decentjax.placement import fast_network, worker_mesh
from decentjax.process.threads import provide_threads


def provide_devices(local_id: int | None, count: int) -> None:
    """Gives this process `count` devices; call it before any device is used.

    Args:
      local_id: index of this process on its machine; None if unknown.
      count: number of devices.
    """
    provide_cpu_devices(count)
    if gpus := own_gpus(local_id, count):
        visible = ",".join(map(str, gpus))
        jax.config.update("jax_cuda_visible_devices", visible)
        jax.config.update("jax_rocm_visible_devices", visible)


def provide_cpu_devices(count: int) -> None:
    """Makes the CPU appear as `count` devices; other platforms ignore it."""
    provide_threads(count)
    jax.config.update("jax_num_cpu_devices", count)


def own_gpus(local_id: int | None, count: int) -> list[int] | None:
    """Returns the indices of this process's GPUs on its machine, or None if unknown."""
    if given := os.environ.get("JAX_LOCAL_DEVICE_IDS"):
        return list(map(int, given.split(",")))
    if local_id is None:
        return None
    return list(range(local_id * count, (local_id + 1) * count))


def node_mesh(hosts: list[str], devices_per_worker: int = 1) -> Mesh:
    """A mesh of all devices, in which the workers of a node are consecutive.

    Nodes that share a fast network are consecutive too.

    Args:
      hosts: host name of each process.
      devices_per_worker: number of devices of each worker.
    """

    # A node's processes need not have consecutive numbers, as with srun's cyclic
    # distribution: hosts A, B, A, B give the order of processes 0, 2, 1, 3. Nor need
    # the nodes of a rack.
    def place(device: Any) -> tuple[int, ...]:
        process = device.process_index
        node = hosts.index(hosts[process])
        return fast_network(device), node, process, device.id

    devices = sorted(jax.devices(), key=place)
    count = len(devices) // devices_per_worker
    return worker_mesh(count, devices, devices_per_worker)
