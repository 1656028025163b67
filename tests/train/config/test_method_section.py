"""Methods in the trainer: one result alone, on a mesh, as seeds and in a thread."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from decentjax.analysis import traffic
from decentjax.compression import low_rank
from decentjax.topology import complete
from tests import line, rounds_line, tiny
from tests.changes import changed
from tests.run_folders import column
from train.cli.sections import kind_of
from train.config import (
    AllReduceMethod,
    AtcMethod,
    AwcMethod,
    BackgroundExchange,
    DampingPolicy,
    PeerExchange,
    QuorumExchange,
    RoundsMethod,
    TopologyConfig,
    WorkersConfig,
)
from train.run import start_run
from train.run.loop import train
from train.run.resume import Resume
from train.run.setup import make_run
from train.store.log import read_metrics
from train.study.seeds import train_seeds

NOISY = changed(
    line.NOISY,
    name="rounds",
    task=rounds_line.config.task,
    topology=dict(name="complete"),
)
METHODS = {
    "local_sgd": RoundsMethod(every_steps=5),
    "diloco": RoundsMethod(every_steps=5, outer="nesterov"),
    "streaming": RoundsMethod(
        every_steps=6, fragments=2, delay=4, outer="nesterov", merge=("blend", 0.5)
    ),
    "late": RoundsMethod(every_steps=3, delay=3, merge="shift"),
    "int8": RoundsMethod(every_steps=3, delay=3, merge="shift", codec="int8"),
    "sparse": RoundsMethod(
        every_steps=5, outer="nesterov", codec="top_k", sent_share=0.5, error_kept=0.9
    ),
}
COPIES = RoundsMethod(every_steps=1, codec="int8", copies=0.8)
EACH_METHOD = pytest.mark.parametrize("method", METHODS)
# Further ones that a run has to resume, with what they need beside their rounds.
MORE = {
    "noloco": (
        RoundsMethod(every_steps=5, outer="heavy_ball", momentum=0.5),
        {"topology": TopologyConfig(name="random_matching")},
    ),
    "muloco": (METHODS["diloco"], {"optimizer": changed(NOISY.optimizer, name="muon")}),
    "choco": (
        RoundsMethod(
            every_steps=3, delay=2, merge="shift", codec="int4", copies="auto"
        ),
        {"topology": TopologyConfig(name="ring")},
    ),
    "int2": (
        RoundsMethod(
            every_steps=4, delay=3, merge="shift", outer="nesterov", codec="int2"
        ),
        {},
    ),
}


def config_of(method, /, **changes):
    rounds, others = MORE.get(method) or (METHODS[method], {})
    return changed(NOISY, **{"method": rounds, **others, **changes})


def params_of(state):
    return jax.device_get(state.params)


@pytest.mark.slow
@pytest.mark.draw(6)
@EACH_METHOD
def test_a_run_has_the_numbers_of_its_seeds(method, tmp_path):
    config = config_of(method)
    train(config, tmp_path / "alone")
    alone = column(tmp_path / "alone")
    together = train_seeds(make_run(config), range(2), lambda *_: None)
    seeds = [values[0] for _, values in together.losses]
    np.testing.assert_allclose(alone, seeds, rtol=1e-4)
    whole, fragments = traffic(complete(4), 32)[0].worker_bytes.mean(), 2
    # 24 steps: of a fragment of one leaf of two, each.
    sent = {"local_sgd": 4, "diloco": 4, "streaming": 8 / fragments, "late": 8}
    sent = {name: count * whole for name, count in sent.items()}
    # To three peers, of each leaf: four bytes and a scale, or two of four numbers.
    sent |= {"int8": 8 * 3 * 2 * (4 + 4), "sparse": 4 * 3 * 2 * 2 * (4 + 2)}
    assert together.sent["per worker"] == [sent[method] / 24] * 2


PLACES = [
    (method, where)
    for method, rounds in METHODS.items()
    for where in ("simulate", "mesh", "background")
    if where != "background" or rounds.delay > 0  # Else nothing is hidden.
]
PLACES += [("noloco", "mesh"), ("muloco", "simulate")]
PLACES += [("choco", "background"), ("int2", "background")]


@pytest.mark.slow
@pytest.mark.draw(20)
@pytest.mark.parametrize(("method", "where"), PLACES)
def test_a_run_resumes_in_the_middle_of_a_round(method, where, tmp_path):
    """Bit for bit, with what was on its way."""
    config = simulated = config_of(method)
    if where != "simulate":
        config = changed(
            config,
            workers=WorkersConfig(num_workers=4, where="mesh"),
            exchange=kind_of("exchange", {"mesh": "in_step"}.get(where, where))(),
        )
    train(changed(config, num_steps=11), tmp_path / "half")
    resumed = train(config, tmp_path / "half", Resume()).state
    whole = train(config, tmp_path / "whole").state
    jax.tree.map(np.testing.assert_array_equal, params_of(whole), params_of(resumed))
    if where != "simulate":
        wanted = train(simulated, tmp_path / "simulated").state
        jax.tree.map(
            functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6),
            params_of(whole),
            params_of(wanted),
        )


class Square(line.Line):
    """A line whose slope is the sum of a matrix with noise of full rank."""

    def build(self):
        task = super().build()

        def loss_fn(params, model_state, batch, key):
            flat = jax.tree.map(jnp.sum, params)
            loss, rest = task.loss_fn(flat, model_state, batch, None)
            if key is not None:
                loss += (jax.random.normal(key, (6, 4)) * params["w"]).sum()
            return loss, rest

        def score_fn(params, model_state, batch):
            loss, _ = loss_fn(params, model_state, batch, None)
            return {"loss": (loss, jnp.ones(()))}

        params = {"b": jnp.zeros(()), "w": jnp.zeros((6, 4))}
        return task._replace(
            init=lambda key: (params, ()), loss_fn=loss_fn, score_fn=score_fn
        )


@pytest.mark.slow
@pytest.mark.parametrize("where", ["simulate", "mesh", "background"])
def test_factors_of_gradients_train_and_resume(where, tmp_path):
    method = AllReduceMethod(rank=1, begin_at=3)
    names = {"simulate": "auto", "mesh": "in_step"}
    exchange = kind_of("exchange", names.get(where, where))
    workers = dict(where="simulate" if where == "simulate" else "mesh")
    config = changed(NOISY, task=Square(), num_steps=12, method=method)
    config = changed(config, workers=workers, exchange=exchange())
    whole = train(config, tmp_path / "whole").state
    assert any(x.any() for x in jax.tree.leaves(whole.extra.errors))
    train(changed(config, num_steps=7), tmp_path / "half")
    resumed = train(config, tmp_path / "half", Resume()).state
    kept = [jax.device_get((one.params, one.extra)) for one in (whole, resumed)]
    jax.tree.map(np.testing.assert_array_equal, *kept)
    run = make_run(config)
    together = train_seeds(run, range(1), lambda *_: None)
    seeds = [values[0] for _, values in together.losses]
    np.testing.assert_allclose(column(tmp_path / "whole"), seeds, rtol=1e-4)
    whole_bytes, factor_bytes = 4 * (1 + 24), 4 * (1 + 6 + 4)
    mean = 2 * 3 / 4 * (3 * whole_bytes + 9 * factor_bytes) / 12
    assert together.sent["per worker"] == [pytest.approx(mean)]
    model, _ = jax.eval_shape(run.task.init, jax.random.key(0))
    assert run.method.model_bytes(model) == factor_bytes


@pytest.mark.slow
@pytest.mark.parametrize("where", ["simulate", "mesh", "background"])
def test_low_rank_models_train_and_resume(where, tmp_path):
    names = {"simulate": "auto", "mesh": "in_step"}
    every = dict(every_steps=1, delay=1, merge="shift", codec="low_rank")
    config = changed(
        NOISY,
        task=Square(),
        num_steps=12,
        method=RoundsMethod(**every, rank=1, sent_bits=16),
        topology=TopologyConfig(name="one_peer_ring"),
        workers=dict(where="simulate" if where == "simulate" else "mesh"),
        exchange=kind_of("exchange", names.get(where, where))(),
    )
    whole = train(config, tmp_path / "whole").state
    train(changed(config, num_steps=7), tmp_path / "half")
    resumed = train(config, tmp_path / "half", Resume()).state
    kept = [jax.device_get((one.params, one.extra)) for one in (whole, resumed)]
    jax.tree.map(np.testing.assert_array_equal, *kept)
    run = make_run(config)
    together = train_seeds(run, range(1), lambda *_: None)
    seeds = [values[0] for _, values in together.losses]
    np.testing.assert_allclose(column(tmp_path / "whole"), seeds, rtol=1e-4)
    # One message of a step to one neighbor, of six or four rows in 2 bytes.
    assert together.sent["per worker"] == [4 + 2 * (6 + 4) / 2]
    coarse = changed(config, method=dict(rank=2, sent_bits=32, codec="low_rank"))
    other = train(coarse, tmp_path / "other").state
    assert np.abs(params_of(other)["w"] - params_of(whole)["w"]).max() > 1e-3


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rank": 0}, "rank must be at least 1, got 0"),
        ({"rank": 4, "begin_at": -1}, "begin_at must be at least 0, got -1"),
        ({"begin_at": 3}, "set method.rank too"),
        ({"sent_bits": 16}, "set method.rank too"),
        ({"rank": 4, "sent_bits": 8}, "sent_bits must be one of"),
    ],
)
def test_factors_of_no_sense_are_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        AllReduceMethod(**changes)


def test_factors_of_16_bits_are_bfloat16():
    config = changed(tiny.config, method=AllReduceMethod(rank=4, sent_bits=16))
    assert make_run(config).method.plan.compression == low_rank(4, "bfloat16")


TRACKING = {
    "optimizer": changed(NOISY.optimizer, learning_rate=0.01),
    "method": RoundsMethod(every_steps=1, delay=1, tracking=True),
}
LOCAL_TRACKING = {
    "optimizer": changed(NOISY.optimizer, learning_rate=0.01),
    "method": RoundsMethod(every_steps=3, delay=2, merge="shift", tracking=True),
}
SGD = changed(NOISY.optimizer, warmup_steps=2, learning_rate=0.01)
QG = {"optimizer": changed(SGD, name="qg_dsgdm")}
D2 = {
    "topology": TopologyConfig(name="ring", factor=0.5),
    "optimizer": changed(SGD, name="exact_diffusion"),
}
ATC = {"method": AtcMethod()}
ONES = {"method": RoundsMethod(every_steps=1)}


@pytest.mark.slow
@pytest.mark.draw(10)
@pytest.mark.parametrize(
    ("changes", "where"),
    [
        (TRACKING, "simulate"),
        (TRACKING, "mesh"),
        (TRACKING, "background"),
        (LOCAL_TRACKING, "background"),
        (QG | ATC, "simulate"),
        (QG | ATC, "mesh"),
        (QG, "background"),
        (D2 | ATC, "mesh"),
        (D2 | ONES, "simulate"),
        (D2, "background"),
    ],
)
def test_corrections_train_and_resume(changes, where, tmp_path):
    in_thread = where == "background"
    workers = WorkersConfig(num_workers=4, where="mesh" if in_thread else where)
    exchange = kind_of("exchange", where if in_thread else "auto")()
    config = changed(NOISY, **changes, workers=workers, exchange=exchange)
    whole = train(config, tmp_path / "whole").state
    train(changed(config, num_steps=11), tmp_path / "half")
    resumed = train(config, tmp_path / "half", Resume()).state
    jax.tree.map(np.testing.assert_array_equal, params_of(whole), params_of(resumed))
    rows = read_metrics(tmp_path / "whole")
    losses = [row["loss"] for row in rows if "loss" in row]
    assert losses[-1] < losses[0]
    together = train_seeds(make_run(config), range(1), lambda *_: None)
    seeds = [values[0] for _, values in together.losses]
    np.testing.assert_allclose(losses, seeds, rtol=1e-4)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"every_steps": 0}, "every_steps must be at least 1, got 0"),
        ({"every_steps": 3, "delay": 4}, "merged after 4 steps"),
        ({"delay": -1}, "delay must be at least 0"),
        ({"fragments": 0}, "fragments must be at least 1"),
        ({"every_steps": 1, "outer": "nesterov"}, "method.every_steps to 2 or more"),
        ({"momentum": 1.0}, "method.momentum must be less than 1, got 1"),
        ({"merge": "mix"}, "merge must be one of"),
        ({"learning_rate": 0.5}, "method.outer = none has no learning_rate: set metho"),
        ({"momentum": 0.5}, "method.outer = none has no momentum: set method.outer"),
        ({"merge": ("blend", 1.5)}, r"share must be in \[0, 1\], got 1.5"),
        ({"codec": "int8", "sent_share": 0.1}, "method.codec = int8 has no sent_share"),
        ({"codec": "int3"}, "codec must be one of"),
        ({"copies": "auto"}, "method.copies needs encoded models"),
        ({"codec": "int8", "error_kept": 2.0}, r"error_kept must be in \[0, 1\]"),
        ({"codec": "int8", "copies": 0.0}, r"copies in \(0, 1\]"),
        ({"codec": "int2"}, "method.codec = int2 has too large .* set method.copies"),
        ({"codec": "int8", "rank": 4}, "method.codec = int8 has no rank"),
        ({"codec": "low_rank", "rank": 0}, "rank must be at least 1, got 0"),
        ({"codec": "low_rank", "sent_bits": 8}, r"must be one of \(16, 32\), got 8"),
        ({"codec": "top_k", "copies": "auto", "sent_bits": 16}, "sent_bits of top_k"),
        ({"codec": "low_rank", "copies": 0.5}, "low_rank needs models"),
        ({"codec": "low_rank", "error_kept": 0.5}, "low_rank has no error_kept"),
        ({"codec": "low_rank", "outer": "nesterov"}, "low_rank needs models"),
        ({"codec": "int8", "tracking": True}, "leave method.codec at none, got int8"),
    ],
)
def test_rounds_of_no_sense_are_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        RoundsMethod(**changes)


@pytest.mark.parametrize(
    ("changes", "of", "rate"),
    [
        ({"codec": "int8"}, "error_feedback", 1.0),
        ({"codec": "int4"}, "error_feedback", 0.5),
        ({"codec": "top_k", "sent_share": 0.8}, "error_feedback", 0.5),
        ({"codec": "top_k", "copies": "auto"}, "copies", 0.01),
        ({"codec": "int2", "copies": 0.3}, "copies", 0.3),
    ],
)
def test_a_codec_has_the_rate_with_which_workers_come_together(changes, of, rate):
    found = RoundsMethod(**changes).over(complete(3)).compression
    assert (found.kind.name, found.rate_of(0)) == (of, rate)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"exchange": BackgroundExchange()},
            "of rounds method.delay.* set exchange to auto",
        ),
        ({"exchange": PeerExchange(way="swaps")}, "rounds are averaged as they"),
        (
            {
                "step": dict(message_dtype="bfloat16"),
                "method": RoundsMethod(codec="int8"),
            },
            "messages have one form",
        ),
        (
            {"method": COPIES, "topology": dict(name="one_peer_ring")},
            "copies of the peers need a graph that never changes",
        ),
        (
            {"method": METHODS["sparse"], "topology": dict(name="ring")},
            "means over all workers, unlike ring every .*: use the",
        ),
        (
            {
                "method": RoundsMethod(codec="int8"),
                "topology": dict(name="hierarchical"),
                "workers": dict(workers_per_node=2),
            },
            "a codec needs exchanges of single workers, got nodes of 2",
        ),
        (
            {"method": RoundsMethod(every_steps=3, delay=2, tracking=True)},
            "take merge=shift, .* got replace with a delay of 2",
        ),
        (
            {"method": RoundsMethod(every_steps=2, fragments=3)},
            "2 steps can have 1 to 2 fragm",
        ),
    ],
)
def test_where_rounds_cannot_be_is_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        config_of("diloco", **changes)


PEERS, SWAPS = PeerExchange(), PeerExchange(patience=None, way="swaps")
DROPS = {"not_finite": "quarantine"}
NARROW = {"message_dtype": "bfloat16"}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (D2 | {"topology": dict(name="one_peer_ring")}, "use ring with topology.fact"),
        (D2 | {"topology": dict(name="exponential")}, "got exponential, which has"),
        (D2 | {"topology": dict(name="ring")}, "a least eigenvalue of -0.33"),
        (QG | {"method": AllReduceMethod()}, "qg_dsgdm uses the"),
        (LOCAL_TRACKING | D2, "set method to awc or atc, got rounds"),
        (
            D2 | {"method": AwcMethod(policy=DampingPolicy())},
            "set method.policy to fixed",
        ),
        (D2 | {"step": dict(not_finite="quarantine")}, "set step.not_finite to stop"),
        (D2 | {"exchange": PEERS}, "set exchange.patience to None, got 0.0"),
        (D2 | {"exchange": SWAPS}, "set exchange.way to arrived, got swaps"),
        (TRACKING | {"exchange": PEERS}, "set exchange.patience to None, got 0.0"),
        (
            TRACKING | {"exchange": QuorumExchange()},
            "set exchange to .* or peers, got quorum",
        ),
        (LOCAL_TRACKING | {"step": DROPS}, "set step.not_finite to stop, got quarant"),
        (TRACKING | {"step": NARROW}, "set step.message_dtype to None, got bfloat16"),
    ],
)
def test_corrections_that_an_exchange_would_spoil_are_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        changed(NOISY, **changes)


@pytest.mark.slow
def test_rounds_longer_than_the_run_are_warned_of(tmp_path, capsys):
    rounds = RoundsMethod(every_steps=10)
    config = changed(config_of("local_sgd", method=rounds), num_steps=5)
    train(config, tmp_path)
    assert "= 10 is more than num_steps = 5: the run has 0 rounds" in (
        capsys.readouterr().err
    )


def test_more_fragments_than_leaves_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(start_run, "build_steps", None)
    rounds = RoundsMethod(every_steps=8, fragments=5)
    config = changed(config_of("diloco"), method=rounds)
    with pytest.raises(ValueError, match="no leaf falls into the fragments"):
        train(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_copies_of_peers_hold_what_workers_have(tmp_path):
    """CHOCO-SGD: with each message the copy is nearer to the model."""
    ring, task = TopologyConfig(name="ring"), line.NOISY.task
    config = config_of("int8", method=COPIES, topology=ring, task=task)
    state = train(config, tmp_path).state
    known, params = state.extra.coded.memory, jax.tree.leaves(state.params)
    # One level of 127 of the last change of a step.
    for number, copy in known.items():
        np.testing.assert_allclose(copy, params[number], atol=0.02)
