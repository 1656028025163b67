"""Sections of a config of which there are several kinds."""

import json
import math

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
    DistributedConfig,
    GroupExchange,
    HoldingPolicy,
    PeerExchange,
    QuorumExchange,
    StepConfig,
    TopologyConfig,
)
from train.run.method import build_method

RING = changed(tiny.config, topology=dict(name="ring"))
PAIRS = [(section, name) for section, kinds in KINDS.items() for name in kinds]


@pytest.mark.parametrize(("section", "name"), PAIRS)
def test_a_section_of_each_kind_is_written_and_read(section, name):
    topology = TopologyConfig(name="butterfly_groups", mean_every=4)
    groups = changed(RING, topology=topology)
    rounds = changed(RING, step=StepConfig(algorithm="rounds"))
    whole = {"groups": groups, "quorum": rounds}.get(name, RING)
    config = changed(whole, **{section: kind_of(section, name)()})
    fields = json.loads(to_json(config))
    assert fields[section]["kind"] == name
    assert from_fields(fields) == config
    others = [field for field, *_ in from_defaults(fields)]
    assert (section in others) == (name not in ("auto", "fixed"))


def test_a_name_gives_a_section_its_kind_and_its_options():
    given = ["--exchange", "peers", "--seed", "1", "--policy=holding"]
    config, rest = take_sections(RING, given)
    assert (config.exchange, config.policy) == (PeerExchange(), HoldingPolicy())
    assert rest == ["--seed", "1"]
    # That of the config keeps its fields.
    own = changed(RING, exchange=PeerExchange(patience=3.0))
    assert take_sections(own, ["--exchange", "peers"])[0] == own


def test_a_learning_rate_alone_is_that_of_the_optimizer():
    given = ["--learning_rate", "0.5", "--rounds.learning-rate", "0.6"]
    _, rest = take_sections(RING, given)
    assert rest == ["--optimizer.learning-rate", *given[1:]]


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


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--exchange", "perrs"], "got perrs: did you mean peers?"),
        (["--exchange"], "exchange must be one of auto, .* groups, got"),
        (["--policy", "damped"], "one of fixed, .*, got damped: did you mean dampi"),
        (["--exchange.patience", "1"], "peers or quorum or groups: give that too"),
        (["--policy.per-epoch=2"], "an option of --policy thinning: give that too"),
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
    fields = json.loads(to_json(RING))
    if isinstance(wanted, GroupExchange):
        fields["topology"] |= {"name": "butterfly_groups", "mean_every": 4}
    assert from_fields({**fields, "exchange": OLD | exchange}).exchange == wanted


POLICY = {
    **{"name": "fixed", "degree": 16, "per_epoch": 2.0, "least": 2, "epoch_steps": 60},
    **{"graphs": [], "target": 0.02, "slack": 0.2, "measure": "gini"},
    **{"every_steps": 10, "power": 1.0, "levels": 8},
}


@pytest.mark.parametrize("name", KINDS["policy"])
def test_the_policy_of_a_config_of_0_2_is_read(name):
    fields = json.loads(to_json(RING))
    made = from_fields({**fields, "policy": POLICY | {"name": name}}).policy
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


@pytest.mark.parametrize("algorithm", ["awc", "atc", "all_reduce", "rounds"])
def test_the_unused_rounds_of_a_config_of_0_2_are_those_of_today(algorithm):
    config = changed(RING, step=StepConfig(algorithm=algorithm))
    fields = json.loads(to_json(config))
    fields |= {"exchange": OLD | {"where": "auto"}, "policy": POLICY}
    fields["rounds"] |= ROUNDS
    assert from_fields(fields) == config
    build_method(from_fields(fields))
    # What the run took with copies it takes still.
    fields["rounds"] |= {"copies": True, "codec": "int8"}
    assert from_fields(fields).rounds.copy_step == 1.0
