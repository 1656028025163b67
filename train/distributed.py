"""A job of several processes: how it begins, agrees, and ends where one of them fails.

Nothing here knows what is trained.
"""

import contextlib
import hashlib
import json
import os
import platform
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from importlib.metadata import version
from typing import Any

import jax
import numpy as np
from jax import distributed
from jax._src import distributed as internals  # The key-value store has no public name.
from jax.experimental import multihost_utils
from jax.sharding import Mesh

import decentjax
from decentjax import worker_mesh
from train.config import Config, DistributedConfig, differences, to_json

FAILED = 70  # The exit code of a process that ended on an error, EX_SOFTWARE.
PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain")


def start(config: DistributedConfig, num_workers: int) -> None:
    """Joins the processes of the job; before anything has used a device.

    Raises:
      ValueError: if there is nobody to join, or the workers cannot be dealt out.
    """
    timeout = config.timeout_seconds
    # Else a process that hangs would keep all others waiting for half an hour.
    flag = f"--xla_cpu_collective_timeout_seconds={timeout}"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()
    address = config.coordinator
    bind = None
    if address is not None:
        if config.num_processes is None or config.process_id is None:
            raise ValueError(
                "with distributed.coordinator give distributed.num_processes and "
                "distributed.process_id too; under Slurm and Open MPI leave out all"
            )
        if config.process_id == 0:
            _check_free(address)
        bind = address
    with _explained(config):
        try:
            distributed.initialize(
                address,
                config.num_processes,
                config.process_id,
                initialization_timeout=config.start_seconds,
                coordinator_bind_address=bind,
            )
        except (ValueError, TypeError) as error:
            raise ValueError(
                f"cannot find the other processes: {error} Start the run with "
                "`python -m train.launch`, with srun or mpirun, or give "
                "distributed.coordinator, num_processes and process_id"
            ) from error
    state = internals.global_state
    if num_workers % state.num_processes:
        raise ValueError(
            f"{num_workers} workers cannot be dealt out evenly to "
            f"{state.num_processes} processes; change workers.num_workers"
        )
    provide_cpu_devices(num_workers // state.num_processes)


def provide_cpu_devices(count: int) -> None:
    """Lets the CPU appear as `count` devices; other platforms take no notice.

    XLA runs the devices of a CPU mesh on one pool of threads, where a collective holds
    its thread until every device has come: with too few threads they wait for ever. A
    device alone needs one to exchange while another computes.
    """
    needed = 2 if count == 1 else 8 * count
    given = int(os.environ.get("NPROC", os.cpu_count() or 1))
    os.environ["NPROC"] = str(max(given, needed))
    jax.config.update("jax_num_cpu_devices", count)


@contextlib.contextmanager
def fail_stop() -> Iterator[None]:
    """Ends the process at once where it fails, so that its peers notice and end too.

    An ordinary exit would wait for peers that wait for this process.
    """
    try:
        yield
    except BaseException as error:
        name = f"process {internals.global_state.process_id}"
        if isinstance(error, SystemExit) and not error.code:
            raise
        if _is_lost_peer(error):
            message = f"lost a peer: {str(error).splitlines()[0]}"
        elif isinstance(error, SystemExit | ValueError | FloatingPointError):
            message = str(error)
        else:
            message = "failed:\n" + traceback.format_exc().rstrip()
        print(f"error: {name}: {message}", file=sys.stderr, flush=True)
        sys.stdout.flush()
        os._exit(FAILED)


def meet(config: Config) -> list[str]:
    """Compares config, topology and versions of all processes.

    Returns:
      The host names of the processes, in the order of their numbers.

    Raises:
      ValueError: if they differ, on all processes.
    """
    topology = config.topology.build(config.workers)
    facts = {
        "config": _shared(config),
        "topology": hashlib.sha256(repr(topology).encode()).hexdigest()[:12],
        "versions": {
            "python": platform.python_version(),
            "decentjax": decentjax.__version__,
            **{package: version(package) for package in PACKAGES},
        },
    }
    everybody = _all_gather({"host": socket.gethostname(), "facts": facts})
    phrases = [
        f"process {number} against process 0: {phrase}"
        for number, one in enumerate(everybody)
        for phrase in differences(everybody[0]["facts"], one["facts"])
    ]
    if phrases:
        raise ValueError("the processes differ: " + "; ".join(phrases))
    return [one["host"] for one in everybody]


def job_mesh(config: Config, hosts: list[str]) -> Mesh:
    """A mesh of all devices, where the workers of a node stand side by side.

    Args:
      config: of the run.
      hosts: of the processes, as `meet` returns them.

    Raises:
      ValueError: if the workers do not fit the devices, or the nodes.
    """
    workers = config.workers
    devices = jax.devices()
    if len(devices) != workers.num_workers:
        raise ValueError(
            f"the {len(hosts)} processes have {len(devices)} devices; set "
            f"workers.num_workers to {len(devices)}, got {workers.num_workers}"
        )
    first_on_host = {host: hosts.index(host) for host in hosts}
    devices = sorted(
        devices,
        key=lambda d: (first_on_host[hosts[d.process_index]], d.process_index, d.id),
    )
    for host in first_on_host:
        count = sum(hosts[device.process_index] == host for device in devices)
        if count % workers.workers_per_node:
            raise ValueError(
                f"workers.workers_per_node = {workers.workers_per_node} does not fit "
                f"node {host}, which has {count} workers"
            )
    return worker_mesh(workers.num_workers, devices)


def mean_over_processes(
    step: int,
    values: dict[str, float],
    timeout_seconds: int,
    check: Callable[[], None],
) -> dict[str, float]:
    """Returns the means over the processes on process 0, its own values on others.

    It goes through the coordinator, not by a collective, which could meet an exchange
    on its way.

    Args:
      step: after which the values were measured.
      values: of this process.
      timeout_seconds: how late another process may be.
      check: called each second of the wait; may raise.
    """
    client: Any = internals.global_state.client
    if jax.process_count() == 1:
        return values
    if jax.process_index() > 0:
        client.key_value_set(
            f"metrics/{step}/{jax.process_index()}", json.dumps(values)
        )
        return values
    rows = [values]
    for number in range(1, jax.process_count()):
        key = f"metrics/{step}/{number}"
        rows.append(json.loads(_wait_for(key, timeout_seconds, check)))
        client.key_value_delete(key)
    return {name: float(np.mean([row[name] for row in rows])) for name in values}


def gather(value: Any) -> list[Any]:
    """Returns the JSON values of all processes, on each. A collective."""
    return _all_gather(value) if jax.process_count() > 1 else [value]


def _all_gather(value: Any) -> list[Any]:
    text = np.frombuffer(json.dumps(value).encode(), np.uint8)
    sizes = multihost_utils.process_allgather(np.array([text.size]))[:, 0]
    padded = np.zeros(max(sizes), np.uint8)
    padded[: text.size] = text
    rows = multihost_utils.process_allgather(padded)
    pairs = zip(rows, sizes, strict=True)
    return [json.loads(bytes(row[:size]).decode()) for row, size in pairs]


def _wait_for(key: str, timeout_seconds: int, check: Callable[[], None]) -> str:
    client: Any = internals.global_state.client
    end = time.monotonic() + timeout_seconds
    while True:
        try:
            return client.blocking_key_value_get(key, 1000)
        except jax.errors.JaxRuntimeError:
            check()
            if time.monotonic() > end:
                raise


def _shared(config: Config) -> dict[str, Any]:
    """What has to be the same in all processes."""
    shared = json.loads(to_json(config))
    del shared["distributed"]["process_id"]
    return shared


def _is_lost_peer(error: BaseException) -> bool:
    """By what it says: of jax's errors some are a ValueError."""
    words = ("Gloo", "gloo", "oordination service", "GetKeyValue() timed out")
    return isinstance(error, jax.errors.JaxRuntimeError | ValueError) and any(
        word in str(error) for word in words
    )


def _check_free(address: str) -> None:
    """Refuses a port in use: jax's coordinator would share it, and end that job."""
    host, _, port = address.rpartition(":")
    try:
        if not 0 < int(port) < 2**16:
            raise ValueError(f"there is no port {port}")
        with socket.create_server((host, int(port))):
            pass
    except (OSError, ValueError) as error:
        raise ValueError(
            f"distributed.coordinator {address} cannot be had ({error}): choose "
            "another port, or the address of this machine"
        ) from error


@contextlib.contextmanager
def _explained(config: DistributedConfig) -> Iterator[None]:
    """Says what is missing, in time before jax aborts the process without a word."""
    seconds = max(1, config.start_seconds - 2)

    def give_up() -> None:
        where = config.coordinator or "the coordinator that was detected"
        print(
            f"error: not all processes have come to {where} within {seconds} s: are "
            "all of them started, with the same coordinator and number of processes, "
            "and can they reach it?",
            file=sys.stderr,
            flush=True,
        )
        os._exit(FAILED)

    timer = threading.Timer(seconds, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
