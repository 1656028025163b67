"""Durations of a config on a command line, and fields in errors."""

import pytest

from tests import tiny
from train.cli.changes import with_fields
from train.config import CheckpointConfig, Config, PeerExchange

FIELDS = ("exchange.patience", "distributed.step_deadline")


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize(
    ("text", "wanted"), [("1500ms", 1.5), ("2min", 120.0), ("3", 3.0), ("2.", 2.0)]
)
def test_a_duration_may_have_a_unit(field, text, wanted):
    changes = {"exchange": "peers", "step.algorithm": "awc", "topology.name": "ring"}
    made = with_fields(tiny.config, {**changes, field: text})
    section, _, name = field.partition(".")
    assert getattr(getattr(made, section), name) == wanted


@pytest.mark.parametrize(
    ("field", "text", "wanted"),
    [
        ("exchange.patience", "5x", "takes, for example, None or 500ms or auto, got"),
        ("exchange.silent-seconds", "5x", "a number with one of the units ns, us, "),
        ("exchange.silent-seconds", "9ms", "at least 1, got 0.009"),
        ("data.skew", "dirichlet:0.1", "takes, for example, None or dirichlet 0.1, go"),
        ("optimizer.name", "adamv", "or adamw or adam or lion or muon or sgd or"),
        ("optimizer.decay", "cosin", "FILE.py:NAME, got 'cosin': did you mean 'cosi"),
        ("checkpoint.every_steps", "0", "must be at least 1, got 0"),
        ("topology.degree", "9999", "must be at most 4,096, got 9,999"),
        ("optimizer.b1", "2", "must be in [0, 1), got 2.0"),
    ],
)
def test_an_option_is_named_as_it_is_typed(field, text, wanted, capsys):
    with pytest.raises(SystemExit):
        with_fields(tiny.config, {"exchange": "peers", field: text})
    said = capsys.readouterr().err
    assert said.startswith(f"error: --{field.replace('_', '-')}")
    assert wanted in said


@pytest.mark.parametrize(
    ("make", "wanted"),
    [
        (lambda: CheckpointConfig(every_steps=0), r"^checkpoint\.every_steps must be"),
        (lambda: PeerExchange(silent_seconds=0.5), r"^exchange\.silent_seconds must "),
        (
            lambda: Config(name="x", num_steps=-3, task=tiny.config.task),
            "^num_steps must be",
        ),
    ],
)
def test_a_field_of_a_file_is_named_with_its_section(make, wanted):
    with pytest.raises(ValueError, match=wanted):
        make()
