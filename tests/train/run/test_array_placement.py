"""Runs whose workers have several devices: FSDP inside, exchanges between."""

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from decentjax import AXIS, worker_mesh
from tests import slices, tiny
from tests.changes import changed
from tests.jobs import ended, launch
from tests.run_folders import column
from tests.slices import config_of
from tests.trees import assert_close
from train.advise import measure as measuring
from train.cli.load import load_config
from train.cli.sections import kind_of
from train.config import StepConfig, TopologyConfig, WorkersConfig
from train.preflight.compile import prepare
from train.run.array_placement import (
    check_examples,
    on_first,
    put_batch,
    put_state,
    shards_of,
)
from train.run.loop import train
from train.run.observe import local_mean, local_rows
from train.run.resume import Resume
from train.run.run_place import build_place
from train.run.setup import set_up
from train.store.checkpoints import find_checkpoints, restore
from train.store.log import read_metrics
from train.tasks.task import longest_dim

SLICES = Path(slices.__file__)


def state_of(config, folder):
    """The state of the newest checkpoint of a run, placed as this config places it."""
    run = set_up(config, folder)
    steps = find_checkpoints(folder).steps
    return restore(steps[max(steps)], run.state())


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The folders of the same run in three forms."""
    forms = {
        "simulated": (1, "simulate"),
        "devices": (1, "mesh"),
        "slices": (2, "mesh"),
    }
    folders = {}
    for name, (devices, where) in forms.items():
        folders[name] = tmp_path_factory.mktemp(name) / "run"
        train(config_of(devices, where), folders[name])
    return folders


@pytest.mark.slow
def test_a_run_of_slices_has_the_trajectory_of_one_of_devices(runs):
    wanted = column(runs["simulated"])
    assert len(wanted) > 1
    for name in ("devices", "slices"):
        found = column(runs[name])
        np.testing.assert_allclose(found, wanted, rtol=1e-5)
    one = state_of(config_of(1), runs["devices"]).params
    other = state_of(config_of(2), runs["slices"]).params
    assert_close(one, other, atol=2e-5)
    for x, y in zip(*map(jax.tree.leaves, (one, other)), strict=True):
        if y.ndim > 2:
            assert y.addressable_shards[0].data.size * 8 == y.size
            assert x.addressable_shards[0].data.size * 4 == x.size


@pytest.mark.slow
@pytest.mark.draw(2)
@pytest.mark.parametrize(
    ("name", "before", "after"), [("slices", 2, 1), ("devices", 1, 2)]
)
def test_a_run_goes_on_with_other_devices(name, before, after, runs, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(runs[name], folder)
    old = state_of(config_of(before), folder)
    new = state_of(config_of(after), folder)
    assert_close(old.params, new.params)
    longer = config_of(after, num_steps=12)
    assert train(longer, folder, Resume()).step == 12
    assert max(row["step"] for row in read_metrics(folder)) == 12


@pytest.mark.slow
@pytest.mark.draw(3)
@pytest.mark.parametrize("algorithm", ["atc", "all_reduce", "rounds"])
def test_other_methods_train_slices_too(algorithm, tmp_path):
    method, step = kind_of("method", algorithm)(), StepConfig(batch_per_worker=4)
    ends = []
    for devices in (1, 2):
        folder = tmp_path / str(devices)
        train(config_of(devices, method=method, step=step), folder)
        ends.append(column(folder)[-1])
    np.testing.assert_allclose(*ends, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.draw(2)
@pytest.mark.parametrize(
    ("options", "said", "count", "folders"),
    [
        (["background"], "in a second thread", 8, ["."]),
        (
            ["peers", "--exchange.patience", "60"],
            "peer to peer",
            4,
            ["process-0", "process-1"],
        ),
    ],
    ids=["thread", "peers"],
)
def test_a_job_trains_slices(options, said, count, folders, runs, tmp_path):
    folder = tmp_path / "run"
    own = ("--exchange", *options)
    with launch(2, folder, *own, config=str(SLICES)) as job:
        assert said in ended(job)
    facts = json.loads((folder / folders[0] / "run.json").read_text())
    assert facts["devices"].startswith(f"{count} x ")
    wanted, *found = (
        column(one) for one in (runs["slices"], *(folder / name for name in folders))
    )
    np.testing.assert_allclose(np.mean(found, 0), wanted, rtol=1e-5)


def test_a_rule_of_ones_own_says_what_is_shared():
    mesh = worker_mesh(2, devices_per_worker=4)
    rows = {"w": np.ones((2, 8, 4)), "v": np.ones((2, 8))}

    def vectors(shape, count):
        return 0 if len(shape) == 1 else None

    specs = {
        rule: {k: x.sharding.spec for k, x in put_state(rows, mesh, rule).items()}
        for rule in (longest_dim, vectors)
    }
    assert specs[longest_dim]["w"] == PartitionSpec(AXIS, "fsdp", None)
    assert specs[longest_dim]["v"] == PartitionSpec(AXIS, None)
    assert specs[vectors]["w"] == PartitionSpec(AXIS, None, None)
    assert specs[vectors]["v"] == PartitionSpec(AXIS, "fsdp")
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        one = {k: x[0] for k, x in rows.items()}
        assert shards_of(one, longest_dim)["w"] == PartitionSpec("fsdp", None)
    assert shards_of({"w": np.ones((2, 2))}, longest_dim) is None


def test_the_devices_of_a_worker_share_its_batch():
    mesh = worker_mesh(2, devices_per_worker=2)
    batch = {"x": np.ones((2, 4, 3)), "odd": np.ones((2, 5)), "rate": np.ones(2)}
    placed = put_batch(batch, mesh)
    assert placed["x"].sharding.spec == PartitionSpec(AXIS, "fsdp", None)
    assert placed["odd"].sharding.is_equivalent_to(
        NamedSharding(mesh, PartitionSpec(AXIS)), 2
    )
    with pytest.raises(ValueError, match=r"the 5 examples of a worker's batch are no "):
        check_examples({"odd": batch["odd"]}, mesh)
    assert put_batch(batch, None) is batch


def test_rows_and_means_of_slices_count_each_worker_once():
    mesh = worker_mesh(3, devices_per_worker=2)
    rows = np.arange(24.0, dtype="float32").reshape(3, 4, 2)
    placed = put_state({"w": rows}, mesh, longest_dim)
    found = dict(local_rows(placed))
    assert list(found) == [0, 1, 2]
    for number, row in found.items():
        np.testing.assert_array_equal(row["w"], rows[number])
    whole = on_first(placed["w"])
    assert [shard.device for shard in whole] == jax.devices()[:6:2]
    numbers = put_state(jnp.array([1.0, np.nan, 3.0]), mesh, longest_dim)
    assert local_mean(numbers) == (2.0, 2)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: worker_mesh(5, devices_per_worker=2), "5 workers of 2 devices need"),
        (lambda: worker_mesh(2, devices_per_worker=0), "must be at least one, got 0"),
        (lambda: WorkersConfig(devices_per_worker=0), "at least 1, got 0"),
        (
            lambda: build_place(config_of(2, "simulate")).mesh,
            "simulated workers share",
        ),
        (lambda: longest_dim((3, 5), 2), r"no dim of an array of shape \(3, 5\)"),
        (lambda: prepare(config_of(3), "h100", 2, 8), "devices_per_worker = 3 do not"),
    ],
)
def test_devices_that_do_not_fit_get_a_sentence(make, sentence):
    with pytest.raises(ValueError, match=sentence):
        make()


def test_vectors_stay_whole():
    assert longest_dim((8,), 2) is None
    assert longest_dim((), 2) is None
    assert longest_dim((6, 8, 7), 2) == 1


@pytest.mark.slow
def test_advice_is_measured_with_slices(monkeypatch):
    build, meshes = measuring.build_lone_step, []

    def built(run, mesh):
        meshes.append(dict(mesh.shape))
        return build(run, mesh)

    monkeypatch.setattr(measuring, "build_lone_step", built)
    setting = measuring.measure(config_of(2), num_steps=2)
    assert meshes == [{AXIS: 4, "fsdp": 2}]
    params, _ = tiny.config.task.build().init(jax.random.key(0))
    size = sum(x.nbytes for x in jax.tree.leaves(params))
    assert (setting.job.model_bytes, setting.cluster.num_nodes) == (size, 4)
    assert setting.job.draw(0, 4, 0).shape == (4,)
    assert all(seconds > 0 for seconds in setting.measured.values())


# As in the tests of preflight.
@pytest.mark.filterwarnings("ignore:Error reading persistent compilation cache")
@pytest.mark.slow
def test_preflight_sends_shards_between_nodes_and_the_rest_stays_inside():
    # The parts of gpt_7b, tiny.
    large = load_config(Path("gpt_7b")).task.model
    tiny_one = tiny.config.task.model
    sizes = "vocabulary", "context", "num_layers", "num_heads", "width"
    model = changed(
        large,
        **{name: getattr(tiny_one, name) for name in sizes},
        num_kv_heads=1,
        hidden=48,
    )
    task = changed(tiny.config.task, model=model)
    graph = TopologyConfig(name="one_peer_ring")
    config = config_of(2, topology=graph, task=task)
    preflight = prepare(config, "h100", nodes=2, devices_per_node=2)
    assert dict(preflight.mesh.shape) == {AXIS: 2, "fsdp": 2}
    found = preflight.find("awc", 0, preflight.options)
    leaves = jax.tree.leaves(preflight.state.params)
    # Of a model: matrices are cut in two, vectors sent by both devices.
    cut = sum(x.size * 4 for x in leaves if x.ndim > 2) / 2 / 2
    whole = sum(x.size * 4 for x in leaves if x.ndim <= 2) / 2
    assert found.schedule.sent_bytes(AXIS) == pytest.approx(cut + whole, rel=1e-3)
    between = {c.kind for c in found.schedule.collectives if AXIS in c.axes}
    inside = {c.kind for c in found.schedule.collectives if "fsdp" in c.axes}
    assert between == {"collective-permute"}
    assert "all-gather" in inside
    assert found.memory_bytes > 0
