"""A job of several processes: how it starts, agrees, and ends when one of them fails.

Nothing here depends on what is trained.
"""

import collections
import contextlib
import hashlib
import importlib
import json
import os
import platform
import re
import socket
import sys
import time
import traceback
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import distributed
from jax._src import distributed as internals  # The key-value store has no public name.
from jax._src import xla_bridge
from jax._src.clusters import ClusterEnv
from jax.experimental import multihost_utils
from jax.extend.backend import register_backend_factory
from jax.sharding import Mesh

import decentjax
from decentjax import worker_mesh
from decentjax.gossip import Engine
from train.cli.command import failure, sentence
from train.cli.config_json import differences, to_json
from train.config import Config, DistributedConfig
from train.job.rendezvous import Place, is_loopback, rendezvous

MONTH_SECONDS = 30 * 24 * 3600
PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain")


def start(
    config: DistributedConfig, num_workers: int, run_dir: Path | None = None
) -> None:
    """Joins the processes of the job; before anything has used a device.

    jax's coordinator ends a job whose processes send it no heartbeat, and measures that
    by the wall clock: with jax 0.10.2 and 0.12.0, a clock set ahead by more than the
    limit, 100 s, ends the job within 2 s, and a clock set back does so at any limit.
    With CPUs only (JAX_PLATFORMS=cpu) the limit is a month, as collectives without a
    peer end by their own limit. On GPU it stays at 100 s: nothing else that we know
    detects a machine that vanishes with its connections open.

    Args:
      config: place of this process; None where jax finds it.
      num_workers: number of workers of the job.
      run_dir: folder of the run, visible to all processes.

    Raises:
      ValueError: if there is no job to join, another job uses its address, processes
        are missing or do not see the folder, or the workers do not divide among them.
    """
    timeout = config.timeout_seconds
    # By default a process that hangs keeps all others waiting for half an hour.
    flag = f"--xla_cpu_collective_timeout_seconds={timeout}"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()
    place = _place(config)
    count = workers_per_process(num_workers, place.num_processes)
    # `fail_stop` prints it; jax sets it only where the start succeeds.
    internals.global_state.process_id = place.process_id
    heartbeats = MONTH_SECONDS if os.environ.get("JAX_PLATFORMS") == "cpu" else 100
    with rendezvous(place, run_dir, config.start_seconds) as listen_at:
        distributed.initialize(
            *place,
            initialization_timeout=config.start_seconds,
            heartbeat_timeout_seconds=heartbeats,
            coordinator_bind_address=listen_at,
        )
    if is_loopback(place.address.rpartition(":")[0].strip("[]")):
        _keep_gloo_on_loopback()
    provide_cpu_devices(count)


def workers_per_process(num_workers: int, num_processes: int) -> int:
    """Returns the number of workers of each process.

    Raises:
      ValueError: if they do not divide.
    """
    if num_workers % num_processes:
        raise ValueError(
            f"{num_workers} workers cannot be dealt out evenly to "
            f"{num_processes} processes; change workers.num_workers"
        )
    return num_workers // num_processes


def provide_cpu_devices(count: int) -> None:
    """Makes the CPU appear as `count` devices; other platforms ignore it.

    XLA runs the devices of a CPU mesh on one pool of threads, where a collective holds
    its thread until every device has arrived: with too few threads they deadlock. A
    single device needs a thread to exchange while another computes.
    """
    needed = 2 if count == 1 else 8 * count
    given = int(os.environ.get("NPROC", os.cpu_count() or 1))
    os.environ["NPROC"] = str(max(given, needed))
    jax.config.update("jax_num_cpu_devices", count)


def leave() -> None:
    """Ends the job for all of its processes; a collective, and the last."""
    # Process 0 scores and draws the results afterwards, for longer than the others may
    # wait for it: jax's own barrier at exit fails after five minutes.
    if jax.process_count() > 1:
        distributed.shutdown()


@contextlib.contextmanager
def fail_stop() -> Iterator[None]:
    """Ends a process that fails at once, so that its peers notice and end too.

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
                # others; this leaves them time to print their own errors first.
                time.sleep(1)
        finally:
            # No atexit handlers, where jax waits for the others, and no join of threads
            # that hang in a collective; the kernel closes the sockets at once.
            os._exit(failure(error))


def meet(config: Config) -> list[str]:
    """Compares config, topology and versions of all processes.

    Returns:
      The host names of the processes, in the order of their numbers.

    Raises:
      ValueError: if they differ, on all processes.
    """
    fields = json.loads(to_json(config))
    del fields["distributed"]["process_id"]  # The only field in which they may differ.
    topology = config.topology.build(config.workers)
    facts = {
        "config": fields,
        "topology": hashlib.sha256(repr(topology).encode()).hexdigest()[:12],
        "versions": {
            "python": platform.python_version(),
            "decentjax": decentjax.__version__,
            **{package: version(package) for package in PACKAGES},
        },
    }
    gathered = gather({"host": socket.gethostname(), "facts": facts})
    phrases = [
        f"process {number} against process 0: {phrase}"
        for number, one in enumerate(gathered)
        for phrase in differences(gathered[0]["facts"], one["facts"])
    ]
    if phrases:
        raise ValueError("the processes differ: " + "; ".join(phrases))
    return [one["host"] for one in gathered]


def job_mesh(config: Config, hosts: list[str]) -> Mesh:
    """A mesh of all devices, in which the workers of a node are consecutive.

    Args:
      config: config of the run.
      hosts: host name of each process, as `meet` returns them.

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
    # A node's processes need not have consecutive numbers, as with srun's cyclic
    # distribution: hosts A, B, A, B give the order of processes 0, 2, 1, 3.
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
    """Means of metrics over the processes, collected by process 0 without waiting.

    A context that ends the thread, which sends the values.
    """

    # The values go through the coordinator's key-value store: a collective here could
    # interleave with an exchange of another thread and deadlock. The thread is there as
    # the coordinator never answers where process 0 hangs.

    def __init__(self, timeout_seconds: float):
        self._own: collections.deque[tuple[int, dict[str, float]]] = collections.deque()
        self._timeout_seconds = timeout_seconds
        self._engine = Engine()

    def __enter__(self) -> "MetricMeans":
        return self

    def __exit__(self, *error: Any) -> None:
        self._engine.__exit__(*error)

    def put(self, step: int, values: dict[str, float]) -> None:
        """Sends the values of this process; `step` must rise from call to call."""
        if jax.process_index() == 0:
            self._own.append((step, values))
            return
        key = f"metrics/{step}/{jax.process_index()}"
        self._engine.submit(_client().key_value_set, key, json.dumps(values))

    def flush(self) -> None:
        """Waits until process 0 has all values of this process.

        Raises:
          ValueError: if it does not answer.
        """
        try:
            # Queued last: its result is set once all values are sent.
            self._engine.submit(int).result(self._timeout_seconds)
        except TimeoutError as error:
            raise ValueError(
                f"lost a peer: process 0 has not answered for {self._timeout_seconds} s"
            ) from error

    def rows(self) -> Iterator[tuple[int, dict[str, float]]]:
        """Yields step and means of the steps that all processes have sent, in order.

        Only process 0 has any.
        """
        while self._own:
            step, values = self._own[0]
            folder, num_others = f"metrics/{step}/", jax.process_count() - 1
            others = _client().key_value_dir_get(folder) if num_others else []
            if len(others) < num_others:
                return
            self._own.popleft()
            if num_others:  # The coordinator keeps them in memory until it ends.
                _client().key_value_delete(folder)
            rows = [values, *(json.loads(text) for _, text in others)]
            yield step, {k: float(np.mean([row[k] for row in rows])) for k in values}


def gather(value: Any) -> list[Any]:
    """Returns the JSON values of all processes, on each. A collective."""
    if jax.process_count() == 1:
        return [value]
    # Collectives need equal shapes: sizes first, then texts padded to the largest.
    text = np.frombuffer(json.dumps(value).encode(), np.uint8)
    sizes = multihost_utils.process_allgather(np.array([text.size]))[:, 0]
    padded = np.zeros(max(sizes), np.uint8)
    padded[: text.size] = text
    rows = multihost_utils.process_allgather(padded)
    pairs = zip(rows, sizes, strict=True)
    return [json.loads(bytes(row[:size]).decode()) for row, size in pairs]


def _keep_gloo_on_loopback() -> None:
    """Has CPU collectives listen on loopback; before the first device is used.

    Else gloo listens at the address of the host's name, whatever the coordinator's is.
    """

    settings: Any = jax.config
    jaxlib: Any = importlib.import_module("jaxlib._jax")  # It has no types.
    if settings.jax_cpu_collectives_implementation != "gloo":
        return

    def make_client() -> Any:
        gloo = jaxlib.make_gloo_tcp_collectives(
            distributed_client=_client(), hostname="127.0.0.1"
        )
        return xla_bridge.make_cpu_client(gloo)

    # As jax registers its own, in 0.10.2 and 0.12.0: it has no option for the address.
    register_backend_factory("cpu", make_client, priority=0, fail_quietly=False)


def _client() -> Any:
    return internals.global_state.client


def lost_peer(error: BaseException) -> str | None:
    """A sentence for an error that a lost peer has caused; None for any other."""
    # They have no class of their own: jax raises some as a ValueError.
    if not isinstance(error, jax.errors.JaxRuntimeError | ValueError):
        return None
    lost = re.search(r"([Gg]loo|[Cc]oordination service).*", str(error))
    if lost is None:
        return None
    # Not the place in Gloo's source.
    reason = re.sub(r"\[external/\S+\] ", "", lost[0])
    where = [f"{note}, " for note in getattr(error, "__notes__", [])]
    return "".join(["lost a peer: ", *where, reason])


def _explain(error: BaseException) -> str:
    """A sentence for an expected error, else a traceback."""
    lost = lost_peer(error)
    if lost is not None:
        return lost
    if isinstance(error, SystemExit):
        return str(error)
    trace = "failed:\n" + "".join(traceback.format_exception(error)).rstrip()
    return sentence(error) or trace


def _place(config: DistributedConfig) -> Place:
    """The place of this process as given, else as jax finds it."""
    given: Any = (config.coordinator, config.num_processes, config.process_id)
    if config.coordinator is not None:
        if None in given:
            raise ValueError(
                "with distributed.coordinator give distributed.num_processes and "
                "distributed.process_id too; under Slurm and Open MPI leave out all"
            )
        if config.process_id == 0:
            _check_name(config.coordinator)
        return Place(*given)
    # jax detects them too, but only while it joins, which is too late for `rendezvous`.
    return detect(os.environ.get("JAX_COORDINATOR_ADDRESS"), config)


def detect(address: str | None, config: DistributedConfig) -> Place:
    """Returns the place of this process, with what is not given from its environment.

    Raises:
      ValueError: if neither Slurm nor Open MPI says it.
    """
    given = address, config.num_processes, config.process_id
    # Private, with one signature in jax 0.10.2 and 0.12.0. jax detects the devices.
    find: Any = ClusterEnv.auto_detect_unset_distributed_params
    try:
        *found, _ = find(*given, [], None, config.start_seconds)
        if None in found:
            raise ValueError("neither Slurm nor Open MPI has started this process.")
    except (ValueError, TypeError, KeyError, RuntimeError) as error:
        raise ValueError(
            f"cannot find the other processes: {error} Start the run with "
            "`python -m train.launch`, with srun or mpirun, or give "
            "distributed.coordinator, num_processes and process_id"
        ) from error
    return Place(*found)


def _check_name(address: str) -> None:
    """Raises for a name that is a loopback address here: no other could reach it."""
    host = address.rpartition(":")[0]
    with contextlib.suppress(OSError):  # An unknown name raises where it is used.
        own = socket.gethostbyname(host)
        if own.startswith("127.") and host not in ("localhost", own):
            raise ValueError(
                f"distributed.coordinator {address} is unavailable: {host} is {own} on "
                "this machine itself; give this machine's address in the network"
            )
