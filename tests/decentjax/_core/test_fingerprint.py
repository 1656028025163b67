"""Workers begin with one model, or are told which of them does not."""

import concurrent.futures
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decentjax import (
    gossip,
    init_state,
    local_update,
    methods,
    place,
    topology,
    worker_mesh,
)
from decentjax._core.fingerprint import fingerprints
from decentjax.placement import check_one_model
from tests.checkout import ROOT
from tests.parties import party_of

LONG = 240


@pytest.mark.slow
def test_processes_that_begin_with_different_models_are_told_so():
    env = {k: v for k, v in os.environ.items() if k not in ("NPROC", "XLA_FLAGS")}
    script = ROOT / "tests" / "first_models.py"
    done = subprocess.run(
        [sys.executable, "-m", "decentjax", "launch", "-n", "2", str(script)],
        env=env | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=LONG,
    )
    lines = [x.split("] ", 1)[1] for x in done.stdout.splitlines() if "]" in x]
    said = dict(line.split(": ", 1) for line in lines if ": " in line)
    told = {name for name, words in said.items() if words.startswith("says: ")}
    wrong = {
        "awc",
        "all_reduce",
        "all_reduce goes on",
        "pieces",
        "background",
        "rounds",
    }
    assert told == wrong, done.stdout + done.stderr
    assert {"awc goes on", "awc alike", "background alike"} <= said.keys() - told
    words = "params['w'] of the workers [1] differs from worker 0's: make the params"
    assert all(words in said[name] for name in told)


@pytest.mark.parametrize("kind", ["peers", "rounds", "wagma"])
@pytest.mark.parametrize("unlike", [False, True])
def test_peers_that_begin_with_different_models_are_told_so(kind, unlike, tmp_path):
    def loss_fn(params, model_state, batch, key):
        return jnp.sum((params - batch) ** 2), (model_state, {})

    optimizer = optax.sgd(0.1)
    local = local_update(loss_fn=loss_fn, optimizer=optimizer)
    rounds = methods.diloco(2, 2)

    def work(worker):
        party = party_of(tmp_path, [worker])
        params = jnp.full(3, 1.0 + worker * unlike)
        plan = rounds if kind == "rounds" else topology.ring(2)
        key = jax.random.key(0)
        state = init_state(params, optimizer, key, plan, workers=[worker])
        state, batch = place((state, jnp.zeros((1, 3))), party.mesh)
        if kind == "wagma":
            peers = gossip.Peers(local, methods.wagma(2, 2, 4), party, patience=60.0)
        else:
            peers = gossip.Peers(local, plan, party, patience=60.0)
        with peers:
            for step in range(4):
                state, _ = peers.advance(state, batch, step)
        return "trained"

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(work, worker) for worker in (0, 1)]
        found = [future.exception(LONG) for future in futures]
    if unlike:
        told = [str(error) for error in found if isinstance(error, ValueError)]
        assert any("must begin with the same model" in words for words in told), found
    else:
        assert found == [None, None]


SHAPES = st.lists(st.integers(1, 4), max_size=3).map(tuple)
DTYPES = st.sampled_from(
    ["float32", "bfloat16", "float16", "int32", "complex64", "bool"]
)


@pytest.mark.slow
@settings(deadline=None, max_examples=15)
@given(SHAPES, DTYPES, st.data())
def test_a_change_of_one_number_or_of_two_places_changes_the_fingerprint(
    shape, dtype, data
):
    draw = np.random.default_rng(data.draw(st.integers(0, 2**31)))
    x = np.asarray(jnp.asarray(draw.standard_normal(shape) > 0).astype(dtype))
    if dtype != "bool":
        x = np.asarray(jnp.asarray(draw.standard_normal(shape)).astype(dtype))
    own = fingerprints([x])
    assert (fingerprints([x.copy()]) == own).all()
    place = data.draw(st.integers(0, x.size - 1))
    other = x.copy()
    other.flat[place] = 1 - x.flat[place] if dtype != "bool" else not x.flat[place]
    assert (other.flat[place] == x.flat[place]) or (fingerprints([other]) != own).all()
    for axes in (None, *range(x.ndim)):
        swapped = np.flip(x, axes)
        assert (swapped == x).all() or (fingerprints([swapped]) != own).all()


@pytest.mark.parametrize("dtype", ["int64", "uint64", "float64"])
def test_each_half_of_a_wide_number_changes_the_fingerprint(dtype):
    with jax.enable_x64(True):
        bits = np.arange(6, dtype=np.uint64)
        own = fingerprints([bits.view(dtype)])
        for bit in (0, 31, 32, 63):
            other = bits ^ np.uint64(np.arange(6) == 4) << np.uint64(bit)
            assert (fingerprints([other.view(dtype)]) != own).all()


def test_random_keys_have_a_fingerprint():
    keys = jax.random.split(jax.random.key(0), 2)
    assert (fingerprints([keys]) == fingerprints([keys.copy()])).all()
    assert (fingerprints([keys]) != fingerprints([keys[::-1]])).all()


@pytest.mark.parametrize("n", [1, 3, 5])
def test_workers_of_one_mesh_are_compared_too(n):
    mesh = worker_mesh(n)
    params = {"a": jnp.ones((n, 2)), "b": jnp.zeros((n, 3, 2))}
    check_one_model(place(params, mesh), mesh)
    if n > 1:
        params["b"] = params["b"].at[n - 1, 2, 1].set(-0.0)
        with pytest.raises(
            ValueError, match=rf"params\['b'\] of the workers \[{n - 1}\]"
        ):
            check_one_model(place(params, mesh), mesh)


def test_the_hashes_can_take_the_mesh_of_the_messages():
    mesh, others = worker_mesh(3), worker_mesh(3, jax.devices()[5:8])
    params = place({"a": jnp.ones((3, 2)), "b": jnp.arange(3.0)}, mesh)
    with pytest.raises(ValueError, match=r"params\['b'\] of the workers \[1, 2\]"):
        check_one_model(params, mesh, others)
    check_one_model(params | {"b": params["b"] * 0}, mesh, others)
