import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from decentjax import (
    AXIS,
    codec,
    decentralize,
    gossip,
    init_state,
    local_update,
    map_params,
    methods,
    on_mesh,
    over_workers,
    overlap,
    simulate,
    worker_mesh,
)
from decentjax.compression import error_feedback, low_rank
from decentjax.plan import schedule_of
from tests import hlo, oracles

# The matrix of each leaf; None of one that is averaged whole.
MATRICES = {"b": None, "s": None, "t": (6, 7), "w": (9, 5)}
SHAPES = {"b": (4,), "s": (3, 2), "t": (2, 3, 7), "w": (9, 5)}
FACTORED = [place for place, name in enumerate(SHAPES) if MATRICES[name]]
RANK, MOMENTUM, RATE = 2, 0.7, 0.1
SGD = optax.sgd(RATE, MOMENTUM)
RANK_2 = low_rank(RANK, min_rate=1.2)


def model(dtype="float32"):
    return {name: jnp.zeros(shape, dtype) for name, shape in SHAPES.items()}


def drawn(seed, n, dtype="float32", shapes=SHAPES):
    """A leaf of each shape for each worker, in float64 of NumPy or another dtype."""
    rng = np.random.default_rng(seed)
    rows = {k: rng.standard_normal((n, *shape)) for k, shape in shapes.items()}
    return {name: jnp.asarray(x, dtype) for name, x in rows.items()}


def loss_fn(params, model_state, batch, key):
    terms = jax.tree.map(lambda x, y: jnp.square(x - y).sum() / 2, params, batch)
    return sum(jax.tree.leaves(terms)), (model_state, {})


LOCAL = local_update(loss_fn, SGD)


def by_numpy(n, num_steps, begin_at, first):
    """The models, and the errors by name, of steps with momentum."""
    x = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    speed, bases = x, dict(first)
    errors = {name: np.zeros((n, *SHAPES[name])) for name in first}
    for t in range(num_steps):
        targets = jax.tree.map(np.asarray, drawn(t, n, "float64"))
        gradients = {name: x[name] - targets[name] for name in SHAPES}
        means = {name: g.mean(0) for name, g in gradients.items()}
        for name in first if t >= begin_at else ():
            whole = gradients[name] + errors[name]
            matrices = whole.reshape(n, *MATRICES[name])
            mean, bases[name] = oracles.power_sgd(matrices, bases[name])
            means[name] = mean.reshape(SHAPES[name])
            errors[name] = whole - means[name]
        speed = {name: MOMENTUM * speed[name] + means[name] for name in SHAPES}
        x = {name: x[name] - RATE * speed[name] for name in SHAPES}
    return x, errors


def trained(step, state, n, num_steps, dtype="float32"):
    for t in range(num_steps):
        state, _ = step(state, drawn(t, n, dtype), t)
    return state


def by_name(state):
    names = list(SHAPES)
    return {names[number]: x for number, x in state.extra.errors.items()}


@pytest.mark.parametrize("begin_at", [0, 3])
@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_steps_are_those_of_the_paper(n, begin_at):
    plan = methods.all_reduce(n, RANK_2, begin_at)
    with jax.enable_x64(True):
        step = simulate(LOCAL, plan)
        state = step.init(model("float64"), jax.random.key(0))
        kept = state.extra.bases.items()
        first = {list(SHAPES)[k]: np.asarray(basis[0]) for k, basis in kept}
        assert list(first) == [name for name in SHAPES if MATRICES[name]]
        state = trained(step, state, n, 8, "float64")
        params, errors = by_numpy(n, 8, begin_at, first)
        for i in range(n):
            one = jax.tree.map(lambda x, i=i: x[i], state.params)
            jax.tree.map(
                functools.partial(np.testing.assert_allclose, rtol=1e-9), one, params
            )
        for name, error in by_name(state).items():
            np.testing.assert_allclose(error, errors[name], rtol=1e-7, atol=1e-10)


def slices(kind):
    if kind == "automatic":
        return worker_mesh(4, devices_per_worker=2)
    return jax.make_mesh((4, 2), (AXIS, "fsdp"), (AxisType.Explicit,) * 2)


def on_shards(state, mesh):
    """The state, in which each leaf like a param lies on all devices of its worker."""

    def put(x):
        places = [k for k in range(1, x.ndim) if x.shape[k] % 2 == 0][:1]
        spec = [mesh.axis_names[1] if k in places else None for k in range(1, x.ndim)]
        return jax.device_put(x, NamedSharding(mesh, PartitionSpec(AXIS, *spec)))

    return map_params(put, state.params, state)


def in_optax(mesh, plan, checks=False):
    """Eight steps of `decentralize` in a scan, as a function of the models."""
    optimizer = decentralize(SGD, plan, AXIS)

    def train(params, batches):
        def step(carry, batch):
            params, state = carry
            grads = jax.tree.map(lambda x, y: x - y, params, batch)
            updates, state = optimizer.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), None

        return jax.lax.scan(step, (params, optimizer.init(params)), batches)[0]

    def of_row(params, batches):
        found = train(*jax.tree.map(lambda x: x[0], (params, batches)))
        return jax.tree.map(lambda x: x[None], found)

    if checks:
        rows = PartitionSpec(AXIS)
        mapped = jax.shard_map(of_row, mesh=mesh, in_specs=rows, out_specs=rows)
    else:
        mapped = over_workers(train, mesh)
    batches = [drawn(t, 4) for t in range(8)]
    batches = jax.tree.map(lambda *rows: jnp.stack(rows, 1), *batches)
    start = jax.tree.map(lambda x: jnp.zeros((4, *x.shape)), model())
    params, state = jax.jit(mapped)(start, batches)
    assert state.count.tolist() == [8] * 4
    return params, state.extra


def everywhere(place, plan):
    """The models and what is kept after eight steps of four workers, at a place."""
    key = jax.random.key(0)
    if place.startswith("optax"):
        mesh = None if place == "optax" else worker_mesh(4)
        return in_optax(mesh, plan, checks=place == "optax, checked")
    mesh = worker_mesh(4)
    if place in ("automatic", "explicit"):
        mesh = slices(place)
    step = simulate(LOCAL, plan) if place == "simulated" else on_mesh(LOCAL, plan, mesh)
    state = step.init(model(), key)
    if place in ("automatic", "explicit"):
        state = on_shards(state, mesh)
        kept = jax.tree.map(lambda x: x.sharding.spec, state.extra.errors)
    if place == "thread":
        step = gossip.AllReduce(LOCAL, mesh, plan=plan)
    state = trained(step, state, 4, 8)
    if place in ("automatic", "explicit"):
        assert jax.tree.map(lambda x: x.sharding.spec, state.extra.errors) == kept
        assert "fsdp" in str(kept) or mesh.axis_names[1] in str(kept)
    return state.params, state.extra


PLACES = ["mesh", "thread", "automatic", "explicit", "optax", "optax on a mesh"]
STARTS = [(place, 3) for place in [*PLACES, "optax, checked"]]


@pytest.mark.parametrize(("place", "begin_at"), [*STARTS, ("mesh", 0), ("optax", 0)])
def test_the_numbers_are_the_same_everywhere(place, begin_at):
    plan = methods.all_reduce(4, RANK_2, begin_at)
    wanted, got = everywhere("simulated", plan), everywhere(place, plan)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
    if place in ("mesh", "thread"):
        close = np.testing.assert_array_equal
    jax.tree.map(close, got, wanted)


def means_of(plan, grads, kept):
    """The mean gradients of a step on all workers, and what they keep."""
    mean = functools.partial(plan.mean, schedule_of(plan)[0], axis_name=AXIS)
    return jax.jit(over_workers(mean))(grads, kept)


def first_kept(plan, params):
    return init_state(params, SGD, jax.random.key(0), plan).extra


ODD = {"a": (5, 5), "b": (1,), "c": (7, 3), "d": (3, 1, 8), "e": (), "f": (0, 4)}
ODD |= {"g": (3, 7), "h": (2, 2, 2, 11), "i": (5, 5)}


@pytest.mark.parametrize(("n", "rank"), [(1, 2), (2, 4), (3, 1), (5, 2)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_nothing_is_lost(n, rank, dtype):
    check_nothing_is_lost(n, rank, dtype, None)


@pytest.mark.parametrize("sent", ["bfloat16", "float16"])
def test_nothing_is_lost_by_narrow_messages(sent):
    check_nothing_is_lost(3, 2, "float32", sent)


def check_nothing_is_lost(n, rank, dtype, sent):
    """That errors and means are the gradients, in each step and over all."""
    plan = methods.all_reduce(n, low_rank(rank, sent, min_rate=1))
    params = {name: jnp.zeros(shape, dtype) for name, shape in ODD.items()}
    kept = first_kept(plan, params)
    names = [list(ODD)[number] for number in kept.errors]
    assert names if rank < 4 else "h" in names
    for t in range(5):
        grads = drawn(t, n, dtype, ODD)
        before, (means, kept) = kept, means_of(plan, grads, kept)
        for number, name in enumerate(ODD):
            mean = np.asarray(means[name], np.float64)
            assert means[name].dtype == dtype
            assert (mean == mean[:1]).all()  # Bit for bit on all workers.
            whole = np.asarray(grads[name], np.float64)
            wanted, got = whole.mean(0), mean[0]
            if name in names:
                assert kept.errors[number].dtype == "float32"
                wanted = (whole + np.asarray(before.errors[number], np.float64)).mean(0)
                got = got + np.asarray(kept.errors[number], np.float64).mean(0)
            bound = 1e-5 if name in names or dtype == "float32" else 1e-2
            np.testing.assert_allclose(got, wanted, rtol=bound, atol=bound)


@pytest.mark.parametrize("n", [1, 3])
def test_a_gradient_of_low_rank_is_sent_whole_and_no_mean_has_more(n):
    plan = methods.all_reduce(n, RANK_2)
    kept, factors = (
        first_kept(plan, model()),
        drawn(0, n, shapes={"p": (9, 2), "q": (2, 5)}),
    )
    grads = drawn(1, n) | {"w": factors["p"][:1] @ factors["q"]}
    means, after = means_of(plan, grads, kept)
    np.testing.assert_allclose(
        means["w"], jnp.tile(grads["w"].mean(0), (n, 1, 1)), atol=1e-5
    )
    rows = np.asarray(means["t"][0]).reshape(MATRICES["t"])
    sizes = np.linalg.svd(rows, compute_uv=False)
    assert sizes[1] > 1e-2 > 1e-5 > sizes[2]
    for basis in after.bases.values():  # Orthonormal, so that no column fades.
        np.testing.assert_allclose(basis[0].T @ basis[0], np.eye(RANK), atol=1e-5)


def test_the_basis_finds_the_largest_directions():
    """Of equal gradients a few steps send, together, what the best factors have."""
    plan = methods.all_reduce(2, low_rank(1))
    rng, params = np.random.default_rng(0), {"w": jnp.zeros((9, 7))}
    left, right = (np.linalg.qr(rng.standard_normal((k, 3)))[0] for k in (9, 7))
    matrix = left @ np.diag([5.0, 1.0, 0.2]) @ right.T
    kept = first_kept(plan, params)
    for _ in range(6):
        fresh = kept._replace(errors=jax.tree.map(jnp.zeros_like, kept.errors))
        means, kept = means_of(plan, {"w": jnp.stack([matrix] * 2)}, fresh)
    best = 5 * np.outer(left[:, 0], right[:, 0])
    np.testing.assert_allclose(means["w"][0], best, atol=1e-4)


def test_zeros_and_numbers_that_are_not_finite_leave_the_state_as_it_was():
    plan = methods.all_reduce(3, RANK_2)
    kept = first_kept(plan, model())
    means, after = means_of(plan, jax.tree.map(jnp.zeros_like, drawn(0, 3)), kept)
    assert not any(x.any() for x in jax.tree.leaves((means, after.errors)))
    for number, basis in kept.bases.items():
        np.testing.assert_allclose(after.bases[number], basis, atol=1e-6)
    _, kept = means_of(plan, drawn(0, 3), kept)
    number = list(SHAPES).index("w")
    for bad in (np.nan, np.inf):
        grads = drawn(1, 3)
        grads["w"] = grads["w"].at[1, 2, 3].set(bad)
        means, after = means_of(plan, grads, kept)
        assert not np.isfinite(means["w"]).any(axis=(1, 2)).all()
        assert np.isfinite(means["t"]).all()
        for new, old in zip(after, kept, strict=True):
            np.testing.assert_array_equal(new[number], old[number])
            other = list(SHAPES).index("t")
            assert (np.asarray(new[other]) != np.asarray(old[other])).any()


def test_the_first_steps_are_those_of_all_reduce():
    late, plain = methods.all_reduce(4, RANK_2, 3), methods.all_reduce(4)
    runs = [simulate(LOCAL, plan) for plan in (late, plain)]
    states = [step.init(model(), jax.random.key(0)) for step in runs]
    kept = jax.tree.map(jnp.copy, states[0].extra)
    for num_steps in (3, 4):
        (one, other) = [
            trained(step, jax.tree.map(jnp.copy, state), 4, num_steps)
            for step, state in zip(runs, states, strict=True)
        ]
        are_equal = jax.tree.map(lambda x, y: (x == y).all(), one.params, other.params)
        assert bool(are_equal["w"]) == (num_steps == 3)
        assert are_equal["b"]
        if num_steps == 3:
            jax.tree.map(np.testing.assert_array_equal, one.extra, kept)


@pytest.mark.parametrize("num_workers", [2, 4])
def test_a_step_sends_two_sums_of_the_factors(num_workers):
    plan = methods.all_reduce(num_workers, RANK_2, begin_at=1)
    step = on_mesh(LOCAL, plan, worker_mesh(num_workers))
    state = step.init(model(), jax.random.key(0))
    rows, columns = (sum(MATRICES[k][d] for k in ("t", "w")) for d in (0, 1))
    everyone = (tuple(range(num_workers)),)
    sums = [RANK * rows * 4, (RANK * columns + 4 + 6) * 4]
    compiled = step.lower(state, drawn(0, num_workers), 1).compile()
    found = hlo.collectives(compiled.as_text(), num_workers)
    assert sorted(found) == sorted(("all-reduce", size, everyone) for size in sums)
    whole = sum(x.size for x in jax.tree.leaves(model())) * 4
    sizes = [plan.num_bytes(plan.schedule[t], model()) for t in (0, 1, 2)]
    assert sizes == [whole, sum(sums), sum(sums)]
    first = step.lower(state, drawn(0, num_workers), 0).compile()
    for one, size in ((first, whole), (compiled, sum(sums))):
        sent = 2 * (1 - 1 / num_workers) * size
        assert overlap.read(one).sent_bytes() == pytest.approx(sent)


def test_narrow_factors_have_half_of_the_bytes():
    plan = methods.all_reduce(4, low_rank(RANK, "bfloat16", min_rate=1.2))
    step = on_mesh(LOCAL, plan, worker_mesh(4))
    state = step.init(model(), jax.random.key(0))
    compiled = step.lower(state, drawn(0, 4), 0).compile()
    size = RANK * (6 + 7 + 9 + 5) * 2 + 10 * 4
    assert plan.num_bytes(plan.schedule[0], model()) == size
    sent = overlap.read(compiled).sent_bytes()  # Of which some fill pieces.
    assert 2 * 3 / 4 * size <= sent < 1.15 * 2 * 3 / 4 * size


def regression(params, model_state, batch, key):
    x, y = batch
    hidden = jnp.tanh(x @ params["first"] + params["bias"][None])
    return jnp.square(hidden @ params["last"] - y).mean(), (model_state, {})


@pytest.mark.parametrize("sent", [None, "bfloat16"])
def test_training_ends_where_all_reduce_ends(sent):
    n, rng = 4, np.random.default_rng(0)
    x = rng.standard_normal((n, 64, 12)) + rng.standard_normal((n, 1, 12))
    x, teacher = x.astype("float32"), rng.standard_normal((12, 6)).astype("float32")
    y = np.tanh(x @ teacher / 4)
    local = local_update(regression, optax.sgd(0.2, 0.5))
    sizes = {"first": (12, 24), "bias": (24,), "last": (24, 6)}
    params = {name: x[0] / 4 for name, x in drawn(1, 1, shapes=sizes).items()}
    losses = {}
    for rank in (None, 1):
        factors = rank and low_rank(rank, sent)
        step = simulate(local, methods.all_reduce(n, factors))
        state = step.init(params, jax.random.key(0))
        for t in range(400):
            state, metrics = step(state, (jnp.array(x), jnp.array(y)), t)
            losses.setdefault(rank, []).append(float(metrics["loss"].mean()))
    assert losses[None][-1] < losses[None][0] / 100
    assert losses[1][-1] < 1.1 * losses[None][-1]


def test_more_ranks_and_rates_decide_which_leaves_are_whole():
    def reduced(rank, min_rate):
        plan = methods.all_reduce(2, low_rank(rank, min_rate=min_rate))
        kept = jax.eval_shape(lambda: first_kept(plan, model()))
        return [list(SHAPES)[number] for number in kept.errors]

    assert reduced(1, 2) == ["t", "w"]
    assert reduced(1, 3.22) == ["t"]  # 42 / 13, and of w 45 / 14.
    assert reduced(5, 1) == []
    # A model without a matrix is averaged whole.
    plan = methods.all_reduce(2, low_rank(5, min_rate=1))
    state = simulate(LOCAL, plan).init(model(), jax.random.key(0))
    state = trained(simulate(LOCAL, plan), state, 2, 2)
    assert state.extra == ({}, {})


def test_integers_and_complex_leaves_are_no_matrices():
    plan = methods.all_reduce(2, low_rank(1))
    params = {"i": jnp.zeros((9, 9), "int32"), "z": jnp.zeros((9, 9), "complex64")}
    assert first_kept(plan, params) == ({}, {})


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: methods.all_reduce(2, error_feedback(codec.int8())),
            r"with compression=low_rank\(rank\), got error_feedback: use Rounds",
        ),
        (lambda: methods.all_reduce(2, 4), r"low_rank\(rank\), got 4"),
        (lambda: methods.all_reduce(2, low_rank(4), -1), "from 0 on, .* got -1"),
        (lambda: methods.all_reduce(2, begin_at=5), "got 5 with compression=None"),
        (lambda: methods.all_reduce(2, low_rank(4), 1.5), "begin_at"),
        (
            lambda: gossip.AllReduce(
                LOCAL, worker_mesh(2), plan=methods.all_reduce(3, RANK_2)
            ),
            "the 3 workers of the plan on its axis 'workers', got",
        ),
        (
            lambda: trained(
                simulate(LOCAL, methods.all_reduce(2, RANK_2)),
                init_state(model(), SGD, jax.random.key(0), 2),
                2,
                1,
            ),
            "state of their own: make it by step.init",
        ),
    ],
)
def test_what_cannot_be_is_refused(make, words):
    with pytest.raises((TypeError, ValueError), match=words):
        make()


def test_a_plan_is_a_value():
    plan = methods.all_reduce(2, low_rank(4, "bfloat16"), 3)
    assert hash(plan) == hash(methods.all_reduce(2, low_rank(4, "bfloat16"), 3))
    assert plan != dataclasses.replace(plan, begin_at=2)
    assert [plan.schedule[t].sends.turn for t in range(5)] == [0, 0, 0, 1, 1]
