"""A job of several processes: how it begins, agrees, and ends where one of them fails.

Nothing here knows what is trained.
"""

import collections
import contextlib
import hashlib
import json
import os
import platform
import re
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator
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
from decentjax.gossip import Engine
from train.cli import sentence
from train.config import Config, DistributedConfig
from train.config_json import differences, to_json

FAILED = 70  # The exit code of a process that ended on an error, EX_SOFTWARE.
PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain")


def start(config: DistributedConfig, num_workers: int) -> None:
    """Joins the processes of the job; before anything has used a device.

    Where jax finds the coordinator's address itself, under Slurm and Open MPI, the
    coordinator listens on all interfaces, and nobody looks whether its port is free.

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


def leave() -> None:
    """Ends the job for all of its processes, so that nobody waits for process 0.

    It has what came out to score and to draw, which may take longer than jax would
    have the others wait for it. A collective, and the last.
    """
    if jax.process_count() > 1:
        distributed.shutdown()


@contextlib.contextmanager
def fail_stop() -> Iterator[None]:
    """Ends the process at once where it fails, so that its peers notice and end too.

    An ordinary exit would wait for peers that wait for this process.
    """
    try:
        yield
    except BaseException as error:
        if isinstance(error, SystemExit) and not error.code:
            raise
        try:
            job = internals.global_state
            message = f"error: process {job.process_id}: {_explain(error)}"
            print(message, file=sys.stderr, flush=True)
            sys.stdout.flush()
            if job.process_id == 0 and job.num_processes > 1:
                # The coordinator ends with this process, and jax then aborts all
                # others: they shall first say what they have met.
                time.sleep(1)
        finally:
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


class MetricMeans:
    """Means of metrics over the processes, for process 0, which waits for nobody.

    They go through the coordinator, not by a collective, which could meet an exchange
    on its way; and from a second thread, as the coordinator of a process 0 that hangs
    never answers. A context that ends the thread.
    """

    def __init__(self, timeout_seconds: float):
        self._own: collections.deque[tuple[int, dict[str, float]]] = collections.deque()
        self._timeout_seconds = timeout_seconds
        self._engine = Engine()

    def __enter__(self) -> "MetricMeans":
        return self

    def __exit__(self, *error: Any) -> None:
        self._engine.__exit__(*error)

    def put(self, step: int, values: dict[str, float]) -> None:
        """Hands over what this process has measured, after rising numbers of steps."""
        if jax.process_index() == 0:
            self._own.append((step, values))
            return
        key = f"metrics/{step}/{jax.process_index()}"
        self._engine.submit(_client().key_value_set, key, json.dumps(values))

    def flush(self) -> None:
        """Waits until all that was put has come to process 0.

        Raises:
          ValueError: it does not answer.
        """
        try:
            self._engine.submit(int).result(self._timeout_seconds)
        except TimeoutError as error:
            raise ValueError(
                f"lost a peer: process 0 has not answered for {self._timeout_seconds} s"
            ) from error

    def rows(self) -> Iterator[tuple[int, dict[str, float]]]:
        """Yields step and means, in order, of what has come from all; to process 0."""
        while self._own:
            step, values = self._own[0]
            rows = [values, *_others(f"metrics/{step}/")]
            if len(rows) < jax.process_count():
                return
            self._own.popleft()
            yield step, {k: float(np.mean([row[k] for row in rows])) for k in values}


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


def _client() -> Any:
    return internals.global_state.client


def _others(folder: str) -> list[Any]:
    """The values that processes have left there; taken away where all have."""
    if jax.process_count() == 1:
        return []
    pairs = _client().key_value_dir_get(folder)
    if len(pairs) == jax.process_count() - 1:
        _client().key_value_delete(folder)
    return [json.loads(value) for _, value in pairs]


def _shared(config: Config) -> dict[str, Any]:
    """What has to be the same in all processes."""
    shared = json.loads(to_json(config))
    del shared["distributed"]["process_id"]
    return shared


def _explain(error: BaseException) -> str:
    """A sentence where the error is foreseen, else a traceback."""
    if lost := _lost_peer(error):
        return f"lost a peer: {lost}"
    if isinstance(error, SystemExit):
        return str(error)
    trace = "failed:\n" + "".join(traceback.format_exception(error)).rstrip()
    return sentence(error) or trace


def _lost_peer(error: BaseException) -> str | None:
    """What such an error says of it; of jax's errors some are a ValueError."""
    if not isinstance(error, jax.errors.JaxRuntimeError | ValueError):
        return None
    found = re.search(r"(Gloo|gloo|[Cc]oordination service).*", str(error))
    return found and found[0]


def _check_free(address: str) -> None:
    """Refuses a port in use: jax's coordinator would share it, and end that job.

    And a name that means this machine alone, where no other could reach it.
    """
    host, _, port = address.rpartition(":")
    try:
        if not 0 < int(port) < 2**16:
            raise ValueError(f"there is no port {port}")
        own = socket.gethostbyname(host)
        if own.startswith("127.") and host not in ("localhost", own):
            raise ValueError(f"{host} is {own} on this machine itself")
        with socket.create_server((host, int(port))):
            pass
    except (OSError, ValueError) as error:
        raise ValueError(
            f"distributed.coordinator {address} cannot be had ({error}): choose "
            "another port, or this machine's address in the network"
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
