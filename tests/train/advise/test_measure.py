"""A setting as measured: with a network that is known, and in real processes."""

import dataclasses
import math
import sys
import types
from pathlib import Path

import jax
import numpy as np
import pytest

from decentjax import runtime, topology, worker_mesh
from decentjax.mixing import Lowering
from decentjax.runtime import Cluster
from tests import tiny
from tests.changes import changed
from tests.jobs import ended, started
from tests.run_folders import advice_in
from train.advise import __main__ as program
from train.advise import measure
from train.advise.rank import Prediction, advise, fitting
from train.advise.rounds_advice import CODECS, EVERY
from train.cli.sections import kind_of
from train.config import AllReduceMethod, TopologyConfig, WorkersConfig
from train.run.run_place import Given
from train.run.setup import make_run

TINY_FILE = Path(tiny.__file__)
FREE = Cluster(num_nodes=8, between_bytes_per_second=math.inf)
# Without optimization, as the speed of the compiled programs is not tested.
FAST = {"XLA_FLAGS": "--xla_backend_optimization_level=0"}


def on_mesh(nodes: int, per_node: int, **changes):
    """A run of seconds, each worker on a device of its own."""
    workers = WorkersConfig(
        num_workers=nodes * per_node, workers_per_node=per_node, where="mesh"
    )
    changes = {"topology": TopologyConfig(name="ring"), **changes}
    return changed(tiny.config, workers=workers, **changes)


class FakeNetwork:
    """A network that takes what a cluster takes, by a clock of its own.

    Args:
      truth: the cluster.
      model_bytes: bytes of the model that an exchange sends.
    """

    def __init__(self, truth: Cluster, model_bytes: float):
        self.truth, self.model_bytes = truth, model_bytes
        self.clock = 0.0
        self.searched: list = []
        self.compiled: list = []

    def taking(self, seconds_of):
        """A function that compiles first, and is then as fast in the median."""
        times = iter([100.0, 3.0, 1.0, 0.0])

        def run(models):
            needed = seconds_of(models)
            self.clock += (
                needed + 100 if (time := next(times)) == 100 else time * needed
            )
            return models

        return run

    def fastest_mixes(self, made, mesh, num_bytes, message_dtype):
        self.searched += made
        assert (num_bytes, message_dtype) == (self.model_bytes, None)
        return {exchange: self._mix(exchange) for exchange in made}

    def compiled_mix(self, exchange, lowering, mesh, message_dtype=None):
        self.compiled.append(exchange)
        assert (lowering, message_dtype) == (Lowering(), None)
        return self._mix(exchange)

    def _mix(self, exchange):
        one = topology.Topology("one", (exchange,))

        def seconds_of(models):
            sent = sum(x.nbytes // len(x) for x in models)
            assert sent == self.model_bytes or sent < 50
            sent = 0 if sent < 50 else sent
            return runtime.exchange_seconds(self.truth, one, sent)

        return self.taking(seconds_of)

    def install(self, monkeypatch) -> None:
        clock = types.SimpleNamespace(monotonic=lambda: self.clock)
        monkeypatch.setattr(measure, "time", clock)
        monkeypatch.setattr(measure, "fastest_mixes", self.fastest_mixes)
        monkeypatch.setattr(measure, "compiled_mix", self.compiled_mix)
        monkeypatch.setattr(measure, "build_lone_step", self.build_lone_step)

    def build_lone_step(self, run, mesh):
        """Steps of 1, 2, 3, ... seconds, that take longer the first time."""
        calls = iter(range(100))

        def step(state, batch, t):
            call = next(calls)
            self.clock += 50.0 if call < 3 else call - 2
            return state, {}

        return step


def sent_bytes() -> int:
    """Of a model, by its parameters: an embedding of 256 symbols, a block, a head."""
    params, _ = tiny.config.task.build().init(jax.random.key(0))
    return sum(4 * x.size for x in jax.tree.leaves(params))


@pytest.mark.slow
@pytest.mark.draw(3)
@pytest.mark.parametrize("where", ["in_step", "background"])
@pytest.mark.parametrize(("nodes", "per_node"), [(2, 2), (4, 1), (1, 4)])
def test_a_network_is_measured_as_it_is(nodes, per_node, where, monkeypatch):
    truth = Cluster(
        num_nodes=nodes,
        workers_per_node=per_node,
        between_bytes_per_second=1e5 if nodes > 1 else math.inf,
        inside_bytes_per_second=3e5 if per_node > 1 else math.inf,
        between_latency=0.02 if nodes > 1 else 0.0,
        inside_latency=0.003 if per_node > 1 else 0.0,
    )
    network = FakeNetwork(truth, sent_bytes())
    network.install(monkeypatch)
    monkeypatch.setattr(measure._Exchanges, "all_reduce", lambda _: 0.7)
    exchange = kind_of("exchange", where)()
    own = TopologyConfig(name="ring", factor=0.5)
    config = on_mesh(nodes, per_node, exchange=exchange, topology=own)
    # What is trained now is no matter of what is asked.
    setting = measure.measure(changed(config, method=AllReduceMethod()), 3)
    wanted = dataclasses.asdict(truth)
    assert dataclasses.asdict(setting.cluster) == pytest.approx(wanted)
    assert setting.job.model_bytes == network.model_bytes
    assert setting.overlap == ("background" if where == "background" else "none")
    assert setting.job.forward_share == 1
    assert setting.own == (own,)
    assert setting.measured.pop(None) == 0.7
    topologies = [made for _, made in fitting(nodes * per_node, per_node, [own])[0]]
    assert list(setting.measured) == list(dict.fromkeys(topologies))
    for made in topologies:
        known = runtime.exchange_seconds(truth, made, network.model_bytes)
        assert setting.measured[made] == pytest.approx(known)
    # Each once, and sent as in training: by a second thread as was found fastest.
    exchanges = {exchange for made in topologies for exchange in made}
    if where == "background":
        assert set(network.searched) >= exchanges
        assert len(network.searched) == len(set(network.searched))
        assert not exchanges & set(network.compiled) - set(network.searched)
    else:
        assert not network.searched
        assert set(network.compiled) >= exchanges
    # The steps that compiled do not count; then all workers of a program take as long.
    num_workers = nodes * per_node
    for step in range(6):
        drawn = setting.job.draw(step, num_workers, 0)
        assert drawn.tolist() == num_workers * [1.0 + step % 3]
    wanted = f"measured on {num_workers} cpu workers of 1 processes: 3 steps of 2 s in "
    assert setting.facts[0] == wanted + "the mean, 1 s to 3 s"
    rates = {
        "between nodes 0.0008 Gbit/s and 20 ms": nodes > 1,
        "inside nodes 0.0024 Gbit/s and 3 ms": per_node > 1,
    }
    said = ", ".join(rate for rate, there in rates.items() if there)
    assert setting.facts[1] == f"messages {said}; exchanges as below"


def test_of_one_worker_no_message_is_measured():
    alone = Cluster(num_nodes=1, between_bytes_per_second=math.inf)
    assert len(measure._facts(np.ones((2, 1)), alone)) == 1


def test_the_slowest_process_says_how_long_an_exchange_takes(monkeypatch):
    network = FakeNetwork(FREE, 1.0)
    network.install(monkeypatch)
    monkeypatch.setattr(
        measure, "gather", lambda _, value: [value, value and 5 * value]
    )
    assert measure._seconds(network.taking(lambda _: 2.0), None) == 10.0


def measured(config, mesh):
    return make_run(config, Given(config, mesh)), mesh


@pytest.mark.slow
def test_compute_times_are_those_of_each_process(monkeypatch):
    """Of two processes, of which the other has workers 0 to 3 and is slower."""
    network = FakeNetwork(FREE, 1.0)
    network.install(monkeypatch)
    config, mesh = on_mesh(6, 1), worker_mesh(6)
    monkeypatch.setattr(Given, "workers", [4, 5])

    def gather(_, value):
        other = [[0, 1, 2, 3], [7.0, 8.0, 9.0]]
        return [value, other] if isinstance(value, list) else [value, value]

    monkeypatch.setattr(measure, "gather", gather)
    trace = measure._compute_times(*measured(config, mesh), 3)
    assert trace.tolist() == [4 * [7 + t] + 2 * [1 + t] for t in range(3)]


@pytest.mark.slow
def test_an_all_reduce_is_a_mean_over_all_devices(monkeypatch):
    config = on_mesh(4, 1)
    network = measure._Exchanges(*measured(config, worker_mesh(4)))
    seen = []
    monkeypatch.setattr(measure, "_seconds", lambda *given: seen.append(given))
    network.all_reduce()
    ((function, models),) = seen
    rows = [np.arange(8.0).reshape(4, 2)]
    ((mean,),) = function([measure.place(rows, worker_mesh(4))])
    np.testing.assert_allclose(mean, np.tile(rows[0].mean(0), (4, 1)))
    (models,) = models  # Of the only lane.
    assert [len(x) for x in models] == [4] * len(models)
    assert sum(x.nbytes // 4 for x in models) == network.model_bytes == sent_bytes()


def test_narrow_messages_are_half_as_large():
    config = on_mesh(2, 1)
    narrow = changed(config, step=dict(message_dtype="bfloat16"))
    network = measure._Exchanges(*measured(narrow, worker_mesh(2)))
    assert network.model_bytes == sent_bytes() / 2
    assert network.message_dtype == "bfloat16"


@pytest.mark.parametrize(
    ("platform", "where", "overlap"),
    [
        ("cpu", "auto", "none"),
        ("cpu", "in_step", "none"),
        ("cpu", "background", "background"),
        ("gpu", "auto", "in_step"),
        ("gpu", "background", "background"),
    ],
)
def test_an_exchange_overlaps_as_in_training(platform, where, overlap, monkeypatch):
    config = on_mesh(2, 1)
    exchange = kind_of("exchange", where)()
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    config = changed(config, exchange=exchange)
    assert measure._overlap(measured(config, worker_mesh(2))[0]) == overlap


def test_an_accelerator_sends_parts_of_the_gradient_early(monkeypatch):
    truth = Cluster(num_nodes=2, between_bytes_per_second=1e5)
    FakeNetwork(truth, sent_bytes()).install(monkeypatch)
    monkeypatch.setattr(measure, "_overlap", lambda *_: "in_step")
    setting = measure.measure(on_mesh(2, 1), 3)
    assert (setting.overlap, setting.job.forward_share) == ("in_step", 1 / 3)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ("", "error: simulated workers send no messages to measure: start processes"),
        ("--workers.where mesh --measured-steps 0", "error: steps and measured_steps"),
        ("--steps 0", "error: steps and measured_steps must be positive, got 0 and 30"),
        (
            "--workers.where mesh --workers.workers-per-node 3 --topology.name ring",
            "does not fill nodes of 3: set workers.workers_per_node to 1, 2 or 4",
        ),
        ("--optimizer.warmup-steps 999999", "must be less than"),
    ],
)
def test_what_cannot_be_measured(options, sentence, monkeypatch, tmp_path, capsys):
    # The tests have their devices already.
    monkeypatch.setattr(program, "provide_cpu_devices", lambda count: None)
    given = ["--measure", str(TINY_FILE), *options.split(), "--out", str(tmp_path)]
    with pytest.raises(SystemExit) as raised:
        program.main(given)
    said = f"{raised.value} {capsys.readouterr().err}"
    assert sentence in said
    assert "Traceback" not in said
    assert not list(tmp_path.iterdir())


def test_nothing_is_measured_that_cannot_be_written(monkeypatch):
    monkeypatch.setattr(program, "provide_cpu_devices", lambda count: None)
    monkeypatch.setattr(measure, "measure", lambda *_: pytest.fail("was measured"))
    with pytest.raises(SystemExit, match=r"error: .*File exists: "):
        program.main(["--measure", str(TINY_FILE), "--out", str(TINY_FILE)])


@pytest.mark.parametrize("first", ["--measure", "--steps"])
def test_measure_may_stand_before_other_options_or_after_them(first, monkeypatch):
    options = {
        "--measure": [str(TINY_FILE)],
        "--steps": ["7", "--measured-steps", "5", "--seed", "2", "--out", "there"],
    }
    begun = []

    def remember(*given):
        begun.append(given)
        return 0

    monkeypatch.setattr(program, "provide_cpu_devices", lambda count: None)
    monkeypatch.setattr(measure, "measure", lambda *given: given)
    monkeypatch.setattr(program, "look", remember)
    names = sorted(options, key=lambda name: name != first)
    program.main([word for name in names for word in (name, *options[name])])
    (((config, measured_steps), *rest),) = begun
    assert config == changed(tiny.config, seed=2)
    assert (measured_steps, *rest) == (5, 7, 2, EVERY, CODECS, Path("there"))


def run(*command: str) -> str:
    """What a command that ends well has printed."""
    with started(sys.executable, "-m", *command, **FAST) as process:
        return ended(process)


def assert_measured(printed: str, out: Path, num_workers: int, per_node: int) -> dict:
    """Nothing of how long it took: only that all was measured, and is in the advice."""
    written = advice_in(out)
    baseline, *rows = [Prediction(**row) for row in written["rows"]]
    fit, unfit = fitting(num_workers, per_node)
    names = [row.name for row in rows]
    assert len(names) == len(set(names)) == len(fit)
    assert written["does_not_fit"] == unfit
    assert written["model_bytes"] == sent_bytes()
    assert written["cluster"]["num_nodes"] == num_workers // per_node
    assert written["cluster"]["workers_per_node"] == per_node
    assert min(row.exchange for row in (baseline, *rows)) > 0
    assert min(written["gamma"], baseline.compute) > 0
    for row in rows:
        assert row.omega == pytest.approx(row.exchange / baseline.exchange)
        assert row.speed_up == pytest.approx(baseline.step / row.step)
    advice = advise(baseline, rows)
    assert written["advice"]["choice"] == advice.choice.name
    assert f"advice: {advice.choice.name}" in printed
    assert "exchanging: ring" in printed
    assert {path.name for path in out.iterdir()} == {"advice.json", "steps.svg"}
    return written


@pytest.mark.nightly
def test_one_process_measures_a_mesh_of_its_devices(tmp_path):
    options = "--workers.where mesh --measured-steps 2 --steps 20"
    arguments = ["--measure", "tests/tiny.py", *options.split(), "--out", str(tmp_path)]
    printed = run("train.advise", *arguments)
    written = assert_measured(printed, tmp_path, 4, 2)
    assert "measured on 4 cpu workers of 1 processes: 2 steps of " in printed
    assert written["overlap"] == "none"
    cluster = written["cluster"]
    assert min(cluster[f"{at}_bytes_per_second"] for at in ("between", "inside")) > 0
    assert cluster["inside_latency"] > 0
    assert cluster["between_latency"] >= 0


@pytest.mark.nightly
def test_processes_measure_what_is_between_them(tmp_path):
    options = (
        "--workers.num-workers 2 --workers.workers-per-node 1 --topology.name ring "
        "--method all_reduce --measured-steps 2 --steps 20"
    )
    printed = run(
        *("train.launch", "--processes", "2", "advise"),
        *("--measure", "tests/tiny.py", *options.split(), "--out", str(tmp_path)),
    )
    lines = printed.splitlines()
    of_first = "\n".join(x.removeprefix("[0] ") for x in lines if x.startswith("[0]"))
    written = assert_measured(of_first, tmp_path, 2, 1)
    assert "measured on 2 cpu workers of 2 processes: 2 steps of " in of_first
    # As topologies are trained with there, whatever the config says of today.
    assert written["overlap"] == "background"
    assert written["cluster"]["inside_bytes_per_second"] is None
    # The other says nothing.
    assert not [
        x for x in lines if x.startswith("[1]") and ("advice" in x or "exchanging" in x)
    ]
