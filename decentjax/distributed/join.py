"""Joins a process to its job: rendezvous, then jax's coordinator and gloo."""

import contextlib
import importlib
import os
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import jax
from jax import distributed
from jax._src import distributed as internals  # The key-value store has no public name.
from jax._src import xla_bridge
from jax.extend.backend import register_backend_factory

from decentjax.address import is_loopback, split_address, to_address
from decentjax.distributed.devices import own_gpus, provide_cpu_devices
from decentjax.distributed.place import Place
from decentjax.distributed.rendezvous import rendezvous

MONTH_SECONDS = 30 * 24 * 3600


def join(
    place: Place,
    num_devices: int,
    timeout_seconds: int,
    start_seconds: int,
    run_dir: Path | None = None,
    taking_over: AbstractContextManager[Any] | None = None,
) -> None:
    """Joins the processes of the job; call it before any device is used.

    jax's coordinator ends a job whose processes send no heartbeat, measured by the wall
    clock: with jax 0.10.2 and 0.12.0, a clock set ahead by more than the limit, 100 s,
    ends the job within 2 s, and a clock set back does so at any limit. With CPUs only
    (JAX_PLATFORMS=cpu) the limit is a month, as collectives without a peer have their
    own timeout. On GPU it stays at 100 s: nothing else that we know of detects a
    machine that vanishes with its connections open.

    Args:
      place: place of this process.
      num_devices: number of devices of this process.
      timeout_seconds: timeout of a collective on CPU that waits for a peer.
      start_seconds: timeout for all processes to join.
      run_dir: folder that all processes must share; None to skip the check.
      taking_over: context that is entered once all have met, in which jax joins and
        sets its own handler of SIGTERM.

    Raises:
      ValueError: if another job uses the address, or processes are missing or do not
        share the folder.
    """
    # By default a hanging process blocks all others for half an hour.
    flag = f"--xla_cpu_collective_timeout_seconds={timeout_seconds}"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()
    # `end_process` prints it; jax sets it only if the start succeeds.
    internals.global_state.process_id = place.process_id
    heartbeats = MONTH_SECONDS if os.environ.get("JAX_PLATFORMS") == "cpu" else 100
    meeting = rendezvous(place, run_dir, start_seconds)
    with meeting as listen_at, taking_over or contextlib.nullcontext():
        host, port = split_address(place.address)
        distributed.initialize(
            to_address(host, port),  # jax aborts on an IPv6 host without brackets.
            place.num_processes,
            place.process_id,
            local_device_ids=own_gpus(place.local_id, num_devices),
            initialization_timeout=start_seconds,
            heartbeat_timeout_seconds=heartbeats,
            coordinator_bind_address=listen_at,
        )
    if is_loopback(host):
        _keep_gloo_on_loopback()
    provide_cpu_devices(num_devices)
    # Starts jax's backends, so it comes after all of their settings.
    if jax.default_backend() == "cpu":
        # For the collectives of all programs, see `is_between_cpus`.
        jax.config.update("jax_enable_compilation_cache", False)


def client() -> Any:
    """The client of the coordinator's key-value store."""
    return internals.global_state.client


def share(name: str, value: str, seconds: int) -> list[str]:
    """Exchanges values of all processes through the coordinator; uses no device."""
    number = internals.global_state.process_id
    client().key_value_set(f"decentjax/{name}/{number}", value)
    client().wait_at_barrier(f"decentjax/{name}", seconds * 1000)
    found = client().key_value_dir_get(f"decentjax/{name}/")
    values = {int(key.rpartition("/")[2]): text for key, text in found}
    return [values[i] for i in range(len(values))]


def _keep_gloo_on_loopback() -> None:
    """Makes CPU collectives listen on loopback; call it before a device is used.

    By default gloo listens at the address of the host's name, whatever the
    coordinator's is.
    """

    settings: Any = jax.config
    jaxlib: Any = importlib.import_module("jaxlib._jax")  # It has no types.
    if settings.jax_cpu_collectives_implementation != "gloo":
        return

    def make_client() -> Any:
        gloo = jaxlib.make_gloo_tcp_collectives(
            distributed_client=client(), hostname="127.0.0.1"
        )
        return xla_bridge.make_cpu_client(gloo)

    # As jax registers its own in 0.10.2 and 0.12.0, which has no option for the
    # address.
    register_backend_factory("cpu", make_client, priority=0, fail_quietly=False)
