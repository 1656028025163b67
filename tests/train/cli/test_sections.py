"""Sections of a config of which there are several kinds."""

import json
import math

import numpy as np
import pytest

from decentjax.gossip import AutoPatience
from tests import tiny
from tests.changes import changed
from train.__main__ import main
from train.cli.changes import with_fields
from train.cli.config_json import from_defaults, from_fields, to_json
from train.cli.old_config import upgraded
from train.cli.sections import (
    KINDS,
    full_name,
    kind_of,
    take_sections,
    with_a_shorter_warmup,
)
from train.config import (
    AllReduceMethod,
    AtcMethod,
    AwcMethod,
    DistributedConfig,
    GroupExchange,
    HoldingPolicy,
    OptimizerConfig,
    PeerExchange,
    QuorumExchange,
    RoundsMethod,
    TopologyConfig,
    build_schedule,
)
from train.config.graph import graph_names
from train.fields import PAPERS

RING = changed(tiny.config, topology=dict(name="ring"))
FLAT = changed(RING, workers=dict(workers_per_node=1))
PAIRS = [(section, name) for section, kinds in KINDS.items() for name in kinds]


@pytest.mark.parametrize(("section", "name"), PAIRS)
def test_a_section_of_each_kind_is_written_and_read(section, name):
    topology = TopologyConfig(name="butterfly_groups", mean_every=4)
    groups = changed(RING, topology=topology)
    rounds = changed(RING, method=RoundsMethod())
    whole = {"groups": groups, "quorum": rounds}.get(name, RING)
    value = kind_of(section, name)()
    outer, _, inner = section.rpartition(".")
    config = changed(whole, **{outer or inner: {inner: value} if outer else value})
    fields = json.loads(to_json(config))
    found = fields[outer][inner] if outer else fields[inner]
    assert found["kind"] == name
    assert from_fields(fields) == config
    others = [field for field, *_ in from_defaults(fields)]
    assert (section in others) == (name not in ("auto", "awc", "fixed"))


def test_a_name_gives_a_section_its_kind_and_its_options():
    given = ["--exchange", "peers", "--seed", "1", "--policy=holding"]
    config, rest = take_sections(RING, given)
    method = AwcMethod(policy=HoldingPolicy())
    assert (config.exchange, config.method) == (PeerExchange(), method)
    assert rest == ["--seed", "1"]
    # That of the config keeps its fields, and its policy in another method.
    own = changed(
        RING, exchange=PeerExchange(patience=3.0), method=RoundsMethod(delay=1)
    )
    assert take_sections(own, ["--exchange", "peers", "--method", "rounds"])[0] == own
    after, _ = take_sections(config, ["--method", "atc"])
    assert after.method == AtcMethod(policy=HoldingPolicy())


def test_the_options_of_earlier_versions_are_those_of_the_method():
    given = ["--step.algorithm", "rounds", "--rounds.every-steps", "4"]
    config, rest = take_sections(RING, given)
    assert config.method == RoundsMethod()
    assert rest == ["--method.every-steps", "4"]
    _, rest = take_sections(RING, ["--policy=thinning", "--policy.degree=4"])
    assert rest == ["--method.policy.degree=4"]


PAPER_NAMES = sorted(PAPERS.keys() - set(graph_names()))


@pytest.mark.parametrize("name", PAPER_NAMES)
def test_what_papers_call_a_method_or_a_graph_is_taken_or_spelled_out(name):
    option = "topology.name" if PAPERS[name] in graph_names() else "method"
    ring = changed(RING, workers=dict(num_workers=8, workers_per_node=1))
    wanted = with_fields(ring, options_of(f"--{option} {PAPERS[name]}"))
    if " " not in PAPERS[name]:
        assert with_fields(ring, {option: name.upper().replace("_", "-")}) == wanted
        return
    with pytest.raises(ValueError, match=f"{name} is --method {PAPERS[name]}: give"):
        with_fields(ring, {option: name})


def options_of(line):
    """Fields of a command line; a flag has no value."""
    words = (one.partition(" ") for one in line.removeprefix("--").split(" --"))
    return {name: value for name, _, value in words}


def test_a_graph_of_papers_is_hinted_at_in_a_config():
    with pytest.raises(ValueError, match="got 'exp': did you mean 'exponential'"):
        TopologyConfig(name="exp")


def test_a_learning_rate_alone_is_that_of_the_optimizer():
    given = ["--learning_rate", "0.5", "--rounds.learning-rate", "0.6"]
    _, rest = take_sections(RING, [*given, "--method", "rounds"])
    assert rest == ["--optimizer.learning-rate", "0.5", "--method.learning-rate", "0.6"]


def test_fields_may_be_called_as_they_are_elsewhere():
    given = ["--lr", "1e-3", "--optimizer.wd=0.1", "--bs", "7", "--batch_size=8"]
    config, rest = take_sections(RING, [*given, "--steps", "9", "--seed=--lr"])
    assert rest == [
        *("--optimizer.learning-rate", "1e-3", "--optimizer.weight-decay=0.1"),
        *("--step.batch-per-worker", "7", "--step.batch-per-worker=8"),
        *("--steps", "9", "--seed=--lr"),
    ]
    assert full_name("step.lr") == "step.lr"  # No field of that section.
    found = with_fields(RING, {"lr": "0.5", "bs": "3"}, "--vary")
    assert found.optimizer.learning_rate == 0.5
    assert found.step.batch_per_worker == 3
    assert config == changed(RING, optimizer=config.optimizer)


def test_a_short_run_has_a_short_warm_up():
    long = changed(RING, num_steps=100, optimizer=dict(warmup_steps=50))
    for options, warmup in [
        (["--num-steps", "10"], 5),
        (["--num-steps=50"], 25),
        (["--num-steps", "1"], 0),
        (["--num-steps", "51"], 50),
        (["--num-steps", "10", "--optimizer.warmup-steps", "9"], 50),
        (["--optimizer.warmup_steps=9", "--num_steps=10"], 50),
        (["--seed", "10"], 50),
    ]:
        found = with_a_shorter_warmup(long, options)
        assert found.optimizer.warmup_steps == warmup, options
    assert long.optimizer.warmup_steps == 50


def test_a_warm_up_that_is_not_given_fits_the_run_in_a_file_too():
    for num_steps, decay, warmup in [
        (20, {}, 10),
        (1000, {}, 50),
        (1, {}, 0),
        (1, {"decay": "inverse_sqrt"}, 1),
        (1000, {"decay": "steps", "decay_steps": (30, 60)}, 29),
    ]:
        config = changed(RING, num_steps=num_steps, optimizer=OptimizerConfig(**decay))
        fields = json.loads(to_json(config))
        assert fields["optimizer"]["warmup_steps"] == warmup
        rates = build_schedule(config.optimizer, num_steps)(np.arange(num_steps + 1))
        assert np.argmax(rates) == warmup
        names = [name for name, *_ in from_defaults(fields)]
        assert ("optimizer.warmup_steps" in names) == bool(decay)
        assert with_a_shorter_warmup(config, ["--num-steps", "2"]) is config


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--exchange", "perrs"], "got perrs: did you mean peers?"),
        (["--exchange"], "exchange must be one of auto, .* groups, got"),
        (
            ["--policy", "damped"],
            "one of fixed, .*, got damped: did you mean dampi",
        ),
        (["--exchange.patience", "1"], "peers or quorum or groups: give that too"),
        (["--exchange=quorum", "--exchange.elastic"], "of --exchange peers: give"),
        (["--policy.per-epoch=2"], "an option of --policy thinning: give that too"),
        (["--method.codec", "int8"], "an option of --method rounds: give that too"),
        (
            ["--method", "rounds", "--policy", "merged"],
            "--policy is an option of --method awc or atc: give that too",
        ),
        (["--method", "adw"], "all_reduce, or FILE.py:NAME, got adw: did you mean awc"),
    ],
)
def test_what_no_kind_has_is_refused(options, words):
    with pytest.raises(ValueError, match=words):
        take_sections(RING, options)


def test_without_a_patience_a_step_waits_for_ever_and_one_may_adapt():
    for kind in (PeerExchange, GroupExchange, QuorumExchange):
        assert kind(patience=2.5).waits == 2.5
        if kind is not QuorumExchange:
            assert kind(patience=None).waits == math.inf
        if kind is not GroupExchange:
            assert kind(patience="auto").waits == AutoPatience()


def test_help_lists_the_options_of_the_chosen_kind(capsys):
    for kind, has_patience in (("auto", False), ("peers", True)):
        with pytest.raises(SystemExit):
            main(["quickstart", "--exchange", kind, "--help"])
        assert ("--exchange.patience" in capsys.readouterr().out) == has_patience


OLD = {
    **{"way": "arrived", "patience": 0.0, "bind": "127.0.0.1", "addresses": []},
    **{"secret_file": None, "elastic": False, "quorum": 1, "silent_seconds": 5.0},
}


@pytest.mark.parametrize(
    ("exchange", "wanted"),
    [
        ({"where": "auto"}, kind_of("exchange", "auto")()),
        ({"where": "background"}, kind_of("exchange", "background")()),
        ({"where": "peers", "patience": 2.0}, PeerExchange(patience=2.0)),
        ({"where": "peers", "way": "swaps"}, PeerExchange(way="swaps")),
        ({"where": "peers", "elastic": True}, PeerExchange(elastic=True)),
        ({"where": "peers", "way": "wagma"}, GroupExchange()),
        (
            {"where": "peers", "way": "wagma", "patience": None},
            GroupExchange(patience=None),
        ),
    ],
)
def test_the_exchange_of_a_config_of_0_2_is_read(exchange, wanted):
    fields = as_0_3(RING, exchange=OLD | exchange)
    if isinstance(wanted, GroupExchange):
        fields["topology"] |= {"name": "butterfly_groups", "mean_every": 4}
    assert from_fields(fields).exchange == wanted


POLICY = {
    **{"name": "fixed", "degree": 16, "per_epoch": 2.0, "least": 2, "epoch_steps": 60},
    **{"graphs": [], "target": 0.02, "slack": 0.2, "measure": "gini"},
    **{"every_steps": 10, "power": 1.0, "levels": 8},
}


@pytest.mark.parametrize("name", KINDS["method.policy"])
def test_the_policy_of_a_config_of_0_2_is_read(name):
    fields = as_0_3(RING) | {"policy": POLICY | {"name": name}}
    made = from_fields(fields).method.policy
    assert made.name == name
    for field, value in vars(made).items():
        assert value == (tuple(POLICY[field]) if field == "graphs" else POLICY[field])


@pytest.mark.parametrize(
    ("old", "words"),
    [
        ({"exchange": OLD | {"where": "peers", "way": "push_sum"}}, "push_sum, which"),
        ({"policy": POLICY | {"levels": 3}}, "levels = 3, which is no longer an"),
    ],
)
def test_what_is_gone_is_refused_by_name(old, words):
    with pytest.raises(ValueError, match=f"{words}.* decentjax 0.2"):
        upgraded(old)


def test_a_deadline_is_a_number_learned_or_none():
    assert DistributedConfig().deadline is None
    assert DistributedConfig(step_deadline=None).deadline == math.inf
    assert DistributedConfig(step_deadline=5).deadline == 5
    for wrong in (0.5, -1.0, "soon", math.inf):
        with pytest.raises(ValueError, match="step_deadline must be"):
            DistributedConfig(step_deadline=wrong)


def test_the_time_limit_of_an_old_config_is_left_out():
    old = {"task": {}, "distributed": {"timeout_seconds": 300, "start_seconds": 9}}
    assert upgraded(old)["distributed"] == {"start_seconds": 9}


ROUNDS = {"copies": False, "copy_step": 1.0, "codec": "none"}
OF_0_4 = {
    "topology": {"seed": 0},
    "optimizer": {"decay_factor": 0.1, "momentum": 0.5, "make": None, "schedule": None},
    "straggler": {"kind": "rotating", "who": [0], "seconds": 0.3, "deviation": 0.1},
}
QUORUM = {
    **{"weights": "tokens", "discount": 0.5, "guard": "none", "guard_ratio": 5.0},
    **{"oldest": None, "trimmed": 0},
}


def as_0_4(config, **sections):
    """The fields of a config, with those that it had in 0.4."""
    fields = json.loads(to_json(config))
    for section, own in (OF_0_4 | sections).items():
        fields[section] = fields.get(section, {}) | own
    return fields


def test_fields_that_are_gone_are_read_where_they_say_the_same():
    quorum = changed(FLAT, method=RoundsMethod(), exchange=QuorumExchange())
    assert from_fields(as_0_4(quorum, exchange=QUORUM)) == quorum
    sgd = changed(FLAT, optimizer=dict(name="sgd", b1=0.5))
    assert from_fields(as_0_4(sgd, optimizer={"momentum": 0.5, "b1": 0.9})) == sgd
    own = {"make": "a.py:f", "schedule": "a.py:g", "decay_steps": [1], "decay": "steps"}
    read = upgraded(as_0_4(FLAT, optimizer=own))["optimizer"]
    wanted = {"name": "a.py:f", "decay": "a.py:g", "decay_steps": []}
    assert read.items() >= wanted.items()
    old = {"merge": "blend", "share": 0.2, "codec": "int8", "copies": True}
    rounds = changed(FLAT, method=RoundsMethod())
    for step, copies in ((0.3, 0.3), (None, "auto")):
        method = from_fields(as_0_4(rounds, method=old | {"copy_step": step})).method
        assert (method.merge, method.copies) == (("blend", 0.2), copies)


@pytest.mark.parametrize(
    ("section", "own", "words"),
    [
        ("exchange", {"guard": "clip"}, "guard = clip, .* set exchange.merge to a fu"),
        (
            "topology",
            {"seed": 3},
            "seed = 3, not 0, .* set topology.make to a fu",
        ),
        ("optimizer", {"decay_factor": 0.5}, "set optimizer.decay to a function of yo"),
        (
            "optimizer",
            {"name": "muon"},
            "momentum = 0.5, not 0.9, .* optimizer.na",
        ),
        (
            "method",
            {"policy": {"kind": "damping", "power": 2.0}},
            "power = 2.0, .* meth",
        ),
    ],
)
def test_fields_that_are_gone_are_refused_with_another_value(section, own, words):
    fields = as_0_4(FLAT)
    fields[section] |= own
    with pytest.raises(ValueError, match=words):
        from_fields(fields)


def as_0_3(config, **sections):
    """The fields of a config, as versions before wrote its method."""
    fields = json.loads(to_json(config))
    own = fields.pop("method")
    fields["step"]["algorithm"] = own.pop("kind")
    fields["policy"] = own.pop("policy", {"kind": "fixed"})
    return fields | {"rounds": own, "method": None} | sections


@pytest.mark.parametrize(
    "method",
    [
        AwcMethod(policy=HoldingPolicy(target=0.2)),
        AtcMethod(),
        RoundsMethod(every_steps=4, codec="int8", tracking=False),
        AllReduceMethod(),
    ],
)
def test_a_method_of_three_sections_is_read_as_one(method):
    config = changed(FLAT, method=method)
    fields = as_0_3(config)
    assert upgraded(fields)["method"]["kind"] == method.name
    assert from_fields(fields) == config
    if method.name != "rounds":  # Rounds that no step took meant nothing.
        assert from_fields(fields | {"rounds": {"every_steps": 3}}) == config


def test_an_own_method_of_an_earlier_config_stays():
    fields = as_0_3(RING, method="own.py:mine")
    assert upgraded(fields)["method"] == "own.py:mine"
    assert upgraded(fields).keys() == json.loads(to_json(RING)).keys()


@pytest.mark.parametrize("algorithm", ["awc", "atc", "all_reduce", "rounds"])
def test_the_unused_rounds_of_a_config_of_0_2_are_those_of_today(algorithm):
    config = changed(FLAT, method=kind_of("method", algorithm)())
    fields = as_0_3(config, exchange=OLD | {"where": "auto"}, policy=POLICY)
    fields["rounds"] |= ROUNDS
    assert from_fields(fields) == config
    # What the run took with copies it takes still.
    fields["rounds"] |= {"copies": True, "codec": "int8"}
    if algorithm == "rounds":
        assert from_fields(fields).method.copies == 1.0
