"""The place of a process in its job, as given by the launcher."""

import os
from pathlib import Path
from typing import Any, NamedTuple

from decentjax.process.address import to_address


class JobPlace(NamedTuple):
    """The place of a process in its job.

    Args:
      address: address of process 0, HOST:PORT; empty for a process that is not part of
        a job.
      num_processes: number of processes of the job.
      process_id: index of this process.
      local_id: its index on its machine, or None if unknown.
    """

    address: str
    num_processes: int
    process_id: int
    local_id: int | None = None


class WorkerPlace(NamedTuple):
    """The place of a process in its worker, which is a job of its own.

    Args:
      worker: number of the worker.
      num_workers: number of workers of the run.
      job: its place in the job of the worker, whose address is empty for a worker of
        one process.
    """

    worker: int
    num_workers: int
    job: JobPlace


class Variables(NamedTuple):
    """The environment variables in which a launcher gives the place of a process.

    Args:
      num_processes: name of the variable of `JobPlace.num_processes`.
      process_id: that of `JobPlace.process_id`.
      local_id: that of `JobPlace.local_id`.
      address: those of the parts of `JobPlace.address`.
    """

    num_processes: str
    process_id: str
    local_id: str
    address: tuple[str, ...]


OURS = Variables(
    "DECENTJAX_NUM_PROCESSES",
    "DECENTJAX_PROCESS_ID",
    "DECENTJAX_LOCAL_ID",
    ("DECENTJAX_COORDINATOR",),
)
# The address of processes that the launcher starts as peers, and not as a job.
PEERS = "peers"
# Of workers that are jobs: the number of processes of each, and the address at which
# they meet, HOST:PORT. Process g of the run is process g mod P of worker g // P.
PER_WORKER = "DECENTJAX_PROCESSES_PER_WORKER"
WORKER_ADDRESS = "DECENTJAX_WORKER_COORDINATOR"
# Names a file that tells the launcher that a script has read its place.
ASKED = "DECENTJAX_ASKED"
TORCHRUN = Variables("WORLD_SIZE", "RANK", "LOCAL_RANK", ("MASTER_ADDR", "MASTER_PORT"))
# Open MPI 5 no longer gives an address; jax finds that of Open MPI 4.
OPEN_MPI = Variables(
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    ("MASTER_ADDR", "MASTER_PORT"),
)


def variables_of(place: JobPlace) -> dict[str, str]:
    """Returns the variables in which `decentjax launch` gives a place."""
    return {
        OURS.num_processes: str(place.num_processes),
        OURS.process_id: str(place.process_id),
        OURS.local_id: str(place.local_id),
        OURS.address[0]: place.address,
    }


def worker_variables(per_worker: int, port: int) -> dict[str, str]:
    """Returns the variables in which a launcher gives a worker of several processes.

    Args:
      per_worker: number of its processes, all on this machine.
      port: where they meet; the same for each of them, and new at each start.
    """
    if per_worker == 1:
        return {}
    return {PER_WORKER: str(per_worker), WORKER_ADDRESS: f"127.0.0.1:{port}"}


def find_worker(place: JobPlace, per_worker: int | None = None) -> WorkerPlace:
    """Returns the place of a process in its worker.

    Args:
      place: its place in the run.
      per_worker: P, number of processes of each worker; None for the environment's,
        1 without any.

    Raises:
      ValueError: if the number of processes is no multiple of P, the launcher has
        another P, or the address at which the processes of the worker meet is missing.
    """
    count = check_per_worker(per_worker)
    if place.num_processes % count:
        raise ValueError(
            f"{place.num_processes} processes are no whole number of workers of "
            f"{count}: start a multiple of {count} processes"
        )
    address = os.environ.get(WORKER_ADDRESS, "") if count > 1 else ""
    if count > 1 and not address:
        raise ValueError(
            f"a worker of {count} processes meets at an address, HOST:PORT: set "
            f"{WORKER_ADDRESS}, the same for its processes, or start them with "
            f"`decentjax launch --processes-per-worker {count}`"
        )
    worker, number = divmod(place.process_id, count)
    job = JobPlace(address, count, number, place.local_id)
    return WorkerPlace(worker, place.num_processes // count, job)


def check_per_worker(per_worker: int | None = None) -> int:
    """Returns the number of processes of each worker.

    Args:
      per_worker: the number that is asked for; None for the environment's, 1 without
        any.

    Raises:
      ValueError: if the launcher has another.
    """
    given = _number(PER_WORKER, 1) if PER_WORKER in os.environ else None
    count = per_worker or given or 1
    if given is not None and given != count:
        raise ValueError(
            f"workers of {count} processes were asked for, but {PER_WORKER} is "
            f"{given}: start them with --processes-per-worker {count}"
        )
    return count


def find_place(seconds: int) -> JobPlace:
    """Returns the place of this process; without a job, in a job of one process.

    `decentjax launch` and torchrun may run inside a job of Slurm or Open MPI, and then
    their variables take precedence. Manually set variables of torchrun, such as for
    PyTorch in the same job, must agree with those of the job.

    Args:
      seconds: timeout for an answer of the cluster, if jax queries it.

    Raises:
      ValueError: if variables are missing, impossible, or contradict each other.
    """
    if OURS.process_id in os.environ:
        if asked := os.environ.get(ASKED):
            Path(asked).touch()
        return _read(OURS)
    found = _found_by_jax(seconds)
    if TORCHRUN.process_id not in os.environ:
        if found is None and OPEN_MPI.process_id in os.environ:
            return _read(OPEN_MPI)
        return found or JobPlace("", 1, 0, 0)
    own = _read(TORCHRUN)
    if found is None or "TORCHELASTIC_RUN_ID" in os.environ:
        return own
    if found[1:3] != own[1:3]:
        raise ValueError(
            f"{TORCHRUN.process_id} and {TORCHRUN.num_processes} say process "
            f"{own.process_id} of {own.num_processes}, but Slurm or Open MPI say "
            f"process {found.process_id} of {found.num_processes}: unset the former, "
            "or make them agree"
        )
    return found  # PyTorch itself may listen at the other address.


def _read(names: Variables) -> JobPlace:
    """The place given by the variables of a launcher."""
    wanted = (names.num_processes, names.process_id, *names.address)
    if missing := [name for name in wanted if not os.environ.get(name)]:
        raise ValueError(
            f"{names.process_id} says that this is a process of a job: set "
            f"{' and '.join(missing)} too, or unset it"
        )
    local = _number(names.local_id, 0) if os.environ.get(names.local_id) else None
    count, own = _number(names.num_processes, 1), _number(names.process_id, 0)
    if own >= count:
        raise ValueError(
            f"{names.process_id} must be from 0 to {count - 1}, as "
            f"{names.num_processes} is {count}; got {own}"
        )
    return JobPlace(_address(names), count, own, local)


def _number(name: str, least: int) -> int:
    text = os.environ[name]
    if not text.isdecimal() or int(text) < least:
        raise ValueError(
            f"{name} must be a whole number of at least {least}, got {text!r}"
        )
    return int(text)


def _address(names: Variables) -> str:
    *host, end = (os.environ[name] for name in names.address)
    # torchrun itself listens there, and the next port is likely free.
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and names == TORCHRUN:
        end = str(_number(names.address[-1], 1) + 1)
    return to_address(host[0], end) if host else end


def _found_by_jax(seconds: int) -> JobPlace | None:
    """The place given by Slurm, Open MPI 4 or a TPU cluster, if any."""
    from jax._src.clusters import ClusterEnv

    # Private, with one signature in jax 0.10.2 and 0.12.0. jax detects them only while
    # it joins, which is too late for `rendezvous`.
    find: Any = ClusterEnv.auto_detect_unset_distributed_params
    address = os.environ.get("JAX_COORDINATOR_ADDRESS")
    try:
        *found, local = find(address, None, None, None, None, seconds)
    except (ValueError, TypeError, KeyError, RuntimeError) as error:
        raise ValueError(f"cannot find the other processes: {error}") from error
    if None in found:
        return None
    host, count, own = found
    return JobPlace(host, count, own, local[0] if local else None)
