"""Own methods and graphs: trained, resumed and compared from a file of the user."""

import json
import re
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from decentjax import Rounds, topology
from decentjax.plan import GradientMean
from tests import line
from tests.changes import changed
from tests.guide_method import OWN_METHOD
from tests.trees import assert_close
from train.__main__ import main
from train.advise.rounds_advice import compare_rounds
from train.advise.setting import Flags
from train.cli.changes import as_changes, with_changes
from train.cli.load import load_config
from train.cli.trust import find_own
from train.compare import Comparison
from train.config import Config, WorkersConfig
from train.dbench.__main__ import DBench
from train.report import write_report
from train.run.loop import train
from train.run.message_bytes import sent_bytes
from train.run.method import build_method
from train.run.resume import Resume

# Beside the method of the guide, plans of each kind, and what is no plan.
OWN = (
    OWN_METHOD
    + """

from decentjax import methods, policy


def ring(num_workers):
    return topology.ring(num_workers)


def after(num_workers):
    return Rounds(topology.ring(num_workers))


def mean(num_workers):
    return methods.all_reduce(num_workers)


def one_more(num_workers):
    return topology.ring(num_workers + 1)


def nothing(num_workers):
    return "a plan"


def holds(num_workers):
    return policy.holding(policy.ladder(num_workers), 0.1)


def broken(num_workers):
    raise KeyError(num_workers)


def of_two(num_workers, degree):
    return topology.ring(num_workers)


class Unsent(MomentumTracking):
    travels = "z",


def unsent(num_workers):
    return Unsent(topology.ring(num_workers))


@dataclasses.dataclass(frozen=True)
class WithArray(Rounds):
    weights: object = None


def unhashed(num_workers):
    return WithArray(topology.ring(num_workers), weights=jnp.ones(2))
"""
)
LINE = f"{Path(line.__file__).resolve()}"


@pytest.fixture
def own(tmp_path, monkeypatch):
    """The user's folder, with the file in it."""
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(OWN)
    monkeypatch.delitem(sys.modules, "own.py", raising=False)
    return Path("own.py")


def with_own(*options: str) -> Config:
    rest, changes = as_changes(options)
    assert rest == []
    return with_changes(line.NOISY, changes)[0]


def params_of(config: Config, folder: str, *how):
    return jax.device_get(train(config, Path(folder), *how).state.params)


def assert_equal(found, wanted):
    assert_close(found, wanted)


SHORT = ("--num-steps", "4", "--workers.num-workers", "3")


@pytest.mark.parametrize(
    ("name", "algorithm"), [("ring", "awc"), ("after", "atc"), ("mean", "all_reduce")]
)
def test_a_plan_that_has_a_name_trains_as_by_its_name(own, name, algorithm):
    found = params_of(with_own(*SHORT, "--method", f"own.py:{name}"), "own")
    plain = with_own(*SHORT, "--topology.name", "ring", "--method", algorithm)
    assert_equal(found, params_of(plain, "named"))


def test_a_method_of_a_file_trains_and_resumes_bit_for_bit(own, capsys):
    given = ["--method", "own.py:choco_momentum", "--workers.num-workers", "3"]
    whole = params_of(with_own(*given, "--num-steps", "6"), "whole")
    main([f"{LINE}:NOISY", *given, "--num-steps", "3", "--run-dir", "run"])
    assert "choco_momentum over ring" in capsys.readouterr().out
    assert json.loads(Path("run/config.json").read_text())["method"] == (
        "own.py:choco_momentum"
    )
    again = ["--resume", "run", "--num-steps", "6", "--trust", LINE]
    with pytest.raises(SystemExit, match=r"Config.method is own\.py:choco_"):
        main(again)
    main([*again, "--trust", "own.py"])
    place = find_own("own.py:choco_momentum", ["own.py"], "method")
    config = changed(with_own(*given, "--num-steps", "6"), method=place)
    assert_equal(params_of(config, "run", Resume()), whole)
    with pytest.raises(ValueError, match=r"run's method is own.py:choco_momentum"):
        write_report([Path("run")], Path("page.html"))
    assert write_report([Path("run")], Path("page.html"), trust=["own.py"])


@pytest.mark.parametrize("where", ["in_step", "background"])
def test_a_method_has_the_same_numbers_on_a_mesh_and_in_the_thread(own, where):
    given = *SHORT, "--method", "own.py:choco_momentum"
    found = with_own(*given, "--workers.where", "mesh", "--exchange", where)
    wanted = params_of(with_own(*given), "simulated")
    assert_close(params_of(found, where), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_methods_are_compared_and_cells_of_a_grid(own, capsys):
    names = "choco_momentum", "ring"
    places = tuple(f"own.py:{name}" for name in names)
    Comparison(
        configs=(Path(LINE),),
        seeds=1,
        change=("num-steps=4", "workers.num-workers=3"),
        vary=(("method", *places),),
        out=Path("compared"),
    ).run()
    text = Path("compared/compare.md").read_text()
    assert all(f"{name} |" in text for name in names), text
    for change in ("method=own.py:choco_momentum", "topology=own.py:ring"):
        (own_one, plain) = DBench(
            config=Path(LINE),
            graphs=("complete",),
            workers=(3,),
            seeds=1,
            change=("num-steps=4", change),
            out=Path("grid"),
        ).run()
        assert own_one.cell.graph == change.partition("=")[2]
        assert own_one.outcome is not None
        assert plain.outcome is not None
        assert own_one.cell.graph in Path("grid/dbench.md").read_text()


def test_a_method_is_a_row_of_the_advice(own):
    config = with_own("--method", "own.py:choco_momentum")
    asked = Flags(nodes=4, between="1gbit", compute="50ms", params="1M").setting()
    setting = changed(asked, method=config.method)
    *_, row = compare_rounds(setting, (4,), ("none",), 0.1, num_steps=8, seed=0)
    assert (row.name, row.every_steps) == ("own.py:choco_momentum", 1)
    assert row.flags == "--method own.py:choco_momentum"
    # Of x and y 30 %, a number and its place of 2 bytes, to two neighbours.
    assert row.worker_bytes == pytest.approx(2 * 2 * 0.3 * 6 * 1e6, rel=0.01)
    mean = with_own("--method", "own.py:mean").method
    rows = compare_rounds(changed(asked, method=mean), (4,), ("none",), 0.1, 8, 0)
    assert all(":" not in row.name for row in rows)


def test_what_a_method_sends_is_what_travels(own):
    config = with_own("--method", "own.py:choco_momentum", "--workers.num-workers", "3")
    method, model = (
        build_method(config),
        {"w": jax.ShapeDtypeStruct((100,), np.float32)},
    )
    assert isinstance(method.plan, Rounds)
    assert method.model_bytes(model) == sent_bytes(method.plan, None, model)
    assert method.name == "choco_momentum"
    assert isinstance(
        build_method(with_own("--method", "own.py:mean")).plan, GradientMean
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--method own.py:chocomomentum", "no function chocomomentum: did you mean ch"),
        ("--method own.py", "--method takes FILE.py:NAME, a function of yours, got"),
        ("--method none.py:f", "there is no --method file none.py"),
        ("--topology ring", "--topology takes FILE.py:NAME, a function of yours, got"),
        ("--method own.py:one_more", "must return a plan of 4 workers, got one of 5"),
        ("--method own.py:nothing", "must return a Topology, .* Rounds, .* got a plan"),
        ("--method own.py:holds", "a policy of the step alone, .* got holding"),
        ("--method own.py:broken", "raises for 4: KeyError: 4"),
        ("--topology own.py:broken", "topology.make = own.py:broken .* KeyError: 4"),
        ("--method own.py:of_two", "must take the number of workers, .* 'degree'"),
        ("--method own.py:unhashed", "must return a plan that hashes"),
        ("--method own.py:ring --topology.name ring", "topology.name would change"),
        ("--method own.py:ring --topology own.py:ring", "--topology would change noth"),
        ("--topology own.py:ring --topology.name ring", "takes the place of --topolog"),
        ("--method atc --method.delay 1", "delay is an option of --method rounds"),
        ("--method own.py:ring --method.delay 1", "an option of --method rounds: giv"),
        (
            "--method own.py:ring --policy thinning",
            "policy is an option of --method awc or at",
        ),
        (
            "--method own.py:ring --exchange quorum",
            "a quorum merges .* set method to rounds, got own",
        ),
        ("--method own.py:choco_momentum --exchange peers", "exchange.patience to Non"),
        (
            "--method own.py:choco_momentum --step.not-finite quarantine",
            "methods that keep sums add what .* set --step.not-finite to stop",
        ),
        (
            "--method own.py:mean --exchange peers",
            "waits for all workers.* got peers",
        ),
        ("--method own.py:mean --step.message-dtype bfloat16", "sends gradients"),
    ],
)
def test_what_does_not_fit_is_a_sentence(own, options, words, capsys):
    with pytest.raises((ValueError, FileNotFoundError, SystemExit)) as raised:
        with_own(*options.split())
    said = capsys.readouterr().err + str(raised.value)
    assert re.search(words, said), said


def test_values_that_no_worker_has_are_refused_before_a_run_begins(own):
    config = with_own(*SHORT, "--method", "own.py:unsent")
    with pytest.raises(ValueError, match=r"Unsent.travels names 'z', which no worker"):
        train(config, Path("run"))
    assert not Path("run/metrics.jsonl").exists()


def test_a_name_takes_the_place_of_a_configs_own_graph(own):
    made = with_own("--topology", "own.py:ring")
    assert made.topology.make is not None
    named, fields = with_changes(made, ["topology.name=complete"])
    assert named.topology.make is None
    assert named.plan == topology.complete(4)
    assert {"topology.name", "topology.make"} <= set(fields)


def test_a_method_in_a_config_file_is_the_same(own):
    own.write_text(
        OWN + "\nfrom tests import line\n"
        "config = dataclasses.replace(line.NOISY, method=choco_momentum)\n"
    )
    config = load_config(own)
    assert build_method(config).name == "choco_momentum"
    more = changed(config, workers=WorkersConfig(num_workers=5))
    assert build_method(more).plan.num_workers == 5
