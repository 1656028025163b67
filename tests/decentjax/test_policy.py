"""Policies that choose a step's graph, and the dispersion by which they may do so."""

import dataclasses
import functools
import math
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy import stats

from decentjax import (
    AXIS,
    Rounds,
    decentralize,
    init_state,
    local_update,
    on_mesh,
    over_workers,
    place,
    policy,
    simulate,
    topology,
    worker_mesh,
    wrap,
)
from decentjax.dispersion import (
    measured,
    measures_of,
    tensor_distances,
    tensor_names,
    tensor_norms,
)
from decentjax.gossip import Background
from decentjax.plan import policy_of, schedule_of
from tests import line
from tests.hlo import collective_names
from train.cli.sections import kind_of
from train.config import (
    AtcMethod,
    AwcMethod,
    HoldingPolicy,
    MergedPolicy,
    OptimizerConfig,
    WorkersConfig,
)
from train.run.loop import train
from train.run.optimizers import build_schedule
from train.run.resume import Resume
from train.run.setup import make_run
from train.store.log import read_metrics
from train.study.seeds import train_seeds


def loss_fn(params, model_state, batch, key):
    loss = sum(jnp.sum((x - batch) ** 2) for x in jax.tree.leaves(params))
    return loss, (model_state, {})


def sgd_step(params, batch):
    grads = jax.grad(lambda x: loss_fn(x, (), batch, None)[0])(params)
    return jax.tree.map(lambda x, g: x - 0.1 * g, params, grads), ()


LOCAL = local_update(loss_fn, optax.sgd(0.1))
LATE = policy.merged(topology.ring(4), 100)


def in_a_program(plan):
    optimizer = decentralize(optax.sgd(0.1), plan, AXIS)

    def worker(x):
        return optimizer.update(x, optimizer.init(x), x)[0]

    return jax.vmap(worker, axis_name=AXIS)(jnp.ones(4))


def chosen(made, place):
    """The graph of a place in the menu."""
    (graph,) = [graph for graph in made.graphs if made.menu[place] in graph.exchanges]
    return graph


@pytest.mark.parametrize("num_workers", [1, 2, 3, 8, 13])
def test_ada_loses_neighbours_by_epochs(num_workers):
    made = policy.thinning(num_workers, 9, per_epoch=2.5, epoch_steps=100, least=3)
    for step, degree in ((0, 9), (99, 9), (100, 7), (299, 4), (300, 3), (10_000, 3)):
        graph = chosen(made, made.turn(step))
        even = degree - degree % 2
        wanted = num_workers - 1 if degree >= num_workers - 1 else even
        weights = topology.matrices(graph)[0, 0]
        assert np.count_nonzero(weights) == wanted + 1
        np.testing.assert_allclose(weights[weights > 0], 1 / (wanted + 1), rtol=1e-6)


def test_ada_has_the_graphs_that_it_takes():
    made = policy.thinning(64, degree=16, per_epoch=6.0, epoch_steps=5, least=2)
    neighbours = [np.count_nonzero(topology.matrices(x)[0, 0]) - 1 for x in made.graphs]
    assert neighbours == [16, 10, 4, 2]


def test_the_closed_loop_holds_a_dispersion():
    graphs = policy.ladder(64)
    assert [np.count_nonzero(topology.matrices(g)[0, 0]) - 1 for g in graphs] == [
        *(63, 32, 16, 8, 4, 2)
    ]
    made = policy.holding(graphs, target=1.0, slack=0.25)
    dispersions = [0.5, 0.8, 0.7, 0.7, 1.2, 1.3, 9, 9, 9, 9, *[0.1] * 9]
    places = [1, 1, 2, 3, 3, 2, 1, 0, 0, 0, 1, 2, 3, 4, 5, 5, 5, 5, 5]
    assert graphs.index(chosen(made, made.turn(0))) == 0
    for step, (dispersion, at) in enumerate(zip(dispersions, places, strict=True)):
        made.learn(dispersion)
        graph = chosen(made, made.turn(step))
        assert graphs.index(graph) == at
        assert made.current == at


def test_a_mixing_factor_follows_its_schedule():
    ring = topology.ring(8)
    made = policy.damping(ring, lambda step: step / 10, levels=4)
    for step, level in ((0, 0.25), (2, 0.25), (3, 0.5), (10, 1.0)):
        wanted = topology.matrices(topology.damped(ring, level))[0]
        got = topology.matrices(chosen(made, made.turn(step)))[0]
        np.testing.assert_allclose(got, wanted)
    with pytest.raises(ValueError, match=r"is in \[0, 1\], got 1.1 at 11"):
        made.turn(11)


def test_a_graph_of_several_exchanges_goes_on_in_turn():
    graph, num_steps = topology.one_peer_exponential(8), 7
    made = policy.merged(graph, num_steps)
    exchanges = [made.menu[made.turn(step)] for step in range(num_steps)]
    assert exchanges == [*(graph[step] for step in range(6)), topology.complete(8)[0]]


def test_a_graph_that_was_not_named_is_refused():
    star = lambda *_: topology.star(4)  # noqa: E731
    made = policy.Policy("own", [topology.ring(4)], star, star)
    for ask, when in ((made.turn, "step 3"), (made.learn, "dispersion 3")):
        with pytest.raises(ValueError, match=rf"chose star for {when}, .*graphs: ring"):
            ask(3)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: policy.thinning(8, 4, 1.0, 5, 6), "2 <= least <= degree"),
        (lambda: policy.thinning(8, 4, -1.0, 5), "per_epoch must not be negative"),
        (lambda: policy.thinning(8, 4, math.nan, 5), "per_epoch must not be negative"),
        (lambda: policy.holding(policy.ladder(8), 0.0), "target must be positive"),
        (lambda: policy.holding(policy.ladder(8), 1.0, 1.0), r"slack in \[0, 1\)"),
        (lambda: policy.damping(topology.ring(4), lambda t: 1.0, 0), "one level"),
        (lambda: policy.thinning(8, 4, 1.0, 0), "an epoch has at least one step"),
        (lambda: policy.Policy("none", [], lambda *_: None), "needs exchanges"),
        (lambda: Rounds(LATE, every=2), "exchange of every step: leave every at 1"),
        (lambda: Background(LOCAL, LATE, worker_mesh(4)), "use simulate or on_mesh"),
        (lambda: in_a_program(LATE), "this program has an array: use simulate"),
    ],
)
def test_policies_that_make_no_sense_are_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()


@pytest.mark.parametrize("plan_of", [lambda made: made, Rounds], ids=["awc", "atc"])
def test_a_policy_that_goes_by_its_last_choice_is_asked_once_a_step(plan_of):
    ring, whole = topology.ring(3), topology.complete(3)
    turns = policy.Policy(
        "turns", [whole, ring], lambda _, now: {ring: whole}.get(now, ring)
    )
    events = [schedule_of(plan_of(turns))[step] for step in range(4)]
    assert [one.sends.exchange for one in events] == [ring[0], whole[0]] * 2
    assert all(one.receives in (None, one.sends) for one in events)


@pytest.mark.parametrize("n", [1, 3, 4])
@pytest.mark.parametrize("where", ["simulate", "on_mesh", "wrap"])
@pytest.mark.parametrize("after", [False, True], ids=["awc", "atc"])
def test_a_policy_is_a_plan(after, where, n):
    """Step by step the numbers of the topologies that it chooses."""
    graphs = [topology.one_peer_exponential(n), topology.complete(n)]
    made = policy.Policy("late", graphs, lambda step, _: graphs[step >= 3])
    plan_of = Rounds if after else lambda graph: graph
    batch, mesh = jnp.arange(float(n)), None
    if where == "on_mesh":
        mesh = worker_mesh(n)
        batch = place(batch, mesh)

    def step_of(graph):
        if where == "wrap":
            return wrap(sgd_step, plan_of(graph), params=lambda x: x)
        local = local_update(loss_fn, optax.sgd(0.1))
        if mesh is None:
            return simulate(local, plan_of(graph))
        return on_mesh(local, plan_of(graph), mesh)

    def first(step):
        params = {"matrix": jnp.arange(6.0).reshape(2, 3)}
        return step.init(*[params] if where == "wrap" else [params, jax.random.key(0)])

    step, apart = step_of(made), [step_of(graph) for graph in graphs]
    state, (wanted, _) = first(step), map(first, apart)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # One of them is not called in turn.
        for t in range(6):
            state, _ = step(state, batch, t)
            wanted, _ = apart[t >= 3](wanted, batch, t)
            found = jax.tree.leaves(state)[0], jax.tree.leaves(wanted)[0]
            np.testing.assert_array_equal(*found)


def start(num_workers):
    params = {
        "matrix": jnp.arange(6.0).reshape(2, 3),
        "vector": jnp.full(2, -2.0, "float32"),
    }
    return init_state(params, optax.sgd(0.1), jax.random.key(0), num_workers)


def test_a_policy_compiles_each_exchange_once():
    optimizer = optax.sgd(0.1)
    local = measured(local_update(loss_fn, optimizer))
    made = policy.holding(policy.ladder(8), target=0.1)
    train_step, state = simulate(local, made), start(8)
    batch = jax.random.normal(jax.random.key(1), (8,))
    num_compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, *_, **__: (
            num_compiled.append(name)
            if name == "/jax/core/compile/backend_compile_duration"
            else None
        )
    )
    for t, dispersion in enumerate([None, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 1.0, 1.0]):
        if dispersion is not None:
            made.learn(dispersion)
        state, metrics = train_step(state, batch, t)
        if t == 3:
            num_compiled.clear()
    assert num_compiled == []
    assert metrics["norms"].shape == (8, 2)


def test_norms_are_of_the_models_before_they_are_averaged():
    local = local_update(loss_fn, optax.sgd(0.1))
    batch = jnp.arange(4.0)
    for before in (True, False):
        train_step = simulate(measured(local, before), topology.ring(4))
        state = start(4)
        new, metrics = train_step(start(4), batch, 0)
        params = state.params if before else new.params
        wanted = [
            np.linalg.norm(np.asarray(x).reshape(4, -1), axis=1)
            for x in jax.tree.leaves(params)
        ]
        np.testing.assert_allclose(metrics["norms"], np.transpose(wanted), rtol=1e-6)
    assert tensor_names(state.params) == ["matrix", "vector"]
    np.testing.assert_allclose(tensor_norms({"a": jnp.array([3.0, 4.0])}), [5.0])


def test_norms_stand_in_the_way_of_nothing():
    """Alone they take no collective, and the step takes no further one for them."""
    mesh, names = worker_mesh(4), []
    state, batch = place((start(4), jnp.arange(4.0)), mesh)
    for changed in (measured, lambda adapt: adapt):
        local = changed(local_update(loss_fn, optax.sgd(0.1)))
        step = on_mesh(local, topology.ring(4), mesh)
        names.append(collective_names(step.lower(state, batch, 0).compile().as_text()))
    whole, without = names
    assert whole == without != []
    alone = jax.jit(over_workers(lambda params: tensor_norms(params), mesh))
    assert collective_names(alone.lower(state.params).compile().as_text()) == []


@pytest.mark.parametrize("num_workers", [1, 2, 3, 8, 101])
def test_measures_of_dispersion(num_workers):
    x = np.random.default_rng(num_workers).gamma(2.0, size=(num_workers, 5))
    pairs = np.abs(x[:, None] - x[None]).sum((0, 1))
    middle = stats.iqr(x, axis=0), np.quantile(x, [0.25, 0.75], axis=0).sum(0)
    wanted = {
        "gini": pairs / (2 * num_workers**2 * x.mean(0)),
        "index_of_dispersion": x.var(0) / x.mean(0),
        "coefficient_of_variation": stats.variation(x, axis=0),
        "quartile_coefficient": middle[0] / middle[1],
    }
    for found in (measures_of(x), measures_of(x[::-1])):
        assert found.keys() == wanted.keys()
        for name, values in found.items():
            np.testing.assert_allclose(values, wanted[name], rtol=1e-7, atol=1e-12)
    for same in (np.full((4, 2), 3.0), np.zeros((4, 2))):
        np.testing.assert_array_equal([*measures_of(same).values()], 0)


def test_hand_made_dispersions():
    """Of 1, 2, 3, 4: the mean is 2.5, the variance 1.25, the quartiles 1.75, 3.25."""
    found = list(measures_of([4.0, 1.0, 3.0, 2.0]).values())
    np.testing.assert_allclose(found, [0.25, 0.5, 1.25**0.5 / 2.5, 0.3])
    for wrong in ([1.0, -1.0], 1.0, []):
        with pytest.raises(ValueError, match="none of them neg"):
            measures_of(wrong)


NOISY = dataclasses.replace(
    line.NOISY, name="policy", workers=WorkersConfig(num_workers=8)
)


def policies(name, **options):
    own = {"thinning": {"epoch_steps": 5}, "holding": {"every_steps": 2}}.get(name, {})
    policy = kind_of("policy", name)(**own, **options)
    return dataclasses.replace(NOISY, method=AwcMethod(policy=policy))


def params_of(state):
    return jax.device_get(state.params)


@pytest.mark.slow
@pytest.mark.draw(2)
@pytest.mark.parametrize("where", ["simulate", "mesh"])
def test_a_run_that_holds_a_dispersion_resumes_bit_for_bit(where, tmp_path):
    config = policies("holding", target=0.01)
    workers = dataclasses.replace(config.workers, where=where)
    config = dataclasses.replace(config, workers=workers)
    whole = train(config, tmp_path / "whole").state
    assert whole.extra["graph"].min() > 0  # It began with all.
    short = dataclasses.replace(config, num_steps=11)
    half = train(short, tmp_path / "half").state
    resumed = train(config, tmp_path / "half", Resume()).state
    jax.tree.map(np.testing.assert_array_equal, params_of(whole), params_of(resumed))
    np.testing.assert_array_equal(whole.extra["graph"], resumed.extra["graph"])
    assert half.extra["graph"].max() > 0


@pytest.mark.slow
@pytest.mark.draw(6)
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("fixed", {}),
        ("thinning", {"degree": 6, "per_epoch": 2.0}),
        ("holding", {"target": 0.01}),
        ("holding", {"target": 0.02, "graphs": ("complete", "one_peer_ring", "alone")}),
        ("damping", {}),
        ("merged", {}),
    ],
)
def test_a_policy_takes_the_same_graphs_alone_and_as_seeds(name, options, tmp_path):
    config = policies(name, **options)
    if name == "merged":  # In awc an update would follow the mean.
        config = dataclasses.replace(config, method=AtcMethod(policy=MergedPolicy()))
    train(config, tmp_path / "alone")
    alone = [row["loss"] for row in read_metrics(tmp_path / "alone") if "loss" in row]
    together = train_seeds(make_run(config), range(2), lambda *_: None)
    seeds = [values[0] for _, values in together.losses]
    np.testing.assert_allclose(alone, seeds, rtol=1e-4)
    if name == "holding":  # Each seed begins with the first graph.
        second = train_seeds(make_run(config), range(1, 2), lambda *_: None)
        wanted = [row[0] for _, row in second.losses]
        found = [row[1] for _, row in together.losses]
        np.testing.assert_allclose(found, wanted, rtol=1e-6)
    if name == "merged":
        assert max(together.consensus_distance) < 1e-6
    else:
        assert min(together.consensus_distance) > 1e-4


def test_the_graphs_to_hold_a_dispersion_with_have_names():
    made = policy_of(policies("holding", graphs=("complete", "one_peer_ring")).plan)
    assert made is not None
    assert made.graphs == (topology.complete(8), topology.one_peer_ring(8))
    with pytest.raises(ValueError, match="graphs must be a tuple, each part one of"):
        HoldingPolicy(graphs=("rign",))


def test_the_mixing_factor_falls_with_the_learning_rate():
    optimizer = OptimizerConfig(warmup_steps=4, learning_rate=0.1)
    config = dataclasses.replace(policies("damping"), optimizer=optimizer)
    schedule = build_schedule(config.optimizer, config.num_steps)
    made = policy_of(config.plan)
    assert made is not None
    for step in range(config.optimizer.warmup_steps, config.num_steps):
        wanted = float(schedule(step)) / config.optimizer.learning_rate
        assert -1e-6 < made.menu[made.turn(step)].factor - wanted < 1 / 8 + 1e-6
    assert made.menu[made.turn(0)].factor == 1


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("holding", {"target": 0.0}, "target must be positive"),
        ("thinning", {"degree": 1}, "2 <= least <= degree"),
        ("thinning", {"epoch_steps": 0}, "epoch_steps must be at least 1"),
        ("holding", {"every_steps": 0}, "every_steps must be at least 1"),
        ("fixed", {"target": 1.0}, "FixedPolicy has no field 'target'"),
    ],
)
def test_configs_of_policies_that_make_no_sense_are_refused(name, options, words):
    with pytest.raises(ValueError, match=words):
        kind_of("policy", name)(**options)


@pytest.mark.parametrize("change", ["background", "peers"])
def test_a_policy_needs_an_exchange_in_the_step(change):
    exchange = kind_of("exchange", change)()
    with pytest.raises(ValueError, match=r"a policy chooses .* auto or in_step, got"):
        dataclasses.replace(policies("thinning"), exchange=exchange)


def test_ada_has_its_last_graph_whatever_is_rounded():
    """63 / 1.4 is 45 in floats, and 1.4 * 45 less than 63."""
    ada = policy.thinning(128, degree=65, per_epoch=1.4, epoch_steps=10)
    names = [ada.graphs[ada.turn(step)].name for step in (0, 450, 460, 1000)]
    assert len(set(names[2:])) == 1


def test_norms_of_complex_numbers_are_of_both_parts():
    assert tensor_norms({"w": jnp.array([3 + 4j])}).tolist() == [5.0]
    apart = over_workers(functools.partial(tensor_distances, axis_name=AXIS))
    np.testing.assert_allclose(apart({"w": jnp.array([3 + 4j, -3 - 4j])}), 5)


def test_a_metric_is_not_replaced_by_what_is_measured():
    def loss_fn(params, model_state, batch, key):
        return jnp.sum((params - batch) ** 2), (model_state, {"norms": params.sum()})

    optimizer = optax.sgd(0.1)
    local = measured(local_update(loss_fn, optimizer))
    state = init_state(jnp.zeros(3), optimizer, jax.random.key(0), 2)
    step = simulate(local, topology.complete(2))
    with pytest.raises(
        TypeError, match="'norms', which is the name of the norms: give"
    ):
        step(state, jnp.ones((2, 3)), 0)
