"""Checkpoints of rounds that version 0.3.0 wrote."""

import tarfile

import jax
import pytest

from tests import line
from tests.changes import changed
from tests.checkout import ROOT
from tests.trees import assert_close
from train.config import RoundsMethod
from train.run.loop import train
from train.store.checkpoints import restore

ROUNDS = {
    "streaming": dict(every_steps=4, fragments=2, outer="nesterov", codec="int8"),
    "tracking": dict(every_steps=2, tracking=True),
    "copies": dict(every_steps=1, codec="int4", copies=True),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ROUNDS)
def test_they_hold_what_this_version_trains(name, tmp_path):
    with tarfile.open(ROOT / "tests" / "rounds_0.3.0.tar.xz") as kept:
        kept.extractall(tmp_path, filter="data")
    graph = "complete" if name == "streaming" else "ring"
    config = changed(
        line.config,
        num_steps=11,
        topology=dict(name=graph),
        method=RoundsMethod(delay=1, **ROUNDS[name]),
    )
    state = train(config, tmp_path / "run").state
    found = restore(tmp_path / "rounds_0.3.0" / name, state)
    assert jax.tree.structure(found) == jax.tree.structure(state)
    assert_close(found, state, rtol=1e-6)
