"""Starts a script as one process of a job, or as one of several peers."""

import json
import socket
from typing import Any, NamedTuple

import jax
from jax._src import xla_bridge
from jax.sharding import Mesh

from decentjax.distributed.credentials import check_credentials
from decentjax.distributed.deadline import check_deadline
from decentjax.distributed.devices import node_mesh, provide_devices
from decentjax.distributed.failure import end_where_uncaught, set_worker
from decentjax.distributed.join import join, share
from decentjax.distributed.place import PEERS, find_place, find_worker
from decentjax.distributed.watch import watch
from decentjax.placement import AXIS, worker_mesh
from decentjax.process import phases


class Peer(NamedTuple):
    """One of several peer processes, which share no job.

    Args:
      workers: numbers of its workers.
      num_workers: number of workers over all processes.
      mesh: mesh of its devices, with the axis "workers".
    """

    workers: range
    num_workers: int
    mesh: Mesh


def initialize(
    local_workers: int = 1,
    *,
    step_deadline: float | None = None,
    start_seconds: int = 300,
) -> Mesh:
    """Joins the processes of the job, and returns the mesh of all their workers.

    Call it once, in all processes, before jax uses a device. Each process gets
    `local_workers` devices: CPU devices with threads for their collectives, or GPUs by
    the index of the process on its machine. The place in the job comes from the
    variables of `decentjax launch`, torchrun, Open MPI or Slurm; without any, the
    process is a job by itself.

    In a job, an uncaught exception ends its process at once, with exit code 70 and a
    line that names the process; the others lose their connections and end likewise.
    `sys.exit` does not: the process waits for the others.

    Nor does a process that hangs hold the others indefinitely: once a phase of a step
    takes longer than its deadline, all print which process is late, what it is doing,
    since when and where in its code, and end with exit code 72. The library's train
    steps note their phases; `phase` names those of your own loop.

    Args:
      local_workers: number of workers of each process, the same in all.
      step_deadline: longest time of a phase of a step, in seconds. Compiling, saving,
        evaluating, and what has no name may take ten times as long, and so may
        everything before the end of the first step. By default it is learned, 30 times
        the median step and at least 300 s, in jobs of several processes; `math.inf`
        switches it off, as a notebook should: it applies from the first train step, or
        `phase`, of any process until the process ends.
      start_seconds: timeout for all processes to join.

    Returns:
      A mesh with the axis "workers", in which the workers of a node are consecutive.

    Raises:
      ValueError: if an argument or a variable is invalid, jax has already used a
        device, it is called twice, another job uses the address, processes are missing,
        or they differ in `local_workers` or the number of devices.

    Examples:
      >>> from decentjax import distributed
      >>> mesh = distributed.initialize()
    """
    _check_at_least(1, local_workers=local_workers)
    check_deadline("step_deadline", step_deadline)
    _check_at_least(3, start_seconds=start_seconds)
    _check_unused()
    place = find_place(start_seconds)
    if place.address == PEERS:
        raise ValueError(
            "decentjax launch --elastic starts peers, which are no job: call "
            "initialize_peer(), or leave out --elastic"
        )
    hosts = [""]
    if place.address:
        check_credentials()
        end_where_uncaught()
        join(place, local_workers, step_deadline, start_seconds)
        hosts = _hosts(local_workers)
    else:
        _watch_alone(step_deadline)
        provide_devices(place.local_id, local_workers)
    _check_devices(local_workers)
    phases.note(phases.STARTING)
    return node_mesh(hosts)


def initialize_peer(
    local_workers: int = 1, *, step_deadline: float | None = None
) -> Peer:
    """Gives this process its devices and its place among peers.

    Like `initialize`, but without a job: no process waits for another, and a failure
    ends only its own process. Exchange models with `gossip.Peers`.

    Args:
      local_workers: number of workers of each process, the same in all.
      step_deadline: longest time of a phase of a step, in seconds, after which this
        process ends, as in `initialize`; by default none.

    Raises:
      ValueError: if an argument or a variable is invalid, jax has already used a
        device, it is called twice, or the number of devices differs.

    Examples:
      >>> from decentjax import distributed
      >>> workers, num_workers, mesh = distributed.initialize_peer()
    """
    _check_at_least(1, local_workers=local_workers)
    check_deadline("step_deadline", step_deadline)
    _check_unused()
    place = find_place(seconds=1)
    _watch_alone(step_deadline, place.process_id)
    provide_devices(place.local_id, local_workers)
    _check_devices(local_workers)
    phases.note(phases.STARTING)
    first = place.process_id * local_workers
    return Peer(
        range(first, first + local_workers),
        place.num_processes * local_workers,
        worker_mesh(local_workers),
    )


def initialize_worker(
    num_devices: int = 1,
    *,
    step_deadline: float | None = None,
    start_seconds: int = 300,
) -> Peer:
    """Joins the processes of one worker, which is a job of its own.

    Like `initialize_peer`, for a worker too large for one process: its P processes,
    started by `decentjax launch --processes-per-worker P --elastic`, are a job of
    `jax.distributed`, over whose mesh it shards its model and its batch. Each of them
    exchanges its part of the model with the process of the same number of each peer.

    Args:
      num_devices: number of devices of each process, the same in all.
      step_deadline: as in `initialize`, of the processes of this worker.
      start_seconds: timeout for the processes of this worker to join.

    Returns:
      The place among peers, whose mesh has the axes "workers", of size 1, and "fsdp",
      of all devices of the worker.

    Raises:
      ValueError: as in `initialize`, or if the number of processes is no multiple of P.

    Examples:
      >>> from decentjax import distributed
      >>> workers, num_workers, mesh = distributed.initialize_worker()
    """
    _check_at_least(1, num_devices=num_devices)
    check_deadline("step_deadline", step_deadline)
    _check_at_least(3, start_seconds=start_seconds)
    _check_unused()
    worker, num_workers, job = find_worker(find_place(seconds=1))
    if job.address:
        check_credentials()
        end_where_uncaught()
        set_worker(worker)
        join(job, num_devices, step_deadline, start_seconds)
    else:
        _watch_alone(step_deadline, worker)
        provide_devices(job.local_id, num_devices)
    _check_devices(num_devices)
    phases.note(phases.STARTING)
    devices = worker_mesh(1, None, job.num_processes * num_devices).devices
    mesh = Mesh(devices.reshape(1, -1), (AXIS, "fsdp"))  # One device has the axis too.
    return Peer(range(worker, worker + 1), num_workers, mesh)


def _watch_alone(step_deadline: float | None, number: int = 0) -> None:
    # No process waits for it, and its user may be in a debugger.
    if step_deadline is not None:
        watch(step_deadline, number)


def _check_at_least(least: int, **arguments: Any) -> None:
    for name, value in arguments.items():
        if type(value) is not int or value < least:
            raise ValueError(
                f"{name} must be an integer of at least {least}, got {value!r}"
            )


def _check_unused() -> None:
    if jax.distributed.is_initialized():
        raise ValueError(
            "this process has already joined its job: call initialize() once, and "
            "leave out jax.distributed.initialize()"
        )
    if xla_bridge.backends_are_initialized():
        raise ValueError(
            "jax has already used a device, or this is the second call: call "
            "initialize() once, before anything else that needs jax's devices"
        )


def _check_devices(local_workers: int) -> None:
    devices = jax.local_devices()
    if len(devices) != local_workers:
        raise ValueError(
            f"{local_workers} workers of a process need as many devices, but this "
            f"process has {len(devices)}, {devices[0].device_kind}: call initialize"
            f"({len(devices)}), or choose its devices by JAX_LOCAL_DEVICE_IDS"
        )


def _hosts(local_workers: int) -> list[str]:
    """The host name of each process, if all have as many workers."""
    texts = share("start", json.dumps([socket.gethostname(), local_workers]))
    found = [json.loads(text) for text in texts]
    for number, (_, count) in enumerate(found):
        if count != found[0][1]:
            raise ValueError(
                f"process 0 has {found[0][1]} workers, but process {number} has "
                f"{count}: call initialize() with the same local_workers in all "
                "processes"
            )
    return [host for host, _ in found]
