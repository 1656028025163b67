"""Workers whose numbers are no longer finite, and who go on all the same."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from decentjax import (
    WorkerState,
    gossip,
    init_state,
    local_update,
    methods,
    on_mesh,
    simulate,
    worker_mesh,
)
from tests import line
from tests.changes import changed
from tests.trees import assert_close
from train.config import AutoExchange, BackgroundExchange
from train.run.loop import train
from train.run.nonfinite import QUARANTINED, quarantined, watch_gradients
from train.run.resume import Resume
from train.store.log import read_metrics

STEP = changed(line.config.step, not_finite="quarantine")


def poisoned(poison: str, **fields):
    """At step 9 a number of worker 2 is not finite."""
    task = line.Line(poison=poison, poison_step=9, poison_worker=2)
    config = changed(line.config, task=task, step=STEP, num_steps=20)
    return changed(config, **fields)


@pytest.mark.parametrize("wrong", ["gradient", "model state", "update"])
def test_an_update_that_is_not_finite_is_dropped_whole(wrong):

    def loss_fn(params, model_state, batch, key):
        loss = jnp.sum(params["x"] * jnp.where(batch > 0, batch, jnp.nan))
        seen = {"seen": batch if wrong == "model state" else model_state["seen"]}
        if wrong == "model state":
            loss = jnp.sum(params["x"])
        elif wrong == "update":
            loss = jnp.sum(-params["x"] * jnp.where(batch > 0, 1e-30, 1e18))
        return loss, (seen, {})

    optimizer = optax.chain(watch_gradients(), optax.sgd(1e25, momentum=0.9))
    local = local_update(loss_fn, optimizer)
    params = {"x": jnp.full(3, 0.1)}
    mixed = {"x": jnp.full(3, 0.05)}
    state = WorkerState(
        params, optimizer.init(params), {"seen": jnp.float32(7)}, jax.random.key(0)
    )
    right, wrong_batch = jnp.float32(2.0), jnp.float32(-1.0)
    if wrong == "model state":
        wrong_batch = jnp.float32(np.nan)
    wanted, _ = local(state, right, mixed)
    found, metrics = quarantined(local)(state, right, mixed)
    assert metrics[QUARANTINED] == 0
    assert_close(found[:3], wanted[:3])
    found, metrics = quarantined(local)(state, wrong_batch, mixed)
    assert metrics[QUARANTINED] == 1
    np.testing.assert_array_equal(found.params["x"], mixed["x"])
    assert found.model_state["seen"] == 7
    np.testing.assert_array_equal(found.opt_state[1][0].trace["x"], 0)
    assert found.opt_state[0].count == 1
    assert found.opt_state[0].total == (wrong == "gradient")


PLACES = {"simulated": {}, "mesh": {"where": "mesh"}, "background": {"where": "mesh"}}


@pytest.mark.slow
@pytest.mark.draw(5)
@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize(
    ("poison", "leaf"), [("batch", "b"), ("loss", "b"), ("gradient", "w")]
)
def test_the_others_train_on_and_nothing_spreads(poison, leaf, where, tmp_path, capsys):
    workers = changed(line.config.workers, **PLACES[where])
    exchange = BackgroundExchange() if where == "background" else AutoExchange()
    config = poisoned(poison, workers=workers, exchange=exchange)
    outcome = train(config, tmp_path / "run")
    assert outcome.step == 20
    for x in jax.tree.leaves((outcome.state.params, outcome.state.opt_state)):
        assert np.isfinite(x).all()
    message = (
        "1 gradients of worker 2 were not finite, since step 9 in "
        f"params['{leaf}']: it took its neighbours' average"
    )
    assert capsys.readouterr().err.count(message) == 1
    rows = read_metrics(tmp_path / "run")
    assert [row["quarantine"] for row in rows if "quarantine" in row] == [message]
    clean = changed(config, task=line.Line(), log=dict(every_steps=1))
    wanted = train(clean, tmp_path / "clean").state.params
    assert_close(outcome.state.params, wanted, atol=0.1)


def test_each_row_has_the_share_of_workers_in_quarantine(tmp_path):
    log = changed(line.config.log, every_steps=1)
    train(poisoned("loss", log=log), tmp_path)
    rows = [row for row in read_metrics(tmp_path) if "loss" in row]
    assert [row["step"] for row in rows if row["quarantined"]] == [9]
    assert rows[8]["quarantined"] == 0.25
    assert all(np.isfinite(row["loss"]) for row in rows)


@pytest.mark.slow
def test_it_goes_on_from_a_checkpoint_with_what_was_counted(tmp_path, capsys):
    # Of a constant rate, as a run that is cut short has another last step.
    whole = poisoned("gradient", optimizer=line.NOISY.optimizer)
    train(changed(whole, num_steps=12), tmp_path / "run")
    resumed = train(whole, tmp_path / "run", Resume()).state
    assert capsys.readouterr().err.count("1 gradients of worker 2") == 2
    whole = train(whole, tmp_path / "whole").state
    assert_close(resumed.params, whole.params)


@pytest.mark.draw(3)
@pytest.mark.parametrize("where", ["simulated", "mesh", "pieces"])
@pytest.mark.parametrize("wrong", ["gradient", "model state"])
def test_in_all_reduce_all_workers_drop_an_update_or_none(wrong, where):
    """One worker that decided alone would have another model from then on."""
    n, poison = 3, np.array([0, 1, 0])

    def loss_fn(params, model_state, batch, key):
        nan = jnp.where(batch[0] > 50, jnp.nan, 1.0)
        state = model_state * 0 + (nan if wrong == "model state" else 1.0)
        loss = jnp.mean((params - batch) ** 2)
        return loss * (nan if wrong == "gradient" else 1.0), (state, {})

    optimizer = optax.chain(watch_gradients(), optax.adam(0.1))
    local = quarantined(local_update(loss_fn, optimizer))
    plan = methods.all_reduce(n)
    if where == "pieces":
        train_step = gossip.AllReduce(local, worker_mesh(n))
    elif where == "mesh":
        train_step = on_mesh(local, plan, worker_mesh(n))
    else:
        train_step = simulate(local, plan)
    key = jax.random.key(0)
    state = init_state(jnp.zeros(2), optimizer, key, n, jnp.zeros(()))
    models = []
    for t in range(4):
        batch = jnp.full((n, 2), 1.0) + 99.0 * poison[:, None] * (t == 2)
        state, _ = train_step(state, batch, t)
        models.append(np.asarray(state.params))
        assert (models[-1] == models[-1][0]).all()
    assert (models[2] == models[1]).all()
    assert (models[3] != models[2]).all()
