"""Peers whose workers are slices of a mesh: each device sends what it has."""

import dataclasses
import functools
import itertools
import math
import threading
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from decentjax import (
    gossip,
    init_state,
    local_update,
    methods,
    place,
    topology,
    worker_mesh,
)
from decentjax.codec import int8
from decentjax.compression import error_feedback
from decentjax.gossip import Elastic, Folder, PeerProcess, Peers
from decentjax.gossip.layout import Layout
from decentjax.links import Links, Piece
from tests.parties import in_threads, training

LONG = 180.0
STEPS = 5
OPTIMIZER = optax.sgd(0.125, momentum=0.5)
LOCAL_SGD = methods.local_sgd(topology.ring(2), num_steps=2)
STEPS_OF = {
    "arrived": lambda party: Peers(LOCAL, topology.ring(2), party, patience=math.inf),
    "swaps": lambda party: Peers(
        LOCAL, topology.ring(2), party, merge="swaps", patience=math.inf
    ),
    "rounds": lambda party: Peers(LOCAL, LOCAL_SGD, party, patience=math.inf),
    "wagma": lambda party: Peers(LOCAL, methods.wagma(2, 2, 1), party, patience=LONG),
}
KINDS = {
    "explicit": (AxisType.Explicit,) * 2,
    "auto": (AxisType.Auto,) * 2,
}


def loss_fn(params, model_state, batch, key):
    floats = params["cut"], params["row"], params["whole"]
    loss = sum(jnp.square(x - jnp.mean(batch)).sum() for x in floats)
    return loss, (model_state, {})


LOCAL = local_update(loss_fn, OPTIMIZER)


def params():
    return {
        "cut": jnp.arange(32.0).reshape(4, 8) / 7,
        "row": jnp.arange(8.0) / 3,
        "whole": jnp.ones((3,)),
    }


SPECS = {"cut": (None, "fsdp"), "row": ("fsdp",), "whole": ()}


def party_of(folder, worker, kinds):
    """A worker of this process: one device, or a slice of two."""
    mesh = worker_mesh(1, [jax.devices()[worker]])
    if kinds is not None:
        pair = jax.devices()[2 * worker : 2 * worker + 2]
        mesh = jax.make_mesh((1, 2), ("replica", "fsdp"), kinds, devices=pair)
    return PeerProcess(Folder(folder), [worker], mesh)


def placed(state, mesh):
    if "fsdp" not in mesh.shape:
        return place(state, mesh)

    def put(path, x):
        names = [getattr(key, "key", None) for key in path]
        spec = next((SPECS[name] for name in names if name in SPECS), ())
        lies = NamedSharding(mesh, PartitionSpec("replica", *spec))
        return jax.device_put(x, lies)

    return jax.tree.map_with_path(put, state)


def batch_of(worker, step, mesh):
    # Far from each other, so that the models meet only by their messages.
    rows = 10 * worker + np.random.default_rng([worker, step]).standard_normal((1, 4))
    return place(rows.astype("float32"), mesh)


def run(folder, way, kinds):
    """Trains two workers, each in a thread; returns their states on the host."""
    done = threading.Barrier(2)

    def work(worker):
        party = party_of(folder, worker, kinds)
        plan, key = LOCAL_SGD if way == "rounds" else 2, jax.random.key(0)
        state = init_state(params(), OPTIMIZER, key, plan, workers=[worker])
        state = placed(state, party.mesh)
        with STEPS_OF[way](party) as train_step:
            for step in range(STEPS):
                batch = batch_of(worker, step, party.mesh)
                state, _ = train_step.advance(state, batch, step)
            done.wait(LONG)
        return state

    return in_threads(work, 2)


def check_replicas(tree):
    """Devices that are said to have the same must have the same."""
    for x in jax.tree.leaves(tree):
        of_place = {}
        for shard in x.addressable_shards:
            first = of_place.setdefault(repr(shard.index), shard.data)
            np.testing.assert_array_equal(shard.data, first)


@pytest.mark.draw(2)
@pytest.mark.parametrize("kinds", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("way", STEPS_OF)
def test_slices_average_as_workers_of_one_device(way, kinds, tmp_path):
    alone = run(tmp_path / "devices", way, None)
    slices = run(tmp_path / "slices", way, kinds)
    for one, other in zip(alone, slices, strict=True):
        check_replicas(other.params)
        spec = other.params["cut"].sharding.spec
        assert spec == PartitionSpec("replica", None, "fsdp")
        jax.tree.map(
            functools.partial(np.testing.assert_allclose, rtol=1e-6),
            jax.device_get(one.params),
            jax.device_get(other.params),
        )
    # Without messages one would go towards 0 and the other towards 10.
    own = [jax.device_get(one.params["whole"][0, 0]) for one in slices]
    alone = trained_alone()
    assert abs(own[0] - own[1]) < abs(alone[0] - alone[1]) / 2


def trained_alone():
    """A number of the leaf "whole" of both workers, had they sent nothing."""
    found = []
    for worker in range(2):
        x, momentum = 1.0, 0.0
        for step in range(STEPS):
            centre = float(batch_of(worker, step, worker_mesh(1)).mean())
            momentum = 0.5 * momentum + 2 * (x - centre)
            x -= 0.125 * momentum
        found.append(x)
    return found


def test_what_the_compiler_chooses_to_shard_is_sent_as_it_was_at_first(tmp_path):
    mesh = party_of(tmp_path, 0, KINDS["auto"]).mesh
    cut = NamedSharding(mesh, PartitionSpec("replica", "fsdp"))
    first = jax.device_put(jnp.arange(8.0)[None], NamedSharding(mesh, PartitionSpec()))
    layout = Layout([first], mesh)
    (rows,) = layout.rows([jax.device_put(first, cut)])
    assert [x.shape for x in rows] == [x.shape for x in layout.pieces] == [(1, 8)]
    (back,) = layout.stacked([first], [rows])
    assert back.sharding.is_equivalent_to(first.sharding, 2)
    np.testing.assert_array_equal(back, first)


@pytest.mark.slow
def test_a_slice_that_joins_has_the_state_of_a_peer(tmp_path):
    """Its model and moments bit for bit, in shards of its own devices."""
    kinds = KINDS["explicit"]

    def one(worker):
        party = party_of(tmp_path, worker, kinds)
        elastic = Elastic(topology.ring)
        state = init_state(params(), OPTIMIZER, jax.random.key(0), 2, (), [worker])
        peers = Peers(LOCAL, topology.ring(2), party, elastic=elastic)
        return peers, placed(state, party.mesh), batch_of(worker, 0, party.mesh)

    with training(*one(0)) as seen:
        peers, state, batch = one(1)
        with peers:
            joined, step, _ = peers.admit(state, batch, 0)
            new, end = jax.tree.map(jnp.copy, joined), time.monotonic() + LONG
            for t in itertools.count(step):
                # The first messages may be of the very step that it took over.
                if peers.apart() or time.monotonic() > end:
                    break
                new, _ = peers.advance(new, batch, t)
    wanted = seen[step]
    got = joined._replace(key=())
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(got), wanted)
    assert joined.params["cut"].sharding == state.params["cut"].sharding
    check_replicas((got, new.params))
    # Of 43 numbers, of which those of one worker go towards 0, the other's to 10.
    assert 0 < peers.apart() < 100


def test_workers_of_other_slices_are_refused(tmp_path):
    """They would have other pieces of the same model, here of the same shape."""
    links = []
    for worker, lane in ((0, 0), (1, 1)):
        party = party_of(tmp_path, worker, KINDS["auto"])
        links.append(Links(party, 2, [[Piece((1, 4), jnp.float32, lane)]]))
    links[0].meet([1], time.monotonic() + LONG)
    assert "its config or its model differs" in links[0].refused[1]
    for one in links:
        one.close()


def test_what_slices_cannot_do_gets_a_sentence(tmp_path):
    party = party_of(tmp_path, 0, KINDS["auto"])
    coded = dataclasses.replace(LOCAL_SGD, compression=error_feedback(int8()))
    with pytest.raises(ValueError, match="workers of one device, but these are slices"):
        Peers(LOCAL, coded, party)
    far = types.SimpleNamespace(process_index=3, client=party.mesh.devices[0, 0].client)
    mesh = types.SimpleNamespace(
        shape={"workers": 1}, axis_names=("workers",), devices=np.array([far])
    )
    with pytest.raises(
        ValueError, match=r"equally many devices of its mesh, got \{3: 1"
    ):
        gossip.PeerProcess(Folder(tmp_path), [0], mesh)
    own = types.SimpleNamespace(process_index=0, client=far.client)
    spans = types.SimpleNamespace(
        shape={"workers": 2}, axis_names=("workers",), devices=np.array([own, far])
    )
    with pytest.raises(ValueError, match=r"on a mesh of the processes \[0, 3\]: give"):
        gossip.PeerProcess(Folder(tmp_path), [0, 1], spans)
    two = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("replica", "fsdp"))
    with pytest.raises(ValueError, match='whose axis "replica" has this process\'s 1'):
        gossip.PeerProcess(Folder(tmp_path), [0], two)
