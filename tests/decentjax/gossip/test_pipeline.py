"""A cut function computes what the whole does, first what awaits nothing."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend.core import jaxpr_as_fun

from decentjax.gossip.pipeline import Cut

PARAMS = {
    "bias": jnp.zeros(3),
    "inner": jax.random.normal(jax.random.key(0), (5, 4)),
    "outer": jax.random.normal(jax.random.key(1), (4, 3)),
}
MIXED = jax.tree.map(lambda x: 0.5 * x + 0.25, PARAMS)
BATCH = jax.random.normal(jax.random.key(2), (6, 5))


class Case(NamedTuple):
    """A function, examples of its arguments, and of the last one, which is awaited."""

    function: Callable
    known: tuple
    awaited: Any = MIXED


def _gradient(params, batch):
    def loss(params):
        hidden = jax.nn.relu(batch @ params["inner"])
        outputs = hidden @ params["outer"] + params["bias"][None]
        return jnp.mean(jnp.square(jnp.tanh(outputs)))

    return jax.grad(loss)(params)


def _step(optimizer: optax.GradientTransformation) -> Case:
    def step(params, state, batch, mixed):
        grads = _gradient(params, batch)
        updates, state = optimizer.update(grads, state, mixed)
        return optax.apply_updates(mixed, updates), state

    return Case(step, (PARAMS, optimizer.init(PARAMS), BATCH))


def _averaging(params, average, batch, mixed):
    """Its state follows the mixed model."""
    grads = _gradient(params, batch)
    model = jax.tree.map(lambda x, g: x - 0.1 * g, mixed, grads)
    return model, jax.tree.map(lambda a, x: 0.9 * a + 0.1 * x, average, mixed)


def _ignoring(params, batch, mixed):
    del mixed
    return _gradient(params, batch)


_TABLE = np.arange(3.0, dtype="float32")


def _handing_on(params, batch, mixed):
    """Constants, arguments, one output twice."""
    twice = 2 * mixed["bias"]
    numbers = (1.5, 7, True, jnp.bfloat16(0.1), jnp.asarray(_TABLE), None)
    return numbers, params["bias"], batch, mixed, mixed["inner"], twice, twice


def _branching(params, batch, mixed):
    grads = _gradient(params, batch)
    scaled, trace = jax.lax.scan(
        lambda c, g: (c * 0.5 + g, c), mixed["bias"], batch[:, :3]
    )
    known = jax.lax.scan(lambda c, x: (c + x, None), jnp.zeros(5), batch)[0]
    chosen = jax.lax.cond(
        jnp.sum(mixed["outer"]) > known[0],
        lambda x: x - 1,
        lambda x: x + grads["outer"],
        mixed["outer"],
    )
    halved = jax.lax.while_loop(
        lambda x: jnp.max(x) > 0.1, lambda x: x / 2, jnp.abs(mixed["inner"])
    )
    jitted = jax.jit(lambda x, g: (x - g, g))(mixed["inner"], grads["inner"])
    return scaled, trace, known, chosen, halved, jitted


@jax.custom_vjp
def _doubled(x):
    return 2 * x


_doubled.defvjp(lambda x: (2 * x, None), lambda _, g: (2 * g,))


def _differentiating(params, batch, mixed):
    """Custom and checkpointed derivatives at both models."""

    @jax.checkpoint
    def loss(model):
        hidden = jax.nn.gelu(batch @ _doubled(model["inner"]))
        return jnp.sum(jax.nn.relu(hidden @ model["outer"]))

    return jax.grad(loss)(params), jax.grad(loss)(mixed)


def _random(params, key, mixed):
    key, mine = jax.random.split(key)
    noise = jax.random.normal(mine, params["bias"].shape)
    other = jax.random.bernoulli(mixed["key"], 0.5, (4,))
    return mixed["bias"] + noise, key, mixed["key"], jax.random.fold_in(key, 1), other


CASES = {
    "adam": _step(optax.adam(0.1)),
    "adamw_masked": _step(
        optax.adamw(
            0.1, weight_decay=0.3, mask=jax.tree.map(lambda x: x.ndim > 1, PARAMS)
        )
    ),
    "lamb": _step(optax.lamb(0.1)),
    "sgd_with_momentum": _step(optax.sgd(0.1, momentum=0.9)),
    "schedule_free": _step(optax.contrib.schedule_free_sgd(0.1)),
    "clipped": _step(optax.chain(optax.clip_by_global_norm(0.01), optax.adamw(0.1))),
    "clipped_at_last": _step(
        optax.chain(optax.adamw(0.1), optax.clip_by_global_norm(0.01))
    ),
    "skipping_what_is_not_finite": _step(optax.apply_if_finite(optax.adam(0.1), 3)),
    "averaging": Case(_averaging, (PARAMS, PARAMS, BATCH)),
    "ignoring": Case(_ignoring, (PARAMS, BATCH)),
    "handing_on": Case(_handing_on, (PARAMS, BATCH)),
    "branching": Case(_branching, (PARAMS, BATCH)),
    "differentiating": Case(_differentiating, (PARAMS, BATCH)),
    "jitted": _step(optax.adamw(0.1))._replace(
        function=jax.jit(_step(optax.adamw(0.1)).function)
    ),
    "random": Case(
        _random, (PARAMS, jax.random.key(3)), MIXED | {"key": jax.random.key(4)}
    ),
}
EACH_CASE = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def _cut(case: Case) -> Cut:
    return Cut(case.function, case.known, case.awaited)


def _in_parts(cut: Cut, case: Case, parts: list[tuple[int, ...]]) -> Any:
    """Early, then part after part, each given only what it says it needs."""
    values = jax.jit(cut.early)(*case.known)
    outputs = dict(zip(cut.finished, values, strict=False))
    awaited = jax.tree.leaves(case.awaited)
    for numbers in parts:
        part = cut.part(numbers)
        got = jax.jit(part.compute)(
            [awaited[i] for i in part.awaits], [values[i] for i in part.uses]
        )
        outputs.update(zip(numbers, got, strict=True))
    leaves = [outputs[i] for i in range(cut.structure.num_leaves)]
    return jax.tree.unflatten(cut.structure, leaves)


def _late(cut: Cut) -> tuple[int, ...]:
    return tuple(i for i in range(cut.structure.num_leaves) if i not in cut.finished)


def _bits(x: Any) -> np.ndarray:
    x = jnp.asarray(x)
    is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(x) if is_key else x)


@pytest.mark.slow
@pytest.mark.draw(8)
@EACH_CASE
@pytest.mark.parametrize("one_by_one", [True, False])
def test_early_and_parts_give_the_bits_of_the_function(case, one_by_one):
    """Without a compiler, which rounds as it fuses."""
    cut = _cut(case)
    late = _late(cut)
    parts = [(number,) for number in late] if one_by_one else [late]
    whole = jax.make_jaxpr(case.function)(*case.known, case.awaited)
    with jax.disable_jit():
        got = _in_parts(cut, case, parts)
        wanted = jaxpr_as_fun(whole)(*jax.tree.leaves((case.known, case.awaited)))
    for x, y in zip(jax.tree.leaves(got), wanted, strict=True):
        assert np.array_equal(_bits(x), _bits(y))


@pytest.mark.slow
@pytest.mark.draw(4)
@EACH_CASE
def test_compiled_they_give_what_the_function_gives(case):
    cut = _cut(case)
    got = _in_parts(cut, case, [_late(cut)])
    wanted = case.function(*case.known, case.awaited)
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert x.dtype == jnp.asarray(y).dtype
        np.testing.assert_allclose(
            _bits(x).astype("float64"), _bits(y).astype("float64"), rtol=1e-5, atol=1e-5
        )


@EACH_CASE
def test_what_is_not_finished_awaits_something_and_early_returns_no_more(case):
    cut = _cut(case)
    assert all(cut.part([number]).awaits for number in _late(cut))
    values = jax.eval_shape(cut.early, *case.known)
    uses = cut.part(_late(cut)).uses
    assert list(uses) == list(range(len(cut.finished), len(values)))


def _matmuls(function: Callable, *arguments: Any) -> int:
    return str(jax.make_jaxpr(function)(*arguments)).count("dot_general")


OPTIMIZERS = [
    pytest.param(case, id=name) for name, case in CASES.items() if len(case.known) == 3
]


@pytest.mark.parametrize("case", OPTIMIZERS)
def test_the_gradient_is_computed_early_and_by_no_part(case):
    cut = _cut(case)
    whole = _matmuls(case.function, *case.known, case.awaited)
    assert _matmuls(cut.early, *case.known) == whole >= 4
    part = cut.part(_late(cut))
    values = jax.eval_shape(cut.early, *case.known)
    awaited = jax.tree.leaves(case.awaited)
    arguments = [awaited[i] for i in part.awaits], [values[i] for i in part.uses]
    assert _matmuls(part.compute, *arguments) == 0


@pytest.mark.parametrize(
    "name",
    ["adam", "adamw_masked", "lamb", "sgd_with_momentum", "clipped", "averaging"],
)
def test_each_leaf_awaits_the_mixed_leaf_of_its_own_place_alone(name):
    cut = _cut(CASES[name])
    values = jax.eval_shape(cut.early, *CASES[name].known)
    for number, leaf in enumerate(jax.tree.leaves(PARAMS)):
        part = cut.part([number])
        assert part.awaits == (number,)
        # Of the early values, too, it uses none that belongs to another leaf.
        assert {values[i].shape for i in part.uses} <= {leaf.shape, ()}


def test_a_norm_over_all_updates_awaits_all_leaves_that_decay():
    cut = _cut(CASES["clipped_at_last"])
    assert [cut.part([number]).awaits for number in range(3)] == [(0, 1, 2)] * 3


@pytest.mark.parametrize(
    "name", ["adam", "adamw_masked", "lamb", "sgd_with_momentum", "clipped"]
)
def test_of_these_optimizers_the_whole_state_is_finished_early(name):
    cut = _cut(CASES[name])
    assert _late(cut) == (0, 1, 2)


def test_side_effects_of_the_mixed_model_are_refused():
    def function(x, mixed):
        jax.debug.print("{}", mixed)
        return x, mixed

    with pytest.raises(ValueError, match="has side effects and uses the mixed model"):
        Cut(function, (jnp.zeros(3),), jnp.zeros(3))


def test_other_side_effects_come_once(capfd):
    def function(x, mixed):
        jax.debug.print("it is {}", x.sum())
        return x, x + mixed

    cut = Cut(function, (jnp.zeros(3),), jnp.zeros(3))
    values = jax.jit(cut.early)(jnp.ones(3))
    jax.jit(cut.part((1,)).compute)([jnp.ones(3)], values[1:])
    jax.effects_barrier()
    assert capfd.readouterr().out == "it is 3.0\n"


def test_what_is_noted_for_the_compiler_stays():
    def function(x, mixed):
        with set_xla_metadata(note="kept"):
            return 2 * x + mixed

    zeros = jnp.zeros(3)
    cut = Cut(function, (zeros,), zeros)
    assert 'note = "kept"' in jax.jit(cut.early).lower(zeros).as_text()


def test_a_cut_needs_no_arrays_but_their_shapes():
    case = CASES["adam"]
    shapes = functools.partial(jax.tree.map, jax.typeof)
    cut = Cut(case.function, shapes(case.known), shapes(case.awaited))
    got = _in_parts(cut, case, [_late(cut)])
    wanted = _in_parts(_cut(case), case, [_late(cut)])
    same = jax.tree.map(np.array_equal, got, wanted)
    assert jax.tree.all(same)
