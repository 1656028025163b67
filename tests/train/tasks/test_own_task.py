"""What is a user's own: task, topology, optimizer, schedule, hooks; the guide to it."""

import dataclasses
import functools
import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import grain
import jax
import numpy as np
import optax
import pytest

from decentjax import topology
from decentjax.plan import topology_of
from tests.changes import changed
from tests.checkout import ROOT
from tests.jobs import python
from tests.line import as_process
from tests.trees import assert_close
from train.__main__ import main
from train.cli.config_json import from_fields, sources, to_json
from train.cli.load import load_config
from train.config import (
    AwcMethod,
    CheckpointConfig,
    Config,
    EvaluationConfig,
    HoldingPolicy,
    LogConfig,
    OptimizerConfig,
    StepConfig,
    TopologyConfig,
    WorkersConfig,
)
from train.fields import checked
from train.report import write_report
from train.run.check_task import COLUMNS, check_batch, trace_task
from train.run.loop import train
from train.run.optimizers import optimizer_with
from train.run.resume import Resume, saved_config, trained_by
from train.run.run_info import read_facts, resume_line
from train.run.run_place import build_place
from train.run.scores import read_trained
from train.run.setup import make_run
from train.store.checkpoints import find_checkpoints
from train.store.log import read_metrics
from train.tasks.shipped import is_shipped
from train.tasks.stdlib import StdlibTask
from train.tasks.task import Headline, Task

GUIDE = (ROOT / "docs" / "guides" / "own-task.md").read_text()
EXAMPLE, MORE = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)
SHORT = ("--num-steps", "20", "--optimizer.warmup-steps", "2")


def test_the_guide_is_40_lines():
    assert sum(map(bool, map(str.strip, EXAMPLE.split("\n")))) == 40


@pytest.mark.nightly
def test_the_commands_of_the_guide_run(tmp_path):
    """Each in a process, as a user's: of the file that it tells one to save."""
    (tmp_path / "sine.py").write_text(EXAMPLE)
    (block,) = re.findall(r"```console\n(.*?)```", GUIDE, re.DOTALL)
    lines = [shlex.split(line)[1:] for line in block.strip().split("\n")]
    assert [line[0] for line in lines] == ["train", "evaluate", "resume"]
    outputs = []
    for line, short in zip(lines, (SHORT, (), ("--num-steps", "24")), strict=True):
        done = python("-m", "decentjax", *line, *short, cwd=tmp_path)
        outputs.append(done.stdout)
    assert "held-out error" in outputs[0]
    assert "sample" not in outputs[0]
    assert "worker 3" in outputs[1]
    run_dir = tmp_path / "runs" / "sine"
    fields = json.loads((run_dir / "config.json").read_text())
    assert fields["task"] == {"kind": "sine.py:Sine", "width": 64}
    assert max(find_checkpoints(run_dir).steps) == 24
    with pytest.raises(ValueError, match=r"sine\.py:Sine, .* add --trust sine\.py$"):
        read_trained(run_dir)
    with pytest.raises(ValueError, match=r"no file other\.py to trust; this run"):
        read_trained(run_dir, trust=["other.py"])


OWN = (
    EXAMPLE
    + """
import dataclasses
import optax
from decentjax import topology
from train.config import (
    CheckpointConfig, EvaluationConfig, LogConfig, TopologyConfig, WorkersConfig
)

seen = []


def my_schedule(num_steps):
    return optax.linear_schedule(0.1, 0.02, num_steps)


def my_optimizer(schedule):
    return optax.sgd(schedule)


def my_graph(num_workers):
    return topology.damped(topology.ring(num_workers), 0.5)


def look(step, state, metrics):
    seen.append((step, state.params["w"].shape, metrics["loss"].shape))


def show(step, scores):
    seen.append((step, scores))


config = dataclasses.replace(
    config,
    num_steps=6,
    workers=WorkersConfig(num_workers=3),
    optimizer=OptimizerConfig(name=my_optimizer, decay=my_schedule, clip_norm=None),
    topology=TopologyConfig(make=my_graph),
    log=LogConfig(every_steps=2),
    evaluation=EvaluationConfig(every_steps=3),
    checkpoint=CheckpointConfig(every_steps=4),
    on_step=look,
    on_evaluation=show,
)
"""
)


@pytest.fixture
def own(tmp_path, monkeypatch):
    """The file of a user, in the folder where commands are given."""
    monkeypatch.chdir(tmp_path)
    path = Path("own.py")
    path.write_text(OWN)
    return path


@pytest.fixture
def ran(own):
    return train(load_config(own), Path("run")), sys.modules["own.py"]


@pytest.mark.slow
def test_hooks_see_each_step_and_each_evaluation(ran):
    _, module = ran
    steps = [one for one in module.seen if len(one) == 3]
    assert steps == [(step, (3, 1, 32), (3,)) for step in range(1, 7)]
    scores = dict(one for one in module.seen if len(one) == 2)
    rows = [*map(json.loads, Path("run/metrics.jsonl").read_text().splitlines())]
    assert set().union(*rows) <= {*COLUMNS, "examples_per_second"}
    logged = {row["step"]: row["mean_model"] for row in rows if "mean_model" in row}
    assert scores == logged
    assert list(scores) == [3, 6]


@pytest.mark.slow
def test_own_functions_decide_how_a_step_goes(ran):
    """A step of SGD beside a damped ring, in NumPy, with the rates of the schedule."""
    outcome, module = ran
    rows = map(json.loads, Path("run/metrics.jsonl").read_text().splitlines())
    rates = {row["step"]: row["learning_rate"] for row in rows if "loss" in row}
    for step, rate in rates.items():
        assert rate == pytest.approx(0.1 - 0.08 * (step - 1) / 6)
    # As their sum: the exchange keeps the mean, so the mean model takes the mean step.
    config = module.config
    one = changed(config, num_steps=1, on_step=None, on_evaluation=None)
    task, matrix = config.task.build(), np.full((3, 3), 1 / 6) + np.eye(3) / 2
    start = task.init(jax.random.split(jax.random.key(0))[0])[0]
    batches = task.steps(3, 16, 0, range(3))[0].arrays
    after = train(one, Path("one")).state.params

    def loss(params, batch):
        return task.loss_fn(params, (), batch, None)[0]

    grads = [jax.grad(loss)(start, batches[i]) for i in range(3)]
    for name in start:
        mixed = matrix @ np.stack([np.ravel(start[name])] * 3)
        wanted = mixed - 0.1 * np.stack([np.ravel(grad[name]) for grad in grads])
        got = np.asarray(after[name]).reshape(3, -1)
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-6)
    assert outcome.step == 6


@pytest.mark.slow
def test_a_run_of_ones_own_is_read_with_trust_alone(ran, own, capsys):
    fields = json.loads(Path("run/config.json").read_text())
    assert fields["task"]["kind"] == "own.py:Sine"
    assert fields["topology"]["make"] == "own.py:my_graph"
    assert fields["optimizer"]["name"] == "own.py:my_optimizer"
    assert fields["optimizer"]["decay"] == "own.py:my_schedule"
    assert fields["on_step"] == "own.py:look"
    read = from_fields(fields, ["own.py"])
    assert to_json(read) == to_json(sys.modules["own.py"].config)
    for part, name in [("task", "kind"), ("topology", "make"), ("optimizer", "name")]:
        kept = {"task": {"kind": "StdlibTask"}} if part != "task" else {}
        other = {**fields, **kept, part: {name: fields[part][name]}}
        with pytest.raises(ValueError, match=r"if you trust it, add --trust own\.py$"):
            from_fields(other)
    page = Path("report.html")
    with pytest.raises(ValueError, match=r"TopologyConfig.make is own\.py:my_graph"):
        write_report([Path("run")], page)
    assert write_report([Path("run")], page, trust=["own.py"]) == page


@pytest.mark.slow
def test_a_run_knows_the_code_that_it_was_trained_by(ran, own, capsys):
    """Each of two graphs, of one file that was edited, is in the log and the folder."""
    del sys.modules["own.py"]  # As in another process.
    edited = OWN.replace("num_workers), 0.5", "num_workers), 0.25")
    own.write_text(edited)
    main(["--resume", "run", "--trust", "own.py", "--num-steps", "8"])
    said = capsys.readouterr()
    assert "held-out error" in said.out
    assert "since step 6 was saved: own.py was edited, the graph is another" in said.err
    (row,) = (row for row in read_metrics(Path("run")) if "changed" in row)
    phrases = ["own.py was edited", "the graph is another"]
    assert row["changed"] == ["num_steps was 6 and is 8", *phrases]
    assert max(find_checkpoints(Path("run")).steps) == 8
    facts = read_facts(Path("run"))
    kept = Path("run/code") / f"own.{facts['sources']['own.py']}.py"
    assert kept.read_text() == edited
    assert {one.read_text() for one in kept.parent.iterdir()} == {OWN, edited}
    assert facts["versions"].keys() >= {"decentjax", "jax", "jaxlib", "numpy", "optax"}
    main(["--resume", "run", "--trust", "own.py", "--num-steps", "9"])
    assert "since step" not in capsys.readouterr().err


@pytest.mark.slow
def test_hooks_are_needed_to_go_on_and_not_to_evaluate(ran, own):
    del sys.modules["own.py"]  # As in another process.
    own.write_text(OWN.replace("def look(", "def looked(").replace("=look", "=looked"))
    assert read_trained(Path("run"), trust=["own.py"]).step == 6
    with pytest.raises(ValueError, match=r"own\.py does not define look, which is th"):
        saved_config(Path("run"), None, ["own.py"])


def test_a_stopped_run_names_the_whole_command_that_resumes_it(own, monkeypatch):
    def line_of(config, folder):
        return resume_line(make_run(config, build_place(config, Path(folder))))

    line = line_of(load_config(own), "a b")
    assert line == "decentjax resume 'a b' --trust own.py"
    monkeypatch.setenv("DECENTJAX_COMMAND", "decentjax launch -n 2 own.py")
    launched = "decentjax launch -n 2 resume run --trust tests.line"
    assert line_of(as_process(0, 2), "run") == launched


def test_a_file_that_moved_or_became_a_module_is_the_same(ran, own):
    """Its name counts, and a class is compared by its own."""
    config = sys.modules["own.py"].config
    Path("elsewhere").mkdir()
    moved = own.rename("elsewhere/own.py")
    del sys.modules["own.py"]
    again = saved_config(Path("run"), None, [str(moved)])
    assert to_json(again) == to_json(config)
    fields = json.loads(to_json(config).replace("own.py:", "lib.own:"))
    assert trained_by(fields) == trained_by(json.loads(to_json(config)))
    assert sources(config) == ("own.py",) * 4


@pytest.mark.slow
def test_a_run_of_a_family_resumes_with_its_file(own, capsys):
    own.write_text(f"{OWN}\nlonger = dataclasses.replace(config, name='longer')\n")
    main([f"{own}:longer", "--run-dir", "run"])
    fields = json.loads(Path("run/config.json").read_text())
    assert (fields["name"], fields["task"]["kind"]) == ("longer", "own.py:Sine")
    del sys.modules["own.py"]
    with pytest.raises(SystemExit, match=r"if you trust it, add --trust own\.py"):
        main(["--resume", "run", "--num-steps", "9"])
    main(["--resume", "run", "--num-steps", "9", "--trust", "own.py"])
    assert max(find_checkpoints(Path("run")).steps) == 9


@pytest.mark.slow
def test_a_run_begins_with_the_model_of_ones_own_run(ran, own):
    """Its code is that of the config, which runs anyway."""
    config = load_config(own)
    outcome = train(config, Path("second"), init_from=Path("run"))
    assert outcome.step == 6


@checked
class Broken:
    """A task that is wrong in one way."""

    how: str = ""

    def build(self):
        whole = load_example().build()
        if self.how == "no task":
            return {}
        return whole._replace(**WRONG[self.how][0](whole))


@functools.cache
def load_example():
    names: dict = {"__name__": "example"}
    sys.modules["example"] = type(sys)("example")
    exec(EXAMPLE, names)
    return names["Sine"]()


def with_loss(change):
    """Parts whose loss is another, and those of its metrics."""

    def parts(whole):
        def loss_fn(params, model_state, batch, key):
            loss, _ = whole.loss_fn(params, model_state, batch, key)
            return change(loss, model_state, batch)

        return {"loss_fn": loss_fn}

    return parts


# What is wrong with a task, by a function of a whole one, and what is said of it.
RETURN_LOSS = r"loss_fn must return \(loss, \(model_state, metrics\)\)"
RETURN_LIST = "validation must return a list of batches, .* again, got a "
WRONG = {
    "a loss alone": (with_loss(lambda loss, s, b: loss), RETURN_LOSS),
    "no metrics": (with_loss(lambda loss, s, b: (loss, s)), RETURN_LOSS),
    "a vector": (
        with_loss(lambda loss, s, b: (b[:, 0], (s, {}))),
        r"the loss must be a scalar, got shape \(8,\)",
    ),
    "another state": (
        with_loss(lambda loss, s, b: (loss, ({"a": loss}, {}))),
        "must return a model_state with the structure, shapes and d",
    ),
    "a loss without a key": (
        lambda whole: {"loss_fn": lambda p, s, b: whole.loss_fn(p, s, b, None)},
        r"called as loss_fn\(params, model_state, batch, key\): too many positional",
    ),
    **{
        f"a metric {name}": (
            with_loss(lambda loss, s, b, name=name: (loss, (s, {name: loss}))),
            f"returns a metric '{name}', as a column of the log is called: give it",
        )
        for name in ("step", "seconds", "resumed", "examples_per_second")
    },
    "a metric loss": (
        with_loss(lambda loss, s, b: (loss, (s, {"loss": 2 * loss}))),
        "returns a metric 'loss', the name of the loss itself: give it another name",
    ),
    "a model alone": (
        lambda whole: {"init": lambda key: whole.init(key)[0]},
        r"init must return \(params, model_state\), as in `return params, \(\)` for",
    ),
    "init without a key": (
        lambda whole: {"init": lambda: None},
        r"init is called as init\(key\): too many positional arguments",
    ),
    "a mean in place of totals": (
        lambda whole: {"score_fn": lambda p, s, b: {"error": b.mean()}},
        r"score_fn must return \{name: \(sum, count\)\}, .* got \['error'\] float32",
    ),
    "a score alone": (
        lambda whole: {"score_fn": lambda p, s, b: b.mean()},
        r"score_fn must return \{name: \(sum, count\)\}, .* got float32",
    ),
    "totals of each example": (
        lambda whole: {"score_fn": lambda p, s, b: {"error": (b[:, 0], b[:, 1])}},
        r"two scalars for each score, got .*float32\[256\]",
    ),
    "a score function of other arguments": (
        lambda whole: {"score_fn": lambda params, batch: {}},
        r"called as score_fn\(params, model_state, batch\): too many positional",
    ),
    "another headline": (
        lambda whole: {"headline": Headline("loss", better="lower")},
        r"headline must name one of the scores \['error'\], got 'loss'",
    ),
    "a headline that goes up": (
        lambda whole: {"headline": Headline("error", better="up")},
        "better=\"higher\", got Headline.name='error', better='up'",
    ),
    "a headline's name": (lambda whole: {"headline": "error"}, "Headline.*got 'error'"),
    "one batch": (
        lambda whole: {"validation": lambda: whole.validation()[0]},
        f"{RETURN_LIST}ndarray",
    ),
    "an iterator": (
        lambda whole: {"validation": lambda: iter(whole.validation())},
        f"{RETURN_LIST}list_iterator",
    ),
    "batches that are no function": (
        lambda whole: {"validation": whole.validation()},
        r"validation is called as validation\(\), got list",
    ),
    "no batches": (lambda whole: {"validation": list}, "at least one batch, got none"),
    "steps of other arguments": (
        lambda whole: {"steps": lambda num_workers: None},
        r"steps is called as steps\(num_workers, batch_per_worker, seed, workers, "
        r"multiple_of=\.\.\.\): ",
    ),
    "steps of no form": (
        lambda whole: {"steps": lambda *args, **options: [1, 2]},
        "steps must return a grain.MapDataset, as worker_steps does, got a list",
    ),
    "steps of no batches": (
        lambda whole: {"steps": lambda *args, **_: grain.MapDataset.range(9)},
        "must have a Batch for each step, as worker_steps returns them, got a int",
    ),
    "a batch of another dtype": (
        lambda whole: {"batch_shape": lambda n: jax.ShapeDtypeStruct((n, 2), "i4")},
        r"returns int32\[8, 2\], and .* is float32\[8, 2\]: they must have one",
    ),
}


@pytest.mark.parametrize("how", [*WRONG, "no task"])
def test_a_broken_task_is_a_sentence_before_it_compiles(how, tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "jit", None)
    config = Config(name="x", num_steps=100, task=Broken(how=how))
    words = "Broken.build must return a Task, got a dict"
    with pytest.raises(ValueError, match=WRONG.get(how, ("", words))[1]):
        train(config, tmp_path)


def test_a_whole_task_is_traced_and_its_typical_batch_may_differ(capsys):
    whole = load_example().build()
    trace_task(whole, 3)
    (one,) = whole.steps(1, 3, 0, [0])[:1]
    check_batch(one, whole, 3)
    few = whole._replace(batch_shape=lambda n: jax.ShapeDtypeStruct((n - 1, 2), "f4"))
    check_batch(one, few, 3)
    assert capsys.readouterr().err == ""
    wide = whole._replace(batch_shape=lambda n: jax.ShapeDtypeStruct((n, 3), "f4"))
    check_batch(one, wide, 3)
    assert "returns float32[3, 3], and the first" in capsys.readouterr().err


def number(num_workers):
    return num_workers


def ring_of_one_more(num_workers):
    return topology.ring(num_workers + 1)


def vector(num_steps):
    return lambda step: np.ones(3)


@dataclasses.dataclass
class Thawed:
    """Not frozen."""

    def build(self) -> Task:
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Keeping:
    """Of a value that no JSON keeps."""

    value: object = None

    def build(self) -> Task:
        raise NotImplementedError


@checked
class Generic:
    """Of annotations that are no plain class."""

    sizes: dict[str, int] = dataclasses.field(default_factory=dict)
    other: Any = None


AT_TOP = "must be a function at the top of a module or None, got "
AT_TOP_OR = "must be one of .* or a function at the top of a module, got "


def of(**parts):
    return Config(name="x", num_steps=100, **{"task": load_example(), **parts})


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: TopologyConfig(make=lambda n: number(n)), AT_TOP),
        (lambda: OptimizerConfig(name=functools.partial(optax.sgd)), AT_TOP_OR),
        (lambda: OptimizerConfig(decay=3), AT_TOP_OR),
        (lambda: of(on_step="look"), f"Config.on_step {AT_TOP}"),
        (lambda: of(topology=TopologyConfig(make=number)), "a Topology of 8 .* got 8$"),
        (
            lambda: of(topology=TopologyConfig(make=ring_of_one_more)),
            "test_own_task:ring_of_one_more must return .* of 8 workers, got one of 9$",
        ),
        (lambda: of(task=Thawed()), "must be an instance of a frozen dataclass"),
        (lambda: of(task=Broken), "must be an instance of a frozen dataclass"),
        (lambda: of(task=3), "Config.task must be a TaskOptions, got 3"),
        (lambda: of(task=Keeping(np.ones(2))), "keeps numbers, .*, got array"),
        (lambda: of(task=Keeping(Path("x"))), "keeps numbers, .*, got PosixPath"),
        (lambda: of(task=Keeping([1])), r"tuples and not lists, got Keeping\(value=\["),
        (lambda: Generic(sizes=3), "Generic.sizes must be a dict, got 3"),
    ],
)
def test_what_is_no_function_or_task_is_a_sentence(make, words):
    with pytest.raises(ValueError, match=words):
        make()


@pytest.mark.parametrize(
    ("optimizer", "words"),
    [
        (OptimizerConfig(name=number), "must return an optax optimizer, .*, got <func"),
        (OptimizerConfig(decay=number), "a learning rate, a scalar, got 100"),
        (OptimizerConfig(decay=vector), "a learning rate, a scalar, got <function"),
    ],
)
def test_what_is_no_optimizer_is_a_sentence(optimizer, words, tmp_path):
    with pytest.raises(ValueError, match=words):
        train(of(optimizer=optimizer), tmp_path)


def several_steps(schedule):
    return optax.MultiSteps(optax.adam(schedule), 4)


def test_an_own_optimizer_may_be_one_of_several_steps():
    params = {"w": np.ones(3, "float32")}
    config = OptimizerConfig(name=several_steps, clip_norm=None)
    found = optimizer_with(config, lambda step: 0.1)
    wanted = several_steps(0.1)
    x, y, state, other = params, params, found.init(params), wanted.init(params)
    for _ in range(5):
        updates, state = found.update(params, state, x)
        x = optax.apply_updates(x, updates)
        updates, other = wanted.update(params, other, y)
        y = optax.apply_updates(y, updates)
    np.testing.assert_array_equal(x["w"], y["w"])
    assert x["w"][0] < 1


def test_graphs_by_name_are_not_ones_own():
    """Of a policy that lists them."""
    policy = HoldingPolicy(graphs=("complete", "ring"))
    graph, method = TopologyConfig(make=topology.alone), AwcMethod(policy=policy)
    config = of(method=method, topology=graph)
    assert len(topology_of(config.plan)[1].between.sources) == 3


@pytest.mark.slow
@pytest.mark.draw(2)
@pytest.mark.parametrize("name", ["lion", "muon"])
def test_a_run_of_an_optimizer_by_name_resumes_bit_for_bit(name, tmp_path):
    config = of(
        workers=WorkersConfig(num_workers=2),
        step=StepConfig(batch_per_worker=4),
        optimizer=OptimizerConfig(name=name, warmup_steps=1, learning_rate=0.01),
        checkpoint=CheckpointConfig(every_steps=3, num_kept=9),
        log=LogConfig(every_steps=3),
        evaluation=EvaluationConfig(every_steps=100),
    )
    config = changed(config, num_steps=6)
    whole = train(config, tmp_path / "run").state
    again = train(config, tmp_path / "run", Resume(step=3)).state
    assert_close(whole, again)


def test_a_class_with_the_name_of_a_shipped_one_is_not_it():
    own = type("StdlibTask", (), {"__module__": "mine"})
    assert is_shipped(StdlibTask)
    assert not is_shipped(own)
