"""Every optimizer of optax, on workers with uneven data."""

import functools
import inspect
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx, serialization
from optax import contrib

from decentjax import (
    AXIS,
    decentralize,
    gossip,
    init_state,
    local_update,
    methods,
    on_mesh,
    over_workers,
    simulate,
    topology,
    worker_mesh,
)
from decentjax._core.optimizer_state import check_averageable, own_models
from decentjax.optim import exact_diffusion, quasi_global_momentum
from decentjax.plan import schedule_of, worker_step
from decentjax.updates import check_averages_nothing
from tests.plans import all_reduce, atc, awc

N = 4
DATA = np.random.default_rng(0).standard_normal((N, 4, 3)).astype(np.float32) * 2
START = jnp.full((4, 3), 3.0)
# The models that workers reach alone are as far as this from their mean.
APART = float(np.abs(DATA - DATA.mean(0)).max())
FAR = float(np.abs(3 - DATA.mean(0)).max())
NUM_STEPS = 600

AVERAGED = {
    "adabelief": optax.adabelief(0.02),
    "adadelta": optax.adadelta(1.0),
    "adafactor": optax.adafactor(0.02),
    "adagrad": optax.adagrad(0.1),
    "adam": optax.adam(0.02),
    "adamax": optax.adamax(0.02),
    "adamaxw": optax.adamaxw(0.02),
    "adamw": optax.adamw(0.02),
    "adan": optax.adan(0.02),
    "amsgrad": optax.amsgrad(0.02),
    "fromage": optax.fromage(0.02),
    "lamb": optax.lamb(0.02),
    "lars": optax.lars(0.1),
    "lion": optax.lion(0.02),
    "nadam": optax.nadam(0.02),
    "nadamw": optax.nadamw(0.02),
    "noisy_sgd": optax.noisy_sgd(0.02, eta=1e-4, key=0),
    "novograd": optax.novograd(0.02),
    "optimistic_adam_v2": optax.optimistic_adam_v2(0.02),
    "optimistic_gradient_descent": optax.optimistic_gradient_descent(0.02),
    "polyak_sgd": optax.polyak_sgd(max_learning_rate=0.1),
    "radam": optax.radam(0.02),
    "rmsprop": optax.rmsprop(0.02),
    "sgd": optax.sgd(0.02, momentum=0.9, nesterov=True),
    "sign_sgd": optax.sign_sgd(0.02),
    "signum": optax.signum(0.02),
    "sm3": optax.sm3(0.1),
    "yogi": optax.yogi(0.02),
    "acprop": contrib.acprop(0.02),
    "ademamix": contrib.ademamix(0.02),
    "adopt": contrib.adopt(0.02),
    "dog": contrib.dog(1.0),
    "dowg": contrib.dowg(1.0),
    "galore": contrib.galore(0.02, 2),
    "momo": contrib.momo(0.1),
    "momo_adam": contrib.momo_adam(0.02),
    "muon": contrib.muon(0.02),
    "sam": contrib.sam(
        optax.sgd(0.02), optax.chain(contrib.normalize(), optax.sgd(0.02))
    ),
    "schedule_free_adamw": contrib.schedule_free_adamw(0.05, warmup_steps=20),
    "schedule_free_sgd": contrib.schedule_free_sgd(0.05),
    "simplified_ademamix": contrib.simplified_ademamix(1e-4),
    "reduce_on_plateau": optax.chain(
        optax.sgd(0.02), contrib.reduce_on_plateau(patience=100)
    ),
    "MultiSteps": optax.MultiSteps(optax.adam(0.05), 3),
    "ema": optax.chain(optax.ema(0.9), optax.sgd(0.02)),
    "apply_if_finite": optax.apply_if_finite(optax.adam(0.02), 5),
    "apply_every": optax.chain(optax.apply_every(2), optax.sgd(0.02)),
    "clip": optax.chain(optax.adaptive_grad_clip(0.1), optax.sgd(0.02)),
    "split_real_and_imaginary": contrib.split_real_and_imaginary(optax.adam(0.02)),
}
REFUSED = {
    "lbfgs": optax.lbfgs(0.01, linesearch=None),
    "rprop": optax.rprop(0.02),
    "cocob": contrib.cocob(),
    "dadapt_adamw": contrib.dadapt_adamw(1.0),
    "madgrad": contrib.madgrad(0.02),
    "mechanize": contrib.mechanize(optax.sgd(0.02)),
    "prodigy": contrib.prodigy(1.0),
}


def noisy(params, model_state, batch, key):
    """Half the squared distance to a worker's own data, with noise."""
    noise = 0.5 * jax.random.normal(key, params.shape)
    return 0.5 * jnp.sum((params - batch - noise) ** 2), (model_state, {})


@functools.lru_cache(maxsize=2)
def _trained(name, plan_of):
    optimizer, plan = (AVERAGED | REFUSED)[name], plan_of(topology.complete(N))
    step = worker_step(local_update(noisy, optimizer), plan)
    event = schedule_of(plan)[0]

    def worker(state, data):
        def body(state, _):
            return step(state, data, event)[0], None

        return jax.lax.scan(body, state, length=NUM_STEPS)[0]

    state = init_state(START, optimizer, jax.random.key(0), N)
    return jax.jit(over_workers(worker))(state, DATA)


@pytest.mark.draw(12)
@pytest.mark.parametrize("name", AVERAGED)
def test_an_optimizer_keeps_the_average_of_the_models(name):
    models = np.asarray(_trained(name, awc).params)
    assert np.abs(models - models.mean(0)).max() < APART / 4
    assert np.abs(models.mean(0) - DATA.mean(0)).max() < 0.7 * FAR


@pytest.mark.draw(12)
@pytest.mark.parametrize("name", AVERAGED | REFUSED)
def test_all_reduce_keeps_one_model_with_any_optimizer(name):
    models = np.asarray(_trained(name, all_reduce).params)
    assert np.isfinite(models).all()
    assert (models == models[0]).all()


@pytest.mark.parametrize("name", REFUSED)
def test_an_optimizer_that_undoes_the_average_is_refused(name):
    message = r"does not keep averaged models: .*; use another optimizer"
    optimizer = REFUSED[name]
    local = local_update(loss_fn=noisy, optimizer=optimizer)
    state = init_state(START, optimizer, jax.random.key(0), N)
    for plan in (topology.ring(N), atc(topology.ring(N))):
        with pytest.raises(TypeError, match=message):
            simulate(local, plan).lower(state, DATA, 0)
        whole = decentralize(optax.masked(optimizer, True), plan, AXIS)
        with pytest.raises(TypeError, match=message):
            _updated(whole)


WRAPPERS = {
    "alone": lambda x: x,
    "chain": lambda x: optax.chain(optax.clip(1.0), x),
    "masked": lambda x: optax.masked(x, True),
    "MultiSteps": lambda x: optax.MultiSteps(x, 2),
    "partition": lambda x: optax.partition({"all": x}, "all"),
    "apply_if_finite": lambda x: optax.apply_if_finite(x, 2),
}


def _split(state):
    """As `nnx.split` leaves the state of an `nnx.Optimizer`: without empty parts."""
    mapping = serialization.to_state_dict(state)

    def kept(x):
        if not isinstance(x, dict):
            return x
        return {k: kept(v) for k, v in x.items() if jax.tree.leaves(v)}

    return nnx.State(kept(mapping))


@pytest.mark.parametrize("form", [serialization.to_state_dict, _split])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_state_is_known_without_its_type(wrapper, form):
    for name, optimizer in (AVERAGED | REFUSED).items():
        if name in ("MultiSteps", "split_real_and_imaginary") and wrapper != "alone":
            continue
        state = form(WRAPPERS[wrapper](optimizer).init(START))
        if name in REFUSED:
            with pytest.raises(TypeError, match="does not keep averaged models"):
                check_averageable(state)
        else:
            check_averageable(state)
        assert len(own_models(state)) == name.startswith("schedule_free")
        check_averages_nothing(state, "this")


def test_rounds_inside_are_known_without_their_type():
    whole = decentralize(optax.adam(0.1), methods.diloco(N, 5), AXIS)
    for form in (serialization.to_state_dict, _split):
        with pytest.raises(TypeError, match="averages the models itself"):
            check_averages_nothing(form(whole.init(START)), "this")


class Masters(NamedTuple):
    master: Any
    inner: Any


def with_masters(inner, slow=0.0):
    """Steps from float32 masters, or back to what is slow, of the params."""

    def init(params):
        master = jax.tree.map(lambda x: x.astype(jnp.float32), params)
        return Masters(master, inner.init(master))

    def update(grads, state, params):
        wide = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
        updates, inner_state = inner.update(wide, state.inner, state.master)
        master = optax.apply_updates(state.master, updates)
        master = jax.tree.map(lambda m, p: m + slow * (p - m), master, params)
        out = jax.tree.map(lambda m, p: m.astype(p.dtype) - p, master, params)
        return out, Masters(master, inner_state)

    return optax.GradientTransformation(init, update)


def with_average(inner):
    """Keeps a moving average of the params, from which no update starts."""

    def update(grads, state, params):
        updates, inner_state = inner.update(grads, state.inner, params)
        moved = optax.apply_updates(params, updates)
        mean = jax.tree.map(lambda m, x: 0.9 * m + 0.1 * x, state.master, moved)
        return updates, Masters(mean, inner_state)

    init = lambda params: Masters(params, inner.init(params))  # noqa: E731
    return optax.GradientTransformation(init, update)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(
    "make",
    [
        with_masters,
        functools.partial(with_masters, slow=0.5),
        lambda x: optax.chain(optax.clip(1.0), with_masters(x)),
        lambda x: optax.masked(with_masters(x), True),
        lambda x: optax.MultiSteps(with_masters(x), 2),
        lambda x: optax.inject_hyperparams(lambda c: with_masters(x))(0.1),
    ],
)
def test_an_optimizer_that_steps_from_a_copy_is_refused(make, dtype, n):
    optimizer, start = make(optax.sgd(0.1, momentum=0.9)), jnp.zeros((2, 3), dtype)
    loss_fn = lambda p, s, b, k: (jnp.sum(p * b), (s, {}))  # noqa: E731
    local = local_update(loss_fn=loss_fn, optimizer=optimizer)
    state = init_state(start, optimizer, jax.random.key(0), n)
    message = r"steps from .*master, a copy of the params, .* takes every average"
    for plan in (topology.ring(n), atc(topology.ring(n))):
        with pytest.raises(TypeError, match=message):
            simulate(local, plan).lower(state, jnp.ones((n, 2, 3)), 0)
    whole = decentralize(optimizer, topology.ring(n), AXIS)
    with pytest.raises(TypeError, match=message):
        _updated(whole, jnp.zeros((n, 2, 3), dtype))
    step = simulate(local, methods.all_reduce(n))
    step.lower(state, jnp.ones((n, 2, 3)), 0)  # Averages gradients.


def test_a_copy_from_which_no_step_starts_is_allowed():
    inner = {"plain": optax.adam(0.1), "kept": exact_diffusion(optax.sgd(0.1))}
    inner |= {"quasi": quasi_global_momentum(0.1), "dog": contrib.dog(1.0)}
    for one in inner.values():
        assert _updated(decentralize(with_average(one), topology.ring(N), AXIS))


def test_an_optimizer_that_takes_no_loss_gets_no_loss():
    models = np.asarray(_trained("sam", awc).params)
    assert np.isfinite(models).all()


def _updated(optimizer, params=None, **options):
    """The first updates of all workers, by gradients of zero."""
    params = jnp.ones((N, 3)) if params is None else params
    state = jax.vmap(optimizer.init)(params)

    def update(state, params):
        zeros = jax.tree.map(jnp.zeros_like, params)
        return optimizer.update(zeros, state, params, **options)

    return jax.vmap(update, axis_name=AXIS)(state, params)


def _transformations(module):
    """The public functions of a module that return a transformation."""
    return {
        name
        for name, function in inspect.getmembers(module, inspect.isfunction)
        if "GradientTransf" in str(inspect.signature(function).return_annotation)
        and not name.startswith("_")
    }


# Parts of optimizers, and wrappers around them, which keep no model.
PARTS = {
    *(name for name in dir(optax) if name.startswith("scale")),
    *(name for name in dir(contrib) if name.startswith("scale_by_")),
    "adaptive_grad_clip",
    "add_decayed_weights",
    "add_noise",
    "apply_if_finite",
    "centralize",
    "chain",
    "clip",
    "clip_by_block_rms",
    "clip_by_global_norm",
    "conditionally_mask",
    "conditionally_transform",
    "flatten",
    "freeze",
    "identity",
    "inject_hyperparams",
    "inject_stateful_hyperparams",
    "keep_params_nonnegative",
    "masked",
    "measure_with_ema",
    "multi_transform",
    "named_chain",
    "normalize_by_update_norm",
    "partition",
    "selective_transform",
    "set_to_zero",
    "snapshot",
    "stateless",
    "stateless_with_tree_map",
    "trace",
    "with_extra_args_support",
    "zero_nans",
    "differentially_private_aggregate",
    "normalize",
}
# The first has a new name, the others ask for arguments or params of their own.
OTHERS = {"optimistic_adam", "lookahead", "dpsgd", "sophia", "schedule_free"}


def test_each_optimizer_of_optax_is_in_a_table():
    found = _transformations(optax) | _transformations(contrib)
    assert found - PARTS - OTHERS - {*AVERAGED, *REFUSED} == set()
    assert {"adam", "cocob", "schedule_free"} <= found


@pytest.mark.draw(2)
@pytest.mark.parametrize("plan_of", [awc, atc])
@pytest.mark.parametrize("n", [1, 2, 5])
def test_z_of_schedule_free_is_averaged_with_the_model(plan_of, n):
    rate, b1, steps = 0.1, 0.9, 30
    optimizer = contrib.schedule_free_sgd(rate, b1=b1)
    graph, data = topology.ring(n), np.arange(n, dtype=np.float32)[:, None]

    def loss_fn(params, model_state, batch, key):
        return 0.5 * jnp.sum((params - batch) ** 2), (model_state, {})

    local = local_update(loss_fn=loss_fn, optimizer=optimizer)
    step = simulate(local, plan_of(graph))
    state = init_state(jnp.full(1, 5.0), optimizer, jax.random.key(0), n)
    for t in range(steps):
        state, _ = step(state, data, t)

    matrix = topology.matrices(graph)[0]
    y = z = np.full((n, 1), 5.0)
    for t in range(steps):
        gradient = y - data
        if plan_of is awc:
            y, z = matrix @ y, matrix @ z
        x = (y - (1 - b1) * z) / b1
        z = z - rate * gradient
        x = x + (z - x) / (t + 1)
        y = b1 * x + (1 - b1) * z
        if plan_of is atc:
            y, z = matrix @ y, matrix @ z
    np.testing.assert_allclose(state.params, y, rtol=0, atol=1e-4)
    np.testing.assert_allclose(state.opt_state.z, z, rtol=0, atol=1e-4)


def test_z_of_schedule_free_is_averaged_inside_decentralize():
    optimizer = contrib.schedule_free_sgd(0.1, warmup_steps=2)
    whole = decentralize(
        optax.chain(optax.clip(9.0), optimizer), topology.ring(5), AXIS
    )
    z = jnp.arange(5.0)[:, None]
    state = jax.vmap(whole.init)(z)
    update = jax.vmap(lambda s, x: whole.update(0 * x, s, x), axis_name=AXIS)
    found = update(state, z)[1].inner_state[1].z
    wanted = topology.matrices(topology.ring(5))[0] @ z
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-6)


def test_where_z_would_not_be_averaged_schedule_free_is_refused():
    optimizer = contrib.schedule_free_sgd(0.1)
    local = local_update(loss_fn=noisy, optimizer=optimizer)
    rounds, graph = methods.diloco(N, 5), topology.ring(N)
    state = init_state(START, optimizer, jax.random.key(0), rounds)
    message = "keeps a second model z, .* and {} averages only the params"
    with pytest.raises(TypeError, match=message.format("a round")):
        simulate(local, rounds).lower(state, DATA, 0)
    with (
        gossip.Background(local, graph, worker_mesh(N)) as beside,
        pytest.raises(TypeError, match=message.format("an exchange beside the step")),
    ):
        beside(state._replace(extra=()), DATA, 0)


@pytest.mark.draw(4)
@pytest.mark.parametrize(
    "make",
    [
        lambda: optax.noisy_sgd(1.0, eta=1.0, gamma=0.0, key=0),
        lambda: optax.chain(optax.add_noise(1.0, 0.0, key=1), optax.sgd(1.0)),
        lambda: optax.chain(_private(), optax.sgd(1.0)),
        lambda: optax.chain(_with_keys(jax.random.PRNGKey(0)), optax.sgd(1.0)),
        lambda: optax.chain(_with_keys(jax.random.key(0)), optax.sgd(1.0)),
        lambda: optax.chain(
            _with_keys(jax.random.split(jax.random.key(0), 3)), optax.sgd(1.0)
        ),
        lambda: optax.chain(
            _with_keys(jax.random.split(jax.random.PRNGKey(0), 3)), optax.sgd(1.0)
        ),
    ],
    ids=["noisy_sgd", "add_noise", "dpsgd", "old_key", "key", "keys", "old_keys"],
)
@pytest.mark.filterwarnings("ignore:.*is taken for a random key")
@pytest.mark.parametrize("how", ["init_state", "decentralize", "init_in_axis"])
def test_each_worker_draws_noise_of_its_own(make, how):
    optimizer, n = make(), 5
    zeros = jnp.zeros((n, 1000))

    def loss_fn(params, model_state, batch, key):
        return 0.0 * jnp.sum(params), (model_state, {})

    if how == "init_state":
        state = init_state(zeros[0], optimizer, jax.random.key(0), n)
        update = jax.vmap(lambda s, x: optimizer.update(_examples(s, x), s, x)[0])
        drawn = update(state.opt_state, zeros)
    else:
        whole = decentralize(optimizer, topology.ring(n), AXIS)
        name = AXIS if how == "init_in_axis" else None
        state = jax.vmap(whole.init, axis_name=name)(zeros)
        step = jax.vmap(
            lambda s, x: whole.update(_examples(s, x), s, x), axis_name=AXIS
        )
        first, state = step(state, zeros)
        drawn = step(state, zeros)[0]
        assert np.abs(np.corrcoef(first[0], drawn[0])[0, 1]) < 0.15
    apart = np.corrcoef(drawn) - np.eye(n)
    assert np.abs(apart).max() < 0.15


def _examples(state, x):
    """A gradient of zero; of each example, where privacy asks for that."""
    found = jax.tree.leaves(state, is_leaf=_is_private)
    return jnp.zeros((2, *x.shape)) if any(map(_is_private, found)) else 0 * x


def _is_private(x):
    return isinstance(x, contrib.DifferentiallyPrivateAggregateState)


def _private():
    return contrib.differentially_private_aggregate(1e6, 1e-6, key=0)


def _with_keys(keys):
    """Noise by keys that are named so, beside a number of the dtype of keys."""
    is_old = not jnp.issubdtype(keys.dtype, jax.dtypes.prng_key)
    first = lambda keys: keys.reshape(-1, *keys.shape[keys.ndim - is_old :])[0]  # noqa: E731

    def update(updates, state, params=None):
        keys, count = state["noise_key"], state["count"]
        draw = jax.random.fold_in(first(keys), count)
        state = {"noise_key": keys, "count": count + 1}
        return updates + jax.random.normal(draw, updates.shape), state

    first_state = {"noise_key": keys, "count": jnp.uint32(0)}
    return optax.GradientTransformation(lambda params: first_state, update)


def _named(*transformations):
    return optax.named_chain(*((str(i), x) for i, x in enumerate(transformations)))


@pytest.mark.parametrize("chain", [optax.chain, _named])
@pytest.mark.parametrize("key", [jax.random.key(0), jax.random.PRNGKey(0)])
@pytest.mark.filterwarnings("ignore:.*is taken for a random key")
def test_noise_before_decentralize_in_a_chain_is_refused(chain, key):
    after = optax.masked(decentralize(optax.sgd(0.1), topology.ring(N), AXIS), True)
    message = "has a random key, .* is the same on all workers: put it inside"
    with pytest.raises(ValueError, match=message):
        _updated(chain(optax.clip(1.0), _with_keys(key), after))


@pytest.mark.slow
def test_an_optimizer_of_several_steps_hands_on_the_loss():
    """`optax.MultiSteps` is no transformation with extra arguments by its type."""
    plateau = contrib.reduce_on_plateau(patience=1)
    inner = optax.MultiSteps(optax.chain(optax.sgd(0.1), plateau), 2)
    whole = decentralize(inner, topology.ring(N), AXIS)
    assert _updated(whole, value=jnp.ones(()))[0].shape == (N, 3)
    local = local_update(loss_fn=noisy, optimizer=inner)
    step = simulate(local, topology.ring(N))
    state = init_state(START, inner, jax.random.key(0), N)
    for t in range(4):
        state, _ = step(state, DATA, t)
    assert jnp.isfinite(state.opt_state.inner_opt_state[1].best_value).all()


def test_z_of_what_a_mask_leaves_out_is_not_averaged():
    inner = optax.masked(contrib.schedule_free_sgd(0.1), False)
    models = jnp.arange(N * 3.0).reshape(N, 3)
    whole = decentralize(inner, topology.complete(N), AXIS)
    found = models + _updated(whole, models)[0]
    np.testing.assert_allclose(found, np.tile(models.mean(0), (N, 1)), rtol=1e-6)


@pytest.mark.slow
@pytest.mark.draw(4)
@pytest.mark.parametrize("n", [1, 3, 4])
@pytest.mark.parametrize("where", ["simulated", "mesh", "pieces"])
def test_all_reduce_watches_the_mean_loss(n, where):
    """As one process does with all data, whose loss falls where a worker's rises."""
    optimizer = optax.chain(
        optax.sgd(0.05), contrib.reduce_on_plateau(factor=0.5, patience=2)
    )
    data = 10.0 * np.arange(n) + np.random.default_rng(0).standard_normal((60, n))
    data = jnp.asarray(data, jnp.float32)

    def loss_fn(params, model_state, batch, key):
        return jnp.mean((params - batch) ** 2), (model_state, {})

    local = local_update(loss_fn=loss_fn, optimizer=optimizer)
    state = init_state(jnp.zeros(()), optimizer, jax.random.key(0), n)
    plan = methods.all_reduce(n)
    if where == "simulated":
        train_step = simulate(local, plan)
    elif where == "mesh":
        train_step = on_mesh(local, plan, worker_mesh(n))
    else:
        train_step = gossip.AllReduce(local, worker_mesh(n))
    for t, batch in enumerate(data):
        state, _ = train_step(state, batch, t)

    x, one = jnp.zeros(()), optimizer.init(jnp.zeros(()))
    for batch in data:
        value, gradient = jax.value_and_grad(lambda x: jnp.mean((x - batch) ** 2))(x)  # noqa: B023
        updates, one = optimizer.update(gradient, one, x, value=value)
        x = optax.apply_updates(x, updates)
    scale = state.opt_state[1].scale
    assert (scale == one[1].scale).all()
    assert one[1].scale < 1
    assert (state.params == state.params[0]).all()
    np.testing.assert_allclose(state.params[0], x, rtol=1e-5)
