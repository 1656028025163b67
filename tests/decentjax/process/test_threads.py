"""The cores of a process, and what XLA reads as jax starts."""

import os
import subprocess
import sys

import pytest

from decentjax.process import threads
from decentjax.process.threads import (
    allowed_cores,
    check_threads,
    given_threads,
    provide_threads,
)
from tests.checkout import ENV, ROOT
from train.job.cores import core_share

MACHINE = len(os.sched_getaffinity(0))


def test_the_cores_are_those_of_the_affinity():
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert allowed_cores() == 1
    finally:
        os.sched_setaffinity(0, before)
    assert allowed_cores() <= len(before)


@pytest.mark.skipif(os.geteuid() != 0, reason="control groups need root")
def test_a_share_of_a_core_counts_as_one():
    with core_share(0.5):
        assert allowed_cores() == 1


V1, V2 = (
    "cgroup {}/cpu,cpuacct cgroup rw,cpu,cpuacct",
    "cgroup2 {} cgroup2 rw,nsdelegate",
)


@pytest.mark.parametrize(
    ("mount", "own", "files", "cores"),
    [
        (V2, "0::/", {"cpu.max": "250000 100000"}, 3),
        (V2, "0::/", {"cpu.max": "max 100000"}, 64),
        (V2, "0::/a/b", {"a/b/cpu.max": "max 1000", "a/cpu.max": "2000 1000"}, 2),
        (V2, "0::/a", {"a/cpu.max": "900000 1000", "b/cpu.max": "1 1"}, 64),
        (V2, "0::/host/path", {"cpu.max": "20000 100000"}, 1),  # Of a container.
        (V2, "0::/", {"cpu.max": "garbage"}, 64),
        (V2, "0::/", {}, 64),
        (
            V1,
            "4:cpu,cpuacct:/docker/ab\n3:memory:/m",
            {
                "cpu,cpuacct/cpu.cfs_quota_us": "150000",
                "cpu,cpuacct/cpu.cfs_period_us": "100000",
                "cpu,cpuacct/m/cpu.cfs_quota_us": "1",  # Not of its group.
                "cpu,cpuacct/m/cpu.cfs_period_us": "1",
            },
            2,
        ),
        (
            V1,
            "4:cpu:/",
            {
                "cpu,cpuacct/cpu.cfs_quota_us": "-1",
                "cpu,cpuacct/cpu.cfs_period_us": "100000",
            },
            64,
        ),
    ],
)
def test_a_quota_of_a_container_limits_the_cores(
    mount, own, files, cores, tmp_path, monkeypatch
):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(64))
    monkeypatch.setattr(threads, "PROC", tmp_path / "proc")
    files = {f"groups/{name}": text for name, text in files.items()} | {
        "proc/mounts": f"tmpfs / tmpfs rw 0 0\n{mount.format(tmp_path / 'groups')} 0 0",
        "proc/self/cgroup": own,
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    assert allowed_cores() == cores


def test_without_proc_the_cores_are_known(tmp_path, monkeypatch):
    monkeypatch.setattr(threads, "PROC", tmp_path)
    assert allowed_cores() == MACHINE


@pytest.mark.parametrize("text", ["auto", "0", "-1", "2.5", " 4", "٤", "1e3", "5000"])
def test_a_number_of_threads_that_is_none_gets_an_error(text):
    with pytest.raises(
        ValueError, match=f"NPROC must be .* from 1 to 1024, got '{text}'"
    ):
        given_threads({"NPROC": text})


def test_xla_reads_the_first_variable_that_is_set():
    assert given_threads({"NPROC": ""}) == ("NPROC", None)
    assert given_threads({"NPROC": "7", "PJRT_NPROC": ""}) == ("NPROC", 7)
    assert given_threads({"NPROC": "7", "PJRT_NPROC": "2"}) == ("PJRT_NPROC", 2)


@pytest.mark.parametrize(
    ("count", "given", "wanted"), [(1, "1", "2"), (1, "5", "5"), (4, "8", "32")]
)
def test_devices_have_threads_and_time_to_wait_in(count, given, wanted, monkeypatch):
    own = "--xla_cpu_collective_call_terminate_timeout_seconds=9"
    monkeypatch.setenv("NPROC", given)
    monkeypatch.setenv("XLA_FLAGS", own)
    provide_threads(count)
    assert os.environ["NPROC"] == wanted
    flags = os.environ["XLA_FLAGS"].split()
    assert flags[-1] == own  # The last counts.
    assert len(flags) == 1 + (count > 1)
    provide_threads(count)
    assert os.environ["XLA_FLAGS"].split() == flags


def test_too_few_threads_are_said(monkeypatch):
    monkeypatch.setenv("NPROC", "15")
    check_threads(1)
    with pytest.warns(RuntimeWarning, match=r"need 16 threads, .* with 15.* NPROC=16"):
        check_threads(2)
    monkeypatch.setenv("NPROC", "16")
    check_threads(2)


SCRIPT = """
import os, sys, time
import jax, jax.numpy as jnp
{before}
from decentjax import over_workers, worker_mesh
{after}

def wait(x):
    time.sleep(float(os.environ.get("LATE", 0)))
    return x

def mean(x):
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    is_late = jax.lax.axis_index("workers") == 3
    late = lambda x: jax.pure_callback(wait, shape, x)
    x = jax.lax.cond(is_late, late, lambda x: x, x)
    return jax.lax.pmean(x, "workers")

print(jax.jit(over_workers(mean, {mesh}))(jnp.arange(4.0)))
print(os.environ.get("NPROC"))
"""
SPLIT, USES = 'jax.config.update("jax_num_cpu_devices", 4)', "jnp.ones(3) + 1"
OURS, OWN = "worker_mesh(4)", 'jax.make_mesh((4,), ("workers",))'


def run(before="", after="", mesh=OURS, **env):
    code = SCRIPT.format(before=before, after=after, mesh=mesh)
    return subprocess.run(
        [
            "taskset",
            "-c",
            str(min(os.sched_getaffinity(0))),
            sys.executable,
            "-c",
            code,
        ],
        env=ENV | {"PYTHONPATH": str(ROOT)} | env,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


FORCED = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}


@pytest.mark.slow
@pytest.mark.draw(2)
@pytest.mark.parametrize(
    ("how", "threads"),
    [
        ({"before": SPLIT, "after": USES}, "32"),
        ({"after": SPLIT}, "32"),
        ({"after": USES, "JAX_NUM_CPU_DEVICES": "4"}, "32"),
        ({"after": USES, "mesh": OWN, **FORCED}, "32"),
        ({"before": f"{SPLIT}; {USES}"}, None),
        ({"after": f"{SPLIT}; {USES}", "mesh": OWN}, None),
    ],
)
def test_a_mesh_of_one_process_has_threads_or_a_warning(how, threads):
    done = run(**how)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["[1.5", "1.5", "1.5", "1.5]", str(threads)]
    said = "4 CPU devices in one process need 32 threads, and jax has started with 1"
    assert done.stderr.count(said) == (threads is None), done.stderr


@pytest.mark.nightly
def test_a_device_that_is_late_on_a_busy_machine_ends_nothing():
    """By default XLA aborts after 40 s."""
    done = run(before=SPLIT, LATE="60")
    assert done.returncode == 0, done.stderr
    assert "1.5 1.5 1.5 1.5" in done.stdout
