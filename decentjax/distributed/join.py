"""Joins a process to its job: rendezvous, then jax's coordinator and gloo."""

import contextlib
import importlib
import ipaddress
import itertools
import math
import os
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import jax
from jax import distributed
from jax._src import distributed as internals  # The key-value store has no public name.
from jax._src import xla_bridge
from jax.extend.backend import register_backend_factory

from decentjax.distributed.deadline import LONG_TIMES
from decentjax.distributed.devices import own_gpus, provide_cpu_devices
from decentjax.distributed.place import JobPlace
from decentjax.distributed.rendezvous import rendezvous
from decentjax.distributed.watch import watch
from decentjax.process.address import split_address, to_address
from decentjax.process.threads import add_xla_flags, given_threads

DAY_SECONDS = 24 * 3600
# Of a barrier: the watch ends the job long before, and names who does not come.
WAIT_SECONDS = DAY_SECONDS
_numbers = itertools.count()
MONTH_SECONDS = 30 * DAY_SECONDS


def join(
    place: JobPlace,
    num_devices: int,
    step_deadline: float | None,
    start_seconds: int,
    run_dir: Path | None = None,
    taking_over: AbstractContextManager[Any] | None = None,
) -> None:
    """Joins the processes of the job; call it before any device is used.

    jax's coordinator ends a job whose processes send no heartbeat, measured by the wall
    clock: with jax 0.10.2 and 0.12.0, a clock set ahead by more than the limit, 100 s,
    ends the job within 2 s, and a clock set back does so at any limit. With CPUs only
    (JAX_PLATFORMS=cpu) the limit is a month, as the watch of the steps detects a
    process that gives no sign. On GPU it stays at 100 s.

    Args:
      place: place of this process.
      num_devices: number of devices of this process.
      step_deadline: longest time of a phase of a step, as in `limit_of`, seconds.
      start_seconds: timeout for all processes to join.
      run_dir: folder that all processes must share; None to skip the check.
      taking_over: context that is entered once all have met, in which jax joins and
        sets its own handler of SIGTERM.

    Raises:
      ValueError: if another job uses the address, or processes are missing or do not
        share the folder.
    """
    add_xla_flags(*_time_limits(step_deadline))
    # `end_process` prints it; jax sets it only if the start succeeds.
    internals.global_state.process_id = place.process_id
    given_threads()  # Raises an error before others wait for this process.
    heartbeats = MONTH_SECONDS if os.environ.get("JAX_PLATFORMS") == "cpu" else 100
    meeting = rendezvous(place, run_dir, start_seconds)
    with meeting as (bind, own_host), taking_over or contextlib.nullcontext():
        host, port = split_address(place.address)
        distributed.initialize(
            to_address(host, port),  # jax aborts on an IPv6 host without brackets.
            place.num_processes,
            place.process_id,
            local_device_ids=own_gpus(place.local_id, num_devices),
            initialization_timeout=start_seconds,
            heartbeat_timeout_seconds=heartbeats,
            coordinator_bind_address=bind,
        )
    provide_cpu_devices(num_devices)
    _listen_with_gloo(own_host)
    number, count = place.process_id, place.num_processes
    if count > 1 or step_deadline is not None:  # No process waits for one alone.
        watch(step_deadline, number, count, client(), lambda: client() is None)
    # Starts jax's backends, so it comes after all of their settings.
    if jax.default_backend() == "cpu":
        # For the collectives of all programs, see `is_between_cpus`.
        jax.config.update("jax_enable_compilation_cache", False)


def _time_limits(step_deadline: float | None) -> list[str]:
    """Options of XLA for collectives that wait for a process.

    The watch ends such a job and says why. They are for where it cannot.
    """
    limits = [f"--xla_cpu_collective_timeout_seconds={DAY_SECONDS}"]
    if step_deadline is not None and step_deadline < math.inf:
        # One that waits for a process that compiles is not late.
        seconds = math.ceil(LONG_TIMES * step_deadline)
        limits.append(f"--xla_gpu_execution_terminate_timeout={seconds}s")
    return limits


def client() -> Any:
    """The client of the coordinator's key-value store."""
    return internals.global_state.client


def share(name: str, value: str) -> list[str]:
    """Exchanges texts of all processes through the coordinator; uses no device.

    A barrier, which all processes enter in the same order; its name is in the error if
    one of them does not come.
    """
    number, count = internals.global_state.process_id, next(_numbers)
    client().key_value_set(f"decentjax/{count}/{number}", value)
    client().wait_at_barrier(f"decentjax/{count} {name}", 1000 * WAIT_SECONDS)
    found = client().key_value_dir_get(f"decentjax/{count}/")
    if number == 0 and count:  # All have read the earlier ones: they are here.
        client().key_value_delete(f"decentjax/{count - 1}/")
    values = {int(key.rpartition("/")[2]): text for key, text in found}
    return [values[i] for i in range(len(values))]


def tell(name: str, value: str) -> str:
    """Returns the text of process 0, in all processes.

    Args:
      name: a name that is used once.
      value: text of this process.
    """
    if client() is None:
        return value
    key = f"decentjax/told/{name}"
    if internals.global_state.process_id == 0:
        client().key_value_set(key, value)
    return client().blocking_key_value_get(key, 1000 * WAIT_SECONDS)


def _listen_with_gloo(host: str) -> None:
    """Makes CPU collectives listen at an address; call it before a device is used.

    By default gloo listens at the address of the host's name, which others may not
    reach, or which is not loopback where the coordinator's is.
    """
    settings: Any = jax.config
    jaxlib: Any = importlib.import_module("jaxlib._jax")  # It has no types.
    # The number of an interface, as of a link-local address, is not the other's.
    is_one = "%" not in host and not ipaddress.ip_address(host).is_unspecified
    if settings.jax_cpu_collectives_implementation != "gloo" or not is_one:
        return

    def make_client() -> Any:
        gloo = jaxlib.make_gloo_tcp_collectives(
            distributed_client=client(), hostname=host
        )
        return xla_bridge.make_cpu_client(gloo)

    # As jax registers its own in 0.10.2 and 0.12.0, which has no option for the
    # address.
    register_backend_factory("cpu", make_client, priority=0, fail_quietly=False)
