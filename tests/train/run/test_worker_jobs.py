"""Workers of several processes in one job: FSDP over processes, exchanges between."""

import dataclasses
import functools
import re
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

from tests import worker_jobs
from tests.changes import changed
from tests.jobs import ended, launch, relaunch
from tests.run_folders import column
from tests.trees import assert_close
from train.cli.sections import kind_of
from train.config import TopologyConfig, WorkersConfig
from train.job.distributed import devices_per_process, job_mesh
from train.run.loop import train
from train.run.resume import Resume
from train.run.run_place import build_place
from train.store.log import read_metrics

CONFIG = worker_jobs.config
DILOCO = {"every_steps": 4, "outer": "nesterov", "learning_rate": 0.5, "momentum": 0.5}
METHODS = {
    "ring": ("ring", "awc", {}),
    "rounds": ("complete", "rounds", DILOCO),
    "late": ("complete", "rounds", DILOCO | {"delay": 2}),
}


def options_of(form):
    names = "num-workers", "processes-per-worker", "devices-per-worker"
    pairs = zip(names, form, strict=True)
    return [x for name, n in pairs for x in (f"--workers.{name}", str(n))]


@pytest.fixture(scope="module")
def simulated(tmp_path_factory):
    """The config and the folder of a run of N simulated workers."""
    folder = tmp_path_factory.mktemp("simulated")

    @functools.cache
    def run(name: str, num_workers: int):
        graph, method, fields = METHODS[name]
        config = changed(
            CONFIG,
            topology=TopologyConfig(name=graph),
            workers=WorkersConfig(num_workers=num_workers),
            method=kind_of("method", method)(**fields),
        )
        train(config, folder / f"{name}-{num_workers}")
        return config, folder / f"{name}-{num_workers}"

    return run


def check_same(found: Path, wanted: Path, num_examples: int) -> None:
    """The metrics of all steps and the scores of all workers, but for rounding."""
    np.testing.assert_allclose(column(found), column(wanted), rtol=2e-6)
    rows, others = (
        {x["step"]: x for x in read_metrics(folder) if "mean_model" in x}
        for folder in (found, wanted)
    )
    assert rows.keys() == others.keys()
    for step, row in rows.items():
        scores = zip(row["workers"], others[step]["workers"], strict=True)
        for one, other in ((row["mean_model"], others[step]["mean_model"]), *scores):
            assert one == pytest.approx(other, rel=1e-5)
    distances = (
        [
            x["consensus_distance"]
            for x in read_metrics(one)
            if "consensus_distance" in x
        ]
        for one in (found, wanted)
    )
    np.testing.assert_allclose(*distances, rtol=1e-4, atol=1e-7)
    # Of a step: both processes of a worker read its batch, which counts once.
    names = "examples_per_second", "steps_per_second"
    for folder in (found, wanted):
        examples, steps = (np.array(column(folder, name)) for name in names)
        np.testing.assert_allclose(examples / steps, num_examples, rtol=1e-3)


@pytest.mark.slow
@pytest.mark.draw(4)
@pytest.mark.parametrize("form", [(4, 2, 2), (2, 2, 4)])
@pytest.mark.parametrize(
    ("name", "exchange"),
    [
        ("ring", "in_step"),
        ("ring", "background"),
        ("rounds", "in_step"),
        ("late", "background"),
    ],
)
def test_workers_of_two_processes_train_as_simulated_ones(
    name, exchange, form, simulated, tmp_path
):
    config, wanted = simulated(name, form[0])
    graph, method, fields = METHODS[name]
    options = ["--exchange", exchange, "--topology.name", graph, "--method", method]
    for field, value in fields.items():
        options += [f"--method.{field.replace('_', '-')}", str(value)]
    folder, count = tmp_path / "run", form[0] * form[1]
    options += options_of(form)
    with launch(count, folder, *options, config=worker_jobs.__file__) as job:
        assert f"{count} processes" in ended(job)
    check_same(folder, wanted, num_examples=4 * form[0])
    # What the processes of a worker have saved together goes on in one process.
    one, other = (train(config, where, Resume()) for where in (folder, wanted))
    assert_close(one.state, other.state, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_a_run_continues_with_more_processes_for_each_worker(simulated, tmp_path):
    _, wanted = simulated("ring", 2)
    folder = tmp_path / "run"
    shutil.copytree(wanted, folder)
    form = (*options_of((2, 2, 2)), "--exchange", "in_step")
    trust = "--trust", "tests.worker_jobs"
    with relaunch(4, folder, "--step", "6", *form, *trust) as job:
        assert "2 nodes, 4 processes" in ended(job)
    check_same(folder, wanted, num_examples=8)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"processes_per_worker": 0}, "processes_per_worker must be at least 1, got 0"),
        (
            {"processes_per_worker": 2, "devices_per_worker": 3},
            "processes_per_worker = 2, and must be a multiple of it, got 3",
        ),
    ],
)
def test_processes_that_cannot_share_devices_get_a_sentence(fields, sentence):
    with pytest.raises(ValueError, match=sentence):
        WorkersConfig(**fields)


def test_processes_are_counted_for_each_worker(monkeypatch):
    workers = WorkersConfig(num_workers=2, devices_per_worker=4, processes_per_worker=2)
    assert devices_per_process(workers, 4) == 2
    assert (
        devices_per_process(WorkersConfig(num_workers=4, devices_per_worker=2), 2) == 4
    )
    with pytest.raises(ValueError, match=r"processes_per_worker = 2 are 4 processes"):
        devices_per_process(workers, 2)
    monkeypatch.setenv("DECENTJAX_PROCESSES_PER_WORKER", "4")
    for given in (workers, WorkersConfig(num_workers=4)):
        with pytest.raises(ValueError, match="DECENTJAX_PROCESSES_PER_WORKER is 4"):
            devices_per_process(given, 4)
    workers = changed(workers, where="mesh")
    with pytest.raises(ValueError, match="is for a job of several processes: start"):
        build_place(changed(CONFIG, workers=workers)).mesh  # noqa: B018


@dataclasses.dataclass(frozen=True)
class Device:
    """What a mesh sees of the devices of several processes."""

    id: int
    process_index: int
    platform: str = "cpu"


@pytest.mark.parametrize(
    ("hosts", "owners", "found"),
    [
        ("AABB", [0, 0, 1, 1, 2, 2, 3, 3], None),
        ("AAAA", [0, 1, 2, 3, 0, 1, 2, 3], None),
        ("ABAB", [0, 0, 1, 1, 2, 2, 3, 3], [0, 2]),  # As srun's cyclic distribution.
        ("AABB", [0, 1, 1, 1, 2, 2, 3, 3], None),
        ("AABB", [0, 0, 0, 0, 1, 1, 2, 3], [0]),
    ],
)
def test_each_worker_has_the_devices_of_its_processes(
    hosts, owners, found, monkeypatch
):
    devices = [Device(i, process) for i, process in enumerate(owners)]
    monkeypatch.setattr(jax, "devices", lambda: devices)
    monkeypatch.setattr(jax, "device_count", lambda: len(devices))
    workers = WorkersConfig(num_workers=2, devices_per_worker=4, processes_per_worker=2)
    if found is None:
        rows = job_mesh(workers, list(hosts)).devices
        assert [{d.process_index // 2 for d in row} for row in rows] == [{0}, {1}]
    else:
        with pytest.raises(ValueError, match=re.escape(f"span the processes {found}")):
            job_mesh(workers, list(hosts))
