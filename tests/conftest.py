"""Eight simulated devices, one cache of compiled programs, and strictness."""

import ctypes
import gc
import itertools
import os
import random
import signal

from tests import programs

# XLA runs the devices of a CPU mesh on one pool of threads, and a collective holds its
# thread until all devices have come: with too few threads they wait for ever.
os.environ.setdefault("NPROC", "64")
# On a busy machine a device may come late; by default XLA aborts after 40 s.
os.environ.setdefault(
    "XLA_FLAGS", "--xla_cpu_collective_call_terminate_timeout_seconds=600"
)

# Here and in the processes that tests start, a GPU or not.
os.environ["JAX_PLATFORMS"] = "cpu"
# Much of the time of the tests would go into compiling the same again, here, in the
# processes that they start and in the next run.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:  # An xdist worker has its parent's.
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(programs.kept())
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
# Programs of a few steps take longer to compile than to run; at night XLA does all.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")

import jax
import pytest

# A shell ignores SIGINT in what it runs in the background, and nohup SIGHUP; a process
# inherits that, and then no test could interrupt what it starts. What is handled here,
# even by nothing, has its default again in what is executed.
for number in (signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, lambda *_: None)

LIBC = ctypes.CDLL(None)

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture(scope="module", autouse=True)
def _forget_programs():
    """Those of a file stay in memory no longer than it: a process has thousands."""
    yield
    jax.clear_caches()
    gc.collect()
    # What compiling has freed: glibc keeps it, apart for each thread.
    if hasattr(LIBC, "malloc_trim"):
        LIBC.malloc_trim(0)


@pytest.fixture
def two_networks(monkeypatch):
    """Devices of two nodes of four, numbered as processes that srun deals out in turn.

    Real devices with the attribute by which jax knows that GPUs are of several nodes.
    """
    networks = property(lambda device: device.id % 2)
    kind = type(jax.devices()[0])
    monkeypatch.setattr(kind, "slice_index", networks, raising=False)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Draws cases of tests with `draw`, the others are nightly; those are slow too."""
    drawn = [item for item in items if item.get_closest_marker("draw")]
    for function, cases in itertools.groupby(drawn, lambda item: item.function):
        cases = list(cases)
        (one_in,) = cases[0].get_closest_marker("draw").args
        # The name is the seed: all workers of xdist must collect the same tests.
        draw = random.Random(function.__name__)
        for case in draw.sample(cases, len(cases) - -(-len(cases) // one_in)):
            case.add_marker(pytest.mark.nightly)
    for item in items:
        if item.get_closest_marker("nightly"):
            item.add_marker(pytest.mark.slow)
