"""Plans of one's own: against NumPy, and what is refused before anything compiles."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from decentjax import Rounds, gossip, local_update, place, simulate, topology
from tests.guide_method import own_method
from tests.parties import in_threads, party_of

OWN = own_method()
# No two as far from 1: which is the largest would depend on rounding.
PARAMS = {"a": jnp.array([0.5, -1.0, 2.0, 0.25, 3.7]), "b": jnp.array([[1.4, 4.0]])}
RATE, MOMENTUM, STEPS = 0.05, 0.9, 6


def loss_fn(params, model_state, batch, key):
    loss = sum((batch * (x - 1) ** 2).sum() / 2 for x in jax.tree.leaves(params))
    return loss, (model_state, {})


LOCAL = local_update(loss_fn, optax.sgd(RATE))


def ring_matrix(n):
    """A third of the own model and of each neighbour's; of two, a half of each."""
    matrix = np.zeros((n, n))
    for i in range(n):
        near = {(i - 1) % n, i, (i + 1) % n}
        for j in near:
            matrix[i, j] = 1 / len(near)
    return matrix


def largest(x, share):
    """The largest numbers of each row, and zeros in place of the others."""
    count = max(1, round(share * x.shape[1]))
    kept = np.zeros_like(x)
    for row, one in enumerate(x):
        places = np.argsort(-np.abs(one), kind="stable")[:count]
        kept[row, places] = one[places]
    return kept


def oracle(n, curvature, share=None):
    """Momentum tracking by its equations, [N, D] for each leaf, all in float64."""
    w, moved = ring_matrix(n), {}
    for name, leaf in PARAMS.items():
        x = np.tile(np.ravel(np.float64(leaf)), (n, 1))
        both = {"x": x, "y": np.zeros_like(x)}
        copy = {what: one.copy() for what, one in both.items()}
        total = {what: np.zeros_like(one) for what, one in both.items()}
        m = np.zeros_like(x)
        for row in curvature:
            mixed = {what: w @ one for what, one in both.items()}
            for what in both if share else ():
                q = largest(both[what] - copy[what], share)
                copy[what] += q
                total[what] += w @ q - q
                mixed[what] = both[what] + share * total[what]
            before, m = m, MOMENTUM * m + row[:, None] * (both["x"] - 1)
            y = mixed["y"] + m - before
            both = {"x": mixed["x"] - RATE * y, "y": y}
        moved[name] = both["x"].reshape(n, *leaf.shape)
    return moved


def trained(plan, n, curvature):
    step = simulate(LOCAL, plan)
    state = step.init(PARAMS, jax.random.key(0))
    for t, row in enumerate(curvature):
        state, _ = step(state, jnp.float32(row), t)
    return state


@pytest.mark.parametrize("n", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("share", [None, 0.4])
def test_the_method_of_the_guide_follows_its_equations(n, share):
    curvature = np.random.default_rng(n).uniform(0.5, 1.5, (STEPS, n))
    plan = OWN.MomentumTracking(topology.ring(n), delay=1, momentum=MOMENTUM)
    if share is not None:
        sparse = OWN.copies(OWN.codec.top_k(share))
        plan = dataclasses.replace(plan, compression=sparse)
    state = trained(plan, n, curvature)
    wanted = oracle(n, curvature, share)
    for name, leaf in state.params.items():
        np.testing.assert_allclose(leaf, wanted[name], rtol=1e-4, atol=1e-5)
    own = state.extra.values
    for y, m in zip(*(jax.tree.leaves(own[x]) for x in "ym"), strict=True):
        np.testing.assert_allclose(y.sum(0), m.sum(0), rtol=1e-4, atol=1e-5)


@dataclasses.dataclass(frozen=True)
class Counting(Rounds):
    """Sends nothing of its own, and counts the steps of each worker."""

    def own(self, params):
        return {"count": jnp.int32(0)}

    def update(self, local, state, batch, mixed, own):
        new, metrics = local(state, batch, mixed)
        return new, {"count": own["count"] + 1}, metrics


@pytest.mark.parametrize("how", [{}, {"every": 3}, {"every": 2, "delay": 2}])
def test_own_values_that_stay_change_no_model(how):
    curvature = np.ones((4, 3))
    found = trained(Counting(topology.ring(3), **how), 3, curvature)
    assert found.extra.values["count"].tolist() == [4, 4, 4]
    wanted = trained(Rounds(topology.ring(3), **how), 3, curvature)
    for x, y in zip(*map(jax.tree.leaves, (found.params, wanted.params)), strict=True):
        assert np.array_equal(x, y)


def wrong(**parts):
    return type("Wrong", (Counting,), parts)(topology.ring(2))


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"travels": ("y",)}, "Wrong.travels names 'y', which no worker has: .* count"),
        ({"travels": ("count",)}, "'count', in which there is no float, .* leave it"),
        ({"own": lambda self, params: [1]}, "own must return a dict .*, got list"),
        ({"own": lambda self: {}}, r"own is called as own\(params\)"),
        ({"update": lambda self, state: state}, r"update is called as update\(local, "),
        (
            {"update": lambda self, local, state, *_: (state, {"count": 1.0}, {})},
            r"update must return own values .* \['count'\] was int32\[\] and is f",
        ),
        (
            {"update": lambda self, local, state, *_: (state, {})},
            "Wrong.update must return a WorkerState, the own values and the metrics",
        ),
    ],
)
def test_a_plan_that_does_not_fit_gets_a_sentence(parts, words):
    with pytest.raises((TypeError, ValueError), match=words):
        trained(wrong(**parts), 2, np.ones((1, 2)))


def test_a_state_of_another_plan_gets_a_sentence():
    plain = simulate(LOCAL, Rounds(topology.ring(2), 2)).init
    state = plain(PARAMS, jax.random.key(0))
    step = simulate(LOCAL, Counting(topology.ring(2), 2))
    with pytest.raises(TypeError, match="rounds need their own state: make it by step"):
        step(state, jnp.ones(2), 0)


def test_peers_whose_own_values_differ_refuse_each_other(tmp_path):
    """Those of one have a value more, as of another version of the file."""

    class More(OWN.MomentumTracking):
        travels = "y", "more"

        def own(self, params):
            return {**super().own(params), "more": jnp.zeros(3)}

        def update(self, local, state, batch, mixed, own):
            new, values, metrics = super().update(local, state, batch, mixed, own)
            return new, {**values, "more": own["more"]}, metrics

    def work(worker):
        plan = (OWN.MomentumTracking, More)[worker](topology.ring(2), delay=1)
        party = party_of(tmp_path, [worker])
        with gossip.Peers(LOCAL, plan, party, patience=np.inf) as step:
            state = step.init(PARAMS, jax.random.key(0))
            with pytest.raises(ConnectionError, match="no message of the workers"):
                step.advance(state, place(jnp.ones((1,)), party.mesh), 0)
            return " ".join(step.refused.values())

    found = in_threads(work, 2)
    assert any("its config or its model differs" in why for why in found)
