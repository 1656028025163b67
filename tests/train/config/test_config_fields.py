"""Each field of a config matters on each way that trains it, or is refused there."""

import dataclasses
import functools
import tempfile
import typing
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from decentjax import topology
from tests.changes import changed
from tests.checkout import ROOT
from tests.paths import PLAIN, SPOILT, WAYS, effect, of_the_clock
from train.cli.sections import KINDS, kind_of
from train.config import (
    AtcMethod,
    AwcMethod,
    Config,
    RoundsMethod,
    TopologyConfig,
    WorkersConfig,
)


def on(name: str, workers: int = 4, per_node: int = 1, **options: Any):
    """Changes of a config: its graph and its workers."""
    return {
        "topology": TopologyConfig(name=name, **options),
        "workers": WorkersConfig(num_workers=workers, workers_per_node=per_node),
    }


def rounds(graph: str = "ring", **options: Any):
    """Changes of a config: rounds."""
    every = {"every_steps": 2, **options}
    return {"method": RoundsMethod(**every), "topology": TopologyConfig(name=graph)}


def adapts(kind: str, **options: Any):
    """Changes of a config: a policy."""
    method = AwcMethod(policy=kind_of("method.policy", kind)(**options))
    return on("ring", 6) | {"method": method}


def optimizer(**options: Any):
    """Changes of a config: its optimizer."""
    return {"optimizer": changed(PLAIN.optimizer, **options)}


# Another value than its default, and changes of the config in which it matters.
OTHERS = {
    "num_steps": (7, {}),
    "workers.num_workers": (2, {}),
    "workers.workers_per_node": (2, on("hierarchical")),
    "topology.name": ("complete", on("ring")),
    "topology.degree": (4, on("ring_lattice", 6)),
    "topology.group_size": (4, on("butterfly_groups", group_size=2)),
    "topology.period": (2, on("random_matching")),
    "topology.between": ("complete", on("hierarchical", 8, 2)),
    "topology.factor": (0.5, {}),
    "topology.mean_every": (2, on("ring")),
    "topology.make": (topology.complete, on("ring")),
    "method.policy.thinning.degree": (2, adapts("thinning")),
    "method.policy.thinning.per_epoch": (0.5, adapts("thinning", epoch_steps=1)),
    "method.policy.thinning.epoch_steps": (1, adapts("thinning", per_epoch=3.0)),
    "method.policy.holding.graphs": (("ring", "alone"), adapts("holding")),
    "method.policy.holding.target": (
        9.0,
        adapts("holding", target=1e-6, every_steps=1),
    ),
    "method.policy.holding.every_steps": (1, adapts("holding", target=9.0)),
    "method": (topology.complete, on("ring")),
    "method.atc": (AtcMethod(), {}),
    "step.batch_per_worker": (3, {}),
    "step.num_micro_batches": (2, {}),
    "step.message_dtype": ("bfloat16", {}),
    "step.not_finite": ("quarantine", {"task": SPOILT.task}),
    "step.xla_options": (("xla_dump_to=FOLDER",), {}),
    "method.rounds.every_steps": (3, rounds()),
    "method.rounds.fragments": (2, rounds()),
    "method.rounds.delay": (1, rounds()),
    "method.rounds.outer": ("nesterov", rounds("complete")),
    "method.rounds.learning_rate": (0.3, rounds("complete", outer="nesterov")),
    "method.rounds.momentum": (0.5, rounds("complete", outer="nesterov")),
    "method.rounds.merge": ("shift", rounds(delay=2)),
    "method.rounds.codec": ("int4", rounds()),
    "method.rounds.sent_share": (0.6, rounds(codec="top_k", copies="auto")),
    "method.rounds.sent_bits": (4, rounds(codec="top_k", copies="auto")),
    "method.rounds.copies": ("auto", rounds(codec="int4")),
    "method.rounds.tracking": (True, rounds(every_steps=1, delay=1)),
    "optimizer.name": ("sgd", {}),
    "optimizer.learning_rate": (0.2, {}),
    "optimizer.initial_learning_rate": (0.01, optimizer(warmup_steps=2)),
    "optimizer.warmup_steps": (2, {}),
    "optimizer.decay": ("cosine", {}),
    "optimizer.final_learning_rate": (0.09, optimizer(decay="cosine")),
    "optimizer.decay_steps": ((1,), {}),
    "optimizer.accum_steps": (1, optimizer(name="accum_adam")),
    "optimizer.b1": (0.5, {}),
    "optimizer.b2": (0.5, {}),
    "optimizer.eps": (1.0, {}),
    "optimizer.clip_norm": (1e-3, optimizer(name="sgd")),
}
# These change what is read, saved, shown or waited for, and not what is trained.
ELSEWHERE = {
    "name": "test_command",
    "task": "test_tasks",
    "seed": "test_compare",  # K seeds have numbers of their own.
    "data.num_processes": "test_batches",
    "data.skew": "test_batches",
    "workers.devices_per_worker": "test_array_placement",  # The numbers stay the same.
    "workers.processes_per_worker": "test_worker_jobs",
    "workers.where": "test_array_placement",
    "optimizer.weight_decay": "test_optimizer_state",
    # A scalar is encoded almost as it is, and has no factors.
    "method.rounds.error_kept": "test_method_section",
    "method.rounds.rank": "test_method_section",
    "method.all_reduce": "test_method_section",
    "exchange.peers": "test_peer_run",
    "exchange.quorum": "test_quorum_job",
    "exchange.groups": "test_peer_run",
    "evaluation": "test_loop",
    "checkpoint": "test_checkpoint",
    "log": "test_sinks",
    "distributed": "test_distributed",
    "on_step": "test_own_task",
    "on_evaluation": "test_own_task",
}


def all_fields() -> set[str]:
    """The names of all fields, those of a section's kinds with that of the kind."""
    found, hints = {"method", "method.atc"}, typing.get_type_hints(Config)
    for section, hint in (hints | KINDS).items():
        kinds = {section: hint}
        if section in KINDS:
            kinds = {f"{section}.{name}": x for name, x in KINDS[section].items()}
        for prefix, kind in kinds.items():
            if not dataclasses.is_dataclass(kind):
                found.add(prefix)
                continue
            found |= {f"{prefix}.{one.name}" for one in dataclasses.fields(kind)}
    return found - {"method.awc.policy", "method.atc.policy"}  # A section.


def test_every_field_is_looked_at():
    files = {path.stem for path in (ROOT / "tests").rglob("test_*.py")}
    assert {*ELSEWHERE.values()} <= files
    seen = {
        name
        for name in all_fields()
        if name in OTHERS or any(name.startswith(one) for one in ELSEWHERE)
    }
    assert seen == all_fields()
    assert OTHERS.keys() <= all_fields()


@functools.cache
def effect_of_defaults(way, config: Config) -> object:
    with tempfile.TemporaryDirectory() as folder:
        return effect(way, config, Path(folder))


@pytest.mark.slow
@pytest.mark.draw(40)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("field", OTHERS)
def test_a_field_matters_wherever_a_config_trains(field, way, tmp_path):
    value, changes = OTHERS[field]
    plain = changed(PLAIN, **{"num_steps": 6, **changes})
    if field == "step.xla_options":
        value = (f"xla_dump_to={tmp_path / 'dump'}",)
        if way is not of_the_clock:  # Which has no mesh.
            plain = changed(plain, workers=dict(where="mesh"))
    try:
        section, *names = field.split(".")
        if names and not dataclasses.is_dataclass(value):
            value = {names[-1]: value}
            value = {"policy": value} if "policy" in names else value
        found = effect(way, changed(plain, **{section: value}), tmp_path)
    except ValueError as error:
        found = str(error)
    if field == "step.xla_options":
        names = [path.name for path in (tmp_path / "dump").iterdir()]
        # Besides what is compiled to check the option.
        is_used = any("jit_nothing" not in name for name in names)
        assert is_used == (way is not of_the_clock)
        return
    wanted = effect_of_defaults(way, plain)
    if isinstance(found, str) and field != "step.not_finite":
        assert way is of_the_clock  # Which has no rounds, no policy, and no groups.
    else:
        assert found != wanted
    if field == "step.not_finite":
        assert "not finite" in wanted or "nan" in wanted
        assert np.isfinite(jnp.asarray(found)).all()
