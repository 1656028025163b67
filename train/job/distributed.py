"""A run of several processes: what `decentjax.distributed` does not know of runs.

Nothing here depends on what is trained.
"""

import collections
import contextlib
import json
import math
import os
import socket
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
from jax import distributed
from jax.sharding import Mesh

from decentjax.distributed.credentials import check_credentials
from decentjax.distributed.devices import node_mesh
from decentjax.distributed.failure import end_process, lost_peer, process_name
from decentjax.distributed.join import client, join, share, tell
from decentjax.distributed.place import JobPlace, check_per_worker, find_place
from decentjax.distributed.watch import close_watch
from decentjax.gossip import Engine
from decentjax.process.address import is_loopback, split_address
from train.cli.command import code_of, failure, sentence
from train.cli.config_json import differences, to_json
from train.config import Config, DistributedConfig, WorkersConfig
from train.job.provenance import provenance_of
from train.job.signals import stop_together


def start(
    config: DistributedConfig, workers: WorkersConfig, run_dir: Path | None = None
) -> None:
    """Joins the processes of the job; before anything has used a device.

    Args:
      config: place of this process; None where its environment says it.
      workers: workers of the job.
      run_dir: folder of the run, visible to all processes.

    Raises:
      ValueError: if there is no job to join, another job uses its address, processes
        are missing or do not see the folder, or the workers do not divide among them.
    """
    place = _place(config)
    check_credentials()
    count = devices_per_process(workers, place.num_processes)
    # Alone, a process stops by itself.
    alone = place.num_processes == 1
    taking_over = contextlib.nullcontext() if alone else stop_together()
    seconds = config.deadline, config.start_seconds
    join(place, count, *seconds, run_dir, taking_over)


def workers_per_process(num_workers: int, num_processes: int) -> int:
    """Returns the number of workers of each process.

    Raises:
      ValueError: if they do not divide.
    """
    if num_workers % num_processes:
        raise ValueError(
            f"{num_workers} workers cannot be dealt out evenly to "
            f"{num_processes} processes; set --workers.num-workers to "
            f"{num_processes * max(1, num_workers // num_processes)}, or change the "
            "number of processes"
        )
    return num_workers // num_processes


def devices_per_process(workers: WorkersConfig, num_processes: int) -> int:
    """Returns the number of devices of each process of a job.

    Raises:
      ValueError: if these processes are no whole number of each worker's, or the
        launcher has started another number of them for each.
    """
    count, per_worker = workers.num_workers, workers.processes_per_worker
    check_per_worker(per_worker)
    if per_worker == 1:
        each = workers_per_process(count, num_processes)
        return each * workers.devices_per_worker
    if num_processes != count * per_worker:
        raise ValueError(
            f"{count} workers of workers.processes_per_worker = {per_worker} are "
            f"{count * per_worker} processes, got {num_processes}: start as many, or "
            "set workers.num_workers"
        )
    return workers.devices_per_worker // per_worker


def leave() -> None:
    """Ends the job for all of its processes; a collective, and the last."""
    # Process 0 scores and draws the results afterwards, for longer than the others may
    # wait for it: jax's own barrier at exit fails after five minutes.
    if jax.process_count() > 1:
        distributed.shutdown()
    close_watch()


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
        lost = lost_peer(error) is not None
        code = failure(error) if lost else code_of(error)
        end_process(_explain(error), code)


def meet(config: Config) -> list[str]:
    """Compares config, own code, topology and versions of all processes.

    Returns:
      The host names of the processes, in the order of their numbers.

    Raises:
      ValueError: if they differ, on all processes.
    """
    fields = json.loads(to_json(config))
    del fields["distributed"]["process_id"]  # The only field in which they may differ.
    own = {"config": fields, **provenance_of(config)._asdict()}
    # Each compares itself: process 0 could not send the facts of all to all.
    own = json.loads(json.dumps(own))
    first = json.loads(tell("facts", json.dumps(own)))
    found = gather("facts", [socket.gethostname(), [*differences(first, own)]])
    phrases = [
        f"{process_name(number)} against process 0: {phrase}"
        for number, (_, differs) in enumerate(found)
        for phrase in differs
    ]
    if phrases:
        raise ValueError("the processes differ: " + "; ".join(phrases))
    return [host for host, _ in found]


def job_mesh(workers: WorkersConfig, hosts: list[str]) -> Mesh:
    """A mesh of all devices, in which the workers of a node are consecutive.

    Args:
      workers: the workers of the run.
      hosts: host name of each process, as `meet` returns them.

    Raises:
      ValueError: if the workers do not fit the devices, or the nodes.
    """
    count, rest = divmod(jax.device_count(), workers.devices_per_worker)
    if rest or count != workers.num_workers:
        of = workers.devices_per_worker
        each = f" of workers.devices_per_worker = {of}" if of > 1 else ""
        raise ValueError(
            f"the {len(hosts)} processes have {jax.device_count()} devices; set "
            f"workers.num_workers to {count}{each}, got {workers.num_workers}"
        )
    mesh = node_mesh(hosts, workers.devices_per_worker)
    slices = mesh.devices.reshape(count, -1)
    _check_whole(slices, workers.processes_per_worker)
    nodes = collections.Counter(hosts[d.process_index] for d in slices[:, 0])
    for host, count in nodes.items():
        if count % workers.workers_per_node:
            raise ValueError(
                f"workers.workers_per_node = {workers.workers_per_node} does not fit "
                f"node {host}, which has {count} workers"
            )
    return mesh


def _check_whole(slices: np.ndarray, per_worker: int) -> None:
    """Raises a ValueError unless each worker has the devices of its own processes.

    Args:
      slices: devices of each worker, [N, F].
      per_worker: number of processes of each worker, numbered one after another.
    """
    for worker, devices in enumerate(slices):
        found = sorted({device.process_index for device in devices})
        first = found[0] - found[0] % per_worker
        if per_worker > 1 and found != [*range(first, first + per_worker)]:
            raise ValueError(
                f"worker {worker} of workers.processes_per_worker = {per_worker} would "
                f"span the processes {found}, by their nodes and devices: give each "
                "process as many devices, and number the processes of a worker one "
                "after another on its nodes, as srun --distribution=block does"
            )


Means = dict[str, tuple[float, int]]
"""Means over the workers of a process and their numbers of workers, by name."""


class MetricMeans:
    """Means of metrics over the processes, collected by process 0 without waiting.

    A context that ends the thread, which sends the values.
    """

    # The values go through the coordinator's key-value store: a collective here could
    # interleave with an exchange of another thread and deadlock. The thread is there as
    # the coordinator never answers where process 0 hangs.

    def __init__(self):
        self._own: collections.deque[tuple[int, Means]] = collections.deque()
        self._engine = Engine()

    def __enter__(self) -> "MetricMeans":
        return self

    def __exit__(self, *error: Any) -> None:
        self._engine.__exit__(*error)

    def put(
        self,
        step: int,
        values: Mapping[str, float],
        counts: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        """Sends the values of this process; `step` must rise from call to call.

        Args:
          step: number of steps done.
          values: values by name.
          counts: number of workers that a value is the mean of; by default one.
        """
        means = {name: (x, counts.get(name, 1)) for name, x in values.items()}
        if jax.process_index() == 0:
            self._own.append((step, means))
            return
        key = f"metrics/{step}/{jax.process_index()}"
        self._engine.submit(client().key_value_set, key, json.dumps(means))

    def flush(self) -> None:
        """Waits until process 0 has all values of this process."""
        # Queued last: its result is set once all values are sent.
        self._engine.submit(int).result()

    def rows(self) -> Iterator[tuple[int, dict[str, float]]]:
        """Yields step and means of the steps that all processes have sent, in order.

        Only process 0 has any.
        """
        while self._own:
            step, own = self._own[0]
            folder, num_others = f"metrics/{step}/", jax.process_count() - 1
            others = client().key_value_dir_get(folder) if num_others else []
            if len(others) < num_others:
                return
            self._own.popleft()
            if num_others:  # The coordinator keeps them in memory until it ends.
                client().key_value_delete(folder)
            rows = [own, *(json.loads(text) for _, text in others)]
            yield step, {name: _mean([row[name] for row in rows]) for name in own}


def _mean(means: list[tuple[float, int]]) -> float:
    """The mean of all of which there are means and counts, NaN of none."""
    some = [(mean, count) for mean, count in means if count]
    if not some:
        return math.nan
    values, counts = zip(*some, strict=True)
    return float(np.average(values, weights=counts))


def gather(name: str, value: Any) -> list[Any]:
    """Returns the JSON values of all processes, on each.

    A barrier, which all processes enter in the same order, but no collective: it uses
    no device, and meets no exchange of another thread.
    """
    if jax.process_count() == 1:
        return [value]
    return list(map(json.loads, share(name, json.dumps(value))))


def _explain(error: BaseException) -> str:
    """A sentence for an expected error, else a traceback."""
    lost = lost_peer(error)
    if lost is not None:
        return lost
    if isinstance(error, SystemExit):
        return str(error)
    trace = "failed:\n" + "".join(traceback.format_exception(error)).rstrip()
    return sentence(error) or trace


def _place(config: DistributedConfig) -> JobPlace:
    """The place of this process as given, else as its environment says it."""
    given: Any = (config.coordinator, config.num_processes, config.process_id)
    if config.coordinator is not None:
        if None in given:
            raise ValueError(
                "with distributed.coordinator give distributed.num_processes and "
                "distributed.process_id too; under Slurm and Open MPI leave out all"
            )
        if config.process_id == 0:
            _check_name(config.coordinator)
        return JobPlace(*given)
    return detect(os.environ.get("JAX_COORDINATOR_ADDRESS"), config)


def detect(address: str | None, config: DistributedConfig) -> JobPlace:
    """Returns the place of this process, with what is not given from its environment.

    Raises:
      ValueError: if it does not say it.
    """
    numbers = {"num_processes": config.num_processes, "process_id": config.process_id}
    given: Any = {"address": address, **numbers}
    given = {name: value for name, value in given.items() if value is not None}
    if len(given) == 3:
        return JobPlace(**given)
    found = find_place(config.start_seconds)
    if not found.address:
        raise ValueError(
            "cannot find the other processes: neither Slurm nor Open MPI has started "
            "this process. Start the run with `decentjax launch`, with srun or mpirun, "
            "or give distributed.coordinator, num_processes and process_id"
        )
    return found._replace(**given)


def _check_name(address: str) -> None:
    """Raises for a name that is a loopback address here: no other could reach it."""
    host, port = split_address(address)
    with contextlib.suppress(OSError):  # An unknown name raises where it is used.
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        own = [str(where[0]) for *_, where in found]
        if all(map(is_loopback, own)) and not is_loopback(host):
            raise ValueError(
                f"distributed.coordinator {address} is unavailable: {host} is {own[0]} "
                "on this machine itself; give this machine's address in the network"
            )
