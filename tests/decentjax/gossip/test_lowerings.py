"""Each way of sending that may be chosen gives the same numbers; the fastest is."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from decentjax import AXIS, mix, over_workers, place, topology, worker_mesh
from decentjax.gossip import lowerings as tuning
from decentjax.mixing import Lowering

PAIRS = topology.butterfly_groups(8, 2)


def _pairs(num_workers):
    return topology.butterfly_groups(num_workers, 2)


# Each with the number of options of each exchange, and the tolerance.
GRAPHS = {
    "hypercube": (topology.hypercube(8), 1, 0),
    "pairs": (PAIRS, 3, 0),
    "groups": (topology.butterfly_groups(8, 4), 2, 1e-6),
    "pairs_of_nodes": (topology.hierarchical(8, 2, _pairs), 3, 0),
    "damped": (topology.damped(PAIRS, 0.5), 3, 0),
}


def _all_mixed(graph, number, monkeypatch, message_dtype=None):
    """What each exchange makes of some models, sent in that way and by default."""

    def choose(options, mesh, num_bytes, agreeing):
        found.add(len(options))
        return number

    found = set()
    monkeypatch.setattr(tuning, "fastest", choose)
    mixes = tuning.fastest_mixes(graph, worker_mesh(8), 2**20, message_dtype)
    got = [mixes[exchange](_models())[0] for exchange in graph]
    return got, _by_default(graph, message_dtype), found


@functools.cache
def _models():
    models = [jax.random.normal(jax.random.key(0), (8, 13, 7))]
    return place(models, worker_mesh(8))


@functools.cache
def _by_default(graph, message_dtype):
    wanted = []
    for exchange in graph:
        mixing = functools.partial(
            mix, exchange=exchange, axis_name=AXIS, message_dtype=message_dtype
        )
        wanted += jax.jit(over_workers(mixing, worker_mesh(8)))(_models())
    return wanted


@pytest.mark.draw(4)
@pytest.mark.parametrize(
    ("name", "number"), [(name, i) for name in GRAPHS for i in range(GRAPHS[name][1])]
)
def test_each_lowering_that_may_be_chosen_mixes_alike(name, number, monkeypatch):
    graph, count, atol = GRAPHS[name]
    got, wanted, found = _all_mixed(graph, number, monkeypatch)
    assert found == {count}
    np.testing.assert_allclose(got, wanted, rtol=0, atol=atol)


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 1])
def test_narrow_messages_too(number, monkeypatch):
    """By a swap a pair would round once, by a mean it rounds twice."""
    got, wanted, found = _all_mixed(PAIRS, number, monkeypatch, jnp.bfloat16)
    assert found == {2}
    np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-6)


@pytest.mark.slow
def test_the_fastest_option_is_found_by_all_workers_and_one_needs_no_search():
    exchange = topology.hypercube(8)[0]
    slow, quick = Lowering(piece_bytes=16), Lowering()
    options = [(exchange, slow), (exchange, quick), (exchange, slow)]
    assert tuning.fastest(options, worker_mesh(8), 2**14) == 1
    assert tuning.fastest(options[:1], worker_mesh(8), 2**40) == 0
