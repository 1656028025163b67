"""Exchanges in a second thread: the numbers of `on_mesh`, and who waits for whom."""

import contextlib
import functools
import gc
import socket
import subprocess
import sys
import threading
import weakref
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh

from decentjax import (
    AXIS,
    Topology,
    gossip,
    init_state,
    local_update,
    methods,
    mix,
    on_mesh,
    place,
    topology,
    worker_mesh,
)
from decentjax.gossip import pipeline
from decentjax.gossip.engine import SharedEngine
from decentjax.gossip.thread_port import Carrier
from decentjax.mixing import Lowering
from decentjax.optim import accum_adamw
from tests.checkout import ENV, ROOT

# Longer than any wait here should be, so that a deadlock is a failure.
LONG = 60.0
DEFAULT = Lowering()
TWO = topology.one_peer_ring(2)
FOUR = topology.hypercube(4)
# Products with these numbers are exact, however XLA fuses them with a sum.
ADAMW = optax.adamw(0.125, weight_decay=0.25)


def loss_fn(params, model_state, batch, key):
    """Two layers, a running mean and a count, and noise from the key."""
    inputs, targets = batch
    wide = jax.tree.map(lambda x: x.astype("float32"), params)
    hidden = jnp.tanh(inputs @ wide["inner"] + wide["bias"][None])
    loss = jnp.mean(jnp.square(hidden @ wide["outer"] - targets))
    mean = 0.5 * model_state["mean"] + 0.5 * hidden.mean(0)
    model_state = {"mean": mean, "count": model_state["count"] + 1}
    return loss, (model_state, {"noise": jax.random.uniform(key)})


class LostError(Exception):
    """A peer, say."""


class Case(NamedTuple):
    """What is trained, and where."""

    graph: Topology = TWO
    optimizer: optax.GradientTransformation = ADAMW
    dtype: str = "float32"
    num_micro_batches: int = 1
    message_dtype: Any = None

    @property
    def mesh(self) -> Mesh:
        return worker_mesh(self.graph.num_workers)

    @property
    def local(self):
        return local_update(
            loss_fn=loss_fn,
            optimizer=self.optimizer,
            num_micro_batches=self.num_micro_batches,
        )

    def in_step(self, **mixing):
        averaging = functools.partial(mix, axis_name=AXIS, **mixing) if mixing else None
        return on_mesh(self.local, self.graph, self.mesh, mix=averaging)

    def start(self):
        inner, outer = jax.random.split(jax.random.key(1))
        params = {
            "bias": jnp.zeros(7, self.dtype),
            "inner": jax.random.normal(inner, (5, 7), self.dtype),
            "outer": jax.random.normal(outer, (7, 3), self.dtype),
        }
        model_state = {"mean": jnp.zeros(7), "count": jnp.int32(0)}
        key, num_workers = jax.random.key(0), self.graph.num_workers
        return init_state(params, self.optimizer, key, num_workers, model_state)

    def batch(self, t):
        draws = np.random.default_rng(t)
        shapes = (4, 5), (4, 3)
        n = self.graph.num_workers
        return tuple(draws.standard_normal((n, *s)).astype("float32") for s in shapes)


def _run(train_step, case, steps=(0, 1, 2, 3), placed=True):
    """The state and the metrics after each step, as NumPy arrays."""
    state, found = case.start(), []
    if placed:
        state = place(state, case.mesh)
    for t in steps:
        state, metrics = train_step(state, place(case.batch(t), case.mesh), t)
        found.append(_arrays((state, metrics)))
    return found


def _arrays(tree):
    def array(x):
        is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        return np.asarray(jax.random.key_data(x) if is_key else x)

    return jax.tree.map(array, tree)


@functools.cache
def _wanted(case, steps=(0, 1, 2, 3)):
    return _run(case.in_step(message_dtype=case.message_dtype), case, steps)


def _in_background(case, lowering=DEFAULT, **options):
    return gossip.Background(
        case.local, case.graph, case.mesh, case.message_dtype, lowering, **options
    )


def _assert_same(got, wanted, atol=0.0):
    """Bit for bit where atol is zero; it is relative to the largest number."""
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert x.dtype == y.dtype
        if atol == 0:
            assert np.array_equal(x, y)
        else:
            x, y = x.astype("float64"), y.astype("float64")
            scale = max(1, np.abs(y).max(initial=0))
            np.testing.assert_allclose(x, y, rtol=0, atol=atol * scale)


def _check(case, wanted=None, atol=0.0, steps=(0, 1, 2, 3), placed=True, **options):
    """A second thread has the numbers of the step."""
    with _in_background(case, **options) as train_step:
        found = _run(train_step, case, steps, placed)
    _assert_same(found, wanted or _wanted(case, steps), atol)


@pytest.fixture(autouse=True)
def _small_groups(monkeypatch):
    """Of the three leaves, 28 B, 140 B and 84 B, each makes a group."""
    monkeypatch.setattr(pipeline, "GROUP_BYTES", 1)


def _butterfly(num_workers):
    return topology.butterfly_groups(num_workers, 2)


def _following():
    """An optimizer whose state follows the model that the update lands on."""

    def update(grads, average, params):
        average = jax.tree.map(lambda a, x: 0.5 * a + 0.5 * x, average, params)
        updates = jax.tree.map(lambda g, a: -0.125 * g - 0.25 * a, grads, average)
        return updates, average

    return optax.GradientTransformation(lambda params: params, update)


GRAPHS = {
    "alone": topology.ring(1),
    "two": TWO,
    "hypercube": topology.hypercube(8),
    "groups": topology.butterfly_groups(8, 4),
    "pairs": topology.butterfly_groups(4, 2),
    "nodes": topology.alternating_exponential_ring(4, 2),
    "everybody": topology.complete(4),
    "means": topology.with_mean_every(topology.alone(4), 3),
    "nodes_means": topology.with_mean_every(
        topology.hierarchical(8, 2, topology.alone), 2
    ),
}
OPTIMIZERS = {
    "sgd": optax.sgd(0.25, momentum=0.5),
    "adam": optax.adam(0.125),
    "clipped": optax.chain(optax.clip_by_global_norm(0.1), ADAMW),
    "accumulating": accum_adamw(0.125, 2, weight_decay=0.25),
}
EXACT = {
    **{name: Case(graph) for name, graph in GRAPHS.items()},
    **{name: Case(optimizer=optimizer) for name, optimizer in OPTIMIZERS.items()},
    "micro_batches": Case(num_micro_batches=2),
    "bfloat16": Case(dtype="bfloat16"),
    "bfloat16_everybody": Case(GRAPHS["everybody"], dtype="bfloat16"),
}
# Where a product rounds before it is added to, XLA may contract the two, or not.
ROUNDED = {
    "ring": Case(topology.ring(3), optax.sgd(0.1, momentum=0.9)),
    "star": Case(topology.star(3)),
    "lamb": Case(optimizer=optax.lamb(0.1)),
    "dog": Case(optimizer=optax.contrib.dog(1.0)),
    "following": Case(optimizer=_following()),
    "narrow_messages": Case(message_dtype=jnp.bfloat16),
    "narrow_messages_in_groups": Case(GRAPHS["pairs"], message_dtype=jnp.bfloat16),
}


@pytest.mark.slow
@pytest.mark.draw(12)
@pytest.mark.parametrize("case", EXACT.values(), ids=EXACT)
def test_the_numbers_are_those_of_the_step_bit_for_bit(case):
    """State, keys and metrics after each of four steps."""
    _check(case)


@pytest.mark.slow
@pytest.mark.draw(6)
@pytest.mark.parametrize("case", ROUNDED.values(), ids=ROUNDED)
def test_the_numbers_are_those_of_the_step_to_rounding(case):
    _check(case, atol=2e-5)


@pytest.mark.slow
@pytest.mark.draw(3)
@pytest.mark.parametrize("size", [100, 150, 2**20])
def test_where_groups_of_leaves_end_does_not_matter(size, monkeypatch):
    monkeypatch.setattr(pipeline, "GROUP_BYTES", size)
    _check(Case())


@pytest.mark.slow
@pytest.mark.parametrize(
    "steps", [(0, 1, 1, 0), (3, 5, 6, 0), (7,)], ids=["repeated", "skipped", "later"]
)
def test_a_step_out_of_turn_starts_its_exchange_anew(steps):
    _check(Case(FOUR), steps=steps)


def _step(train_step, case, state, t):
    return train_step(state, place(case.batch(t), case.mesh), t)


def _copied(tree):
    return jax.tree.map(jnp.copy, tree)


def test_going_back_to_a_saved_state_repeats_what_followed():
    case = Case()
    with _in_background(case) as train_step:
        state, _ = _step(train_step, case, place(case.start(), case.mesh), 0)
        saved = _copied(state)
        for t in (1, 2):
            state, _ = _step(train_step, case, state, t)
        state = saved
        for t in (1, 2, 3):
            state, metrics = _step(train_step, case, state, t)
    _assert_same(_arrays((state, metrics)), _wanted(case)[3])


def test_what_is_on_its_way_is_not_taken_for_the_mean_of_other_models():
    case = Case()
    with _in_background(case) as train_step:
        state, _ = _step(train_step, case, place(case.start(), case.mesh), 0)
        params = dict(state.params, outer=2 * state.params["outer"])
        state = state._replace(params=params)
        copied = _copied(state)
        got = _step(train_step, case, state, 1)
    wanted = _step(case.in_step(), case, copied, 1)
    _assert_same(_arrays(got), _arrays(wanted))


def _short(batch):
    return jax.tree.map(lambda x: x[:, :2], batch)


@pytest.mark.slow
def test_a_shorter_batch_is_another_program_and_the_same_step():
    case = Case()

    class Short(Case):
        def batch(self, t):
            return super().batch(t) if t % 2 else _short(super().batch(t))

    short = Short(*case)
    _check(short, _run(short.in_step(), short))


def test_a_step_that_is_refused_leaves_the_shared_thread_to_others():
    def own(state, batch, mixed):
        return state, {}

    users = SharedEngine._users.total()
    with pytest.raises(TypeError, match="Tracking changes the gradient"):
        gossip.Background(own, methods.gradient_tracking(TWO), worker_mesh(2))
    assert SharedEngine._users.total() == users


def test_rows_that_are_missing_are_refused_before_anything_is_sent():
    case = Case()
    with _in_background(case) as train_step:
        state = case.start()
        three = jax.tree.map(lambda x: jnp.concatenate([x, x[:1]]), state)
        with pytest.raises(ValueError, match=r"got 2 of batch\.0, 3 of state\.p.*; in"):
            train_step(three, case.batch(0), 0)
        _assert_same(_run(train_step, case), _wanted(case))


def test_after_a_step_that_failed_the_next_starts_its_exchange_anew():
    case = Case()
    with _in_background(case) as train_step:
        state, _ = _step(train_step, case, place(case.start(), case.mesh), 0)
        inputs, targets = case.batch(1)
        with pytest.raises(TypeError, match="incompatible shapes"):
            train_step(state, place((inputs, targets[:, :, :2]), case.mesh), 1)
        copied = _copied(state)
        got = _step(train_step, case, state, 2)
    wanted = _step(case.in_step(), case, copied, 2)
    _assert_same(_arrays(got), _arrays(wanted))


@pytest.mark.slow
@pytest.mark.draw(2)
@pytest.mark.parametrize("placed", [True, False])
@pytest.mark.parametrize(
    "graph", [GRAPHS["two"], GRAPHS["pairs"]], ids=["two", "pairs"]
)
def test_other_devices_than_those_that_compute_may_exchange(graph, placed):
    case = Case(graph)
    others = worker_mesh(graph.num_workers, jax.devices()[4:])
    _check(case, placed=placed, exchange_mesh=others)


def test_a_state_that_is_not_on_the_mesh_yet_is_put_there():
    _check(Case(), placed=False)


@pytest.mark.slow
@pytest.mark.draw(2)
@pytest.mark.parametrize(
    "options",
    [{"lowering": Lowering(48)}, {"lowering": Lowering(groups="sum")}],
    ids=["pieces", "sum"],
)
@pytest.mark.parametrize("graph", [FOUR, GRAPHS["pairs"]], ids=["swaps", "pairs"])
def test_a_step_with_the_same_lowering_has_the_same_numbers(graph, options):
    case = Case(graph)
    wanted = _run(case.in_step(**options), case)
    _check(case, wanted, **options)


def test_a_jitted_step_is_cut_and_has_the_same_numbers():
    case = Case()
    adapt_one = jax.jit(case.local)
    with gossip.Background(adapt_one, case.graph, case.mesh) as train_step:
        _assert_same(_run(train_step, case), _wanted(case))


# What is not placed yet is copied to its place, and not given up.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
@pytest.mark.parametrize("placed", [True, False])
def test_the_axes_of_the_mesh_may_be_explicit_as_jax_makes_them(placed):
    case = Case()

    class Explicit(Case):
        @property
        def mesh(self):
            return jax.make_mesh((2,), (AXIS,), (AxisType.Explicit,))

    explicit = Explicit(*case)
    _check(explicit, _wanted(case), placed=placed)
    _assert_same(_run(explicit.in_step(), explicit, placed=placed), _wanted(case))


@pytest.mark.slow
def test_a_context_of_double_precision_holds_in_the_thread():
    with jax.enable_x64(True):
        case = Case(dtype="float64")
        with _in_background(case, lowering=None) as train_step:
            got = _run(train_step, case)
        assert got[0][0].params["inner"].dtype == "float64"
        _assert_same(got, _wanted(case))


@pytest.mark.slow
def test_metrics_may_be_python_numbers():
    def numbered(params, model_state, batch, key):
        loss, (model_state, _) = loss_fn(params, model_state, batch, key)
        return loss, (model_state, {"float": 1.5, "int": 2})

    case = Case()
    bound = local_update(loss_fn=numbered, optimizer=case.optimizer)
    with gossip.Background(bound, TWO, case.mesh, lowering=DEFAULT) as train_step:
        (_, metrics), *_ = _run(train_step, case)
    all_reduce = gossip.AllReduce(bound, case.mesh)
    (_, averaged), *_ = _run(all_reduce, case)
    for found in (metrics, averaged):
        assert found["float"].tolist() == [1.5, 1.5]
        assert found["int"].tolist() == [2, 2]


@pytest.mark.parametrize("make", [lambda: TWO[0], lambda: topology.ring])
def test_what_is_no_topology_is_refused(make):
    with pytest.raises(TypeError, match=r"wanted a plan: .* call a function of dec"):
        gossip.Background(Case().local, make(), worker_mesh(2))


@pytest.mark.parametrize("all_reduce", [True, False])
def test_a_state_that_was_given_up_is_refused(all_reduce):
    case = Case()
    state = place(case.start(), case.mesh)
    if all_reduce:
        train_step = gossip.AllReduce(case.local, case.mesh)
    else:
        train_step = _in_background(case)
    with train_step:
        _step(train_step, case, state, 0)
        with pytest.raises(
            ValueError, match=r"state.\S+ was donated to an earlier step: us"
        ):
            _step(train_step, case, state, 1)


@pytest.mark.slow
def test_two_train_steps_in_turn_share_one_thread_and_keep_their_numbers():
    cases = [Case(), Case(optimizer=OPTIMIZERS["sgd"])]
    notes = []

    def record(who, activity, t, start, end):
        if activity == "exchange":
            notes.append((t, who, threading.get_ident()))

    states = [place(case.start(), case.mesh) for case in cases]
    with contextlib.ExitStack() as stack:
        train_steps = [
            stack.enter_context(
                _in_background(case, record=functools.partial(record, who))
            )
            for who, case in enumerate(cases)
        ]
        for t in range(4):
            for who, case in enumerate(cases):
                found = _step(train_steps[who], case, states[who], t)
                _assert_same(_arrays(found), _wanted(case)[t])
                states[who] = found[0]
        train_steps[0].settle()
    assert len({thread for *_, thread in notes}) == 1
    # Of step 0 and 1 each sends at once, then in turn.
    order = [(t, who) for t, who, _ in notes]
    assert len(order) == 2 * 5 * 3
    assert [who for t, who in order if t > 1] == 3 * [0, 0, 0, 1, 1, 1]


@pytest.mark.slow
def test_two_models_in_two_processes_are_averaged_each_with_itself():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    command = [sys.executable, ROOT / "tests/two_backgrounds.py", address]
    with contextlib.ExitStack() as stack:
        processes = [
            stack.enter_context(
                subprocess.Popen(
                    [*command, str(number)],
                    env=ENV | {"PYTHONPATH": str(ROOT)},
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
            for number in range(2)
        ]
        for process in processes:
            stack.callback(process.kill)
        outputs = [process.communicate(timeout=2 * LONG)[0] for process in processes]
    for output in outputs:
        assert "\nequal 0.50 0.50 10.49 10.49\n" in output
        assert "\nunequal 1.50 1.50 2.50 2.50\n" in output


@pytest.mark.slow
def test_the_callers_mesh_may_be_set():
    case = Case()
    with jax.set_mesh(case.mesh):
        _check(case)


@pytest.mark.parametrize(
    "function", [lambda: jax.lax.axis_index(AXIS), lambda: jax.lax.psum(1.0, AXIS)]
)
def test_a_step_that_asks_for_its_peers_is_refused(function):
    case = Case()

    def adapt_one(state, batch, mixed):
        return state, {"loss": jnp.float32(function())}

    with (
        gossip.Background(adapt_one, case.graph, case.mesh) as train_step,
        pytest.raises(ValueError, match="update runs without the workers' axis"),
    ):
        _step(train_step, case, place(case.start(), case.mesh), 0)


@pytest.mark.slow
@pytest.mark.parametrize("graph", [FOUR, GRAPHS["pairs"]], ids=["swaps", "pairs"])
def test_the_lowering_that_is_measured_to_be_fastest_gives_the_same_numbers(graph):
    _check(Case(graph), lowering=None)


def test_the_first_leaves_are_sent_on_before_the_last_have_come(monkeypatch):
    """The thread holds back the last two of three groups until that has happened."""
    exchanged, in_time = [], []
    submitted = {t: threading.Event() for t in range(9)}
    carry = Carrier.carry

    def spy(self, group, leaves, step):
        arrival = carry(self, group, leaves, step)
        submitted[step].set()
        return arrival

    monkeypatch.setattr(Carrier, "carry", spy)

    def record(activity, t, start, end):
        if activity == "exchange":
            exchanged.append(t)
            if exchanged.count(t) == 2 and t < 4:
                in_time.append(submitted[t + 1].wait(LONG))

    _check(Case(), record=record)
    assert in_time == [True] * 4


def test_a_step_returns_before_its_successors_exchange_is_done(monkeypatch):
    returned = threading.Event()
    in_time = []

    def record(activity, t, start, end):
        if (activity, t) == ("exchange", 1):
            in_time.append(returned.wait(LONG))

    case = Case()
    with _in_background(case, record=record) as train_step:
        _step(train_step, case, place(case.start(), case.mesh), 0)
        returned.set()
    assert in_time == [True] * 3


def test_the_record_tells_who_computed_waited_and_exchanged_and_when():
    notes = []
    with _in_background(Case(), record=lambda *note: notes.append(note)) as train_step:
        _run(train_step, Case())
        train_step.settle()
    assert all(start <= end for *_, start, end in notes)
    steps = {
        name: [t for activity, t, *_ in notes if activity == name]
        for name in ("compute", "wait", "exchange")
    }
    assert len(notes) == sum(map(len, steps.values()))
    assert steps["compute"] == [0, 1, 2, 3]
    assert sorted(set(steps["wait"])) == [0, 1, 2, 3]
    assert steps["exchange"] == [t for t in range(5) for _ in range(3)]
    _assert_one_after_the_other(n for n in notes if n[0] == "exchange")
    _assert_one_after_the_other(n for n in notes if n[0] != "exchange")


def _assert_one_after_the_other(notes):
    times = [time for *_, start, end in notes for time in (start, end)]
    assert times == sorted(times)


def _ignoring(state, batch, mixed):
    del mixed
    return state._replace(params=jax.tree.map(jnp.tanh, state.params)), {}


def _sharing(state, batch, mixed):
    """The updates of all leaves await all leaves; one is replaced by a constant."""
    total = sum(jnp.sum(x) for x in jax.tree.leaves(mixed))
    params = jax.tree.map(lambda x: 0.5 * x + total, mixed)
    return state._replace(params=dict(params, bias=jnp.ones(7))), {"total": total}


@pytest.mark.parametrize("adapt_one", [_ignoring, _sharing])
def test_any_function_of_arrays_may_adapt(adapt_one):
    case = Case(optimizer=optax.sgd(0.1))

    wanted = _run(on_mesh(adapt_one, case.graph, case.mesh), case)
    with gossip.Background(adapt_one, case.graph, case.mesh) as train_step:
        _assert_same(_run(train_step, case), wanted, atol=1e-6)


def test_the_buffers_of_a_state_are_given_up_but_for_the_models():
    case = Case()
    with _in_background(case) as train_step:
        state = place(case.start(), case.mesh)
        _step(train_step, case, state, 0)
    others = jax.tree.leaves((state.opt_state, state.model_state, state.key))
    assert all(x.is_deleted() for x in others)


def test_a_mesh_of_another_size_is_refused():
    sentence = r"the topology's 2 workers, got {'workers': 8}"
    with pytest.raises(ValueError, match=sentence):
        gossip.Background(Case().local, TWO, worker_mesh(8))


def test_the_devices_that_exchange_are_those_of_the_workers():
    with pytest.raises(ValueError, match=r"exchange_mesh needs a device for each work"):
        _in_background(Case(), exchange_mesh=worker_mesh(4))


ALL_REDUCE = {
    "alone": (Case(GRAPHS["alone"]), 0),
    "two": (Case(optimizer=OPTIMIZERS["sgd"]), 0),
    "micro_batches": (Case(num_micro_batches=2), 2e-6),
    "eight": (Case(GRAPHS["hypercube"], OPTIMIZERS["sgd"]), 0),
    "eight_adamw": (Case(GRAPHS["hypercube"]), 2e-6),
}


@pytest.mark.slow
@pytest.mark.draw(3)
@pytest.mark.parametrize(("case", "atol"), ALL_REDUCE.values(), ids=ALL_REDUCE)
def test_all_reduce_gives_the_numbers_of_its_step_in_the_same_turns(case, atol):
    """Bit for bit, but where the mean of the gradients is squared."""
    plan = methods.all_reduce(case.graph.num_workers)
    wanted = _run(on_mesh(case.local, plan, case.mesh), case)
    notes = []
    with gossip.AllReduce(
        case.local, case.mesh, lambda *note: notes.append(note)
    ) as train_step:
        _assert_same(_run(train_step, case), wanted, atol)
        train_step.settle()
    activities = [
        (activity, t) for activity, t, *_ in sorted(notes, key=lambda n: n[2])
    ]
    assert activities == [
        (activity, t) for t in range(4) for activity in ("compute", "wait", "exchange")
    ]
    assert all(start <= end for *_, start, end in notes)


@pytest.mark.slow
def test_a_closed_train_step_leaves_no_model_behind():
    case = Case()
    with _in_background(case) as train_step:
        state, _ = _step(train_step, case, place(case.start(), case.mesh), 0)
        seen = [weakref.ref(x) for x in jax.tree.leaves(state)]
    del state, train_step
    gc.collect()
    assert [x() for x in seen] == [None] * len(seen)


@pytest.mark.slow
def test_all_reduce_keeps_no_gradient_from_step_to_step():
    case, means = Case(), []
    with gossip.AllReduce(case.local, case.mesh) as train_step:
        mean_of = train_step._mean

        def spied(event):
            def mean(*found):
                result = mean_of(event)(*found)
                means.extend(weakref.ref(x) for x in jax.tree.leaves(result))
                return result

            return mean

        train_step._mean = spied
        _step(train_step, case, place(case.start(), case.mesh), 0)
        gc.collect()
        # Of the gradient, and of the loss.
        assert [x() for x in means] == [None] * 4


def test_an_error_in_the_thread_ends_the_training_within_a_step_as_itself():
    error, case = LostError("lost"), Case()

    def record(activity, t, start, end):
        if (activity, t) == ("exchange", 2):
            raise error

    with _in_background(case, record=record) as train_step:
        with pytest.raises(LostError) as caught:
            _run(train_step, case, steps=(0, 1, 2))
        assert caught.value is error
        with pytest.raises(LostError) as caught:
            _step(train_step, case, place(case.start(), case.mesh), 3)
        assert caught.value is error


def test_an_error_of_adapt_is_raised_as_itself():
    error, case = LostError("wrong"), Case()

    def failing(state, batch, mixed):
        raise error

    with (
        gossip.Background(failing, case.graph, case.mesh) as train_step,
        pytest.raises(LostError) as caught,
    ):
        _step(train_step, case, place(case.start(), case.mesh), 0)
    assert caught.value is error


def test_a_closed_train_step_says_so():
    case = Case()
    with _in_background(case) as train_step:
        state, _ = _step(train_step, case, place(case.start(), case.mesh), 0)
    with pytest.raises(RuntimeError, match="thread is closed: call the step inside"):
        _step(train_step, case, state, 1)


def test_a_process_that_hides_its_cpu_has_no_host_mesh(monkeypatch):
    def devices(platform):
        raise RuntimeError(f"Unknown backend {platform}")

    mesh = worker_mesh(2)
    monkeypatch.setattr(jax, "devices", devices)
    with pytest.raises(ValueError, match="Unknown backend cpu; if JAX_PLATFORMS is"):
        gossip.host_mesh(mesh)


def test_the_host_mesh_has_a_cpu_device_for_each_worker_in_order():
    mesh = Mesh([jax.devices()[i] for i in (5, 2, 7)], (AXIS,))
    host = gossip.host_mesh(mesh)
    assert host.devices.tolist() == jax.devices("cpu")[:3]
    assert host.axis_names == (AXIS,)
    assert gossip.host_mesh(worker_mesh(8)) == worker_mesh(8)
    slices = Mesh(np.array(jax.devices()[2:8]).reshape(2, 3), ("fsdp", AXIS))
    host = gossip.host_mesh(slices)
    assert dict(host.shape) == {"fsdp": 2, AXIS: 3}


@pytest.mark.parametrize(
    ("processes", "message"),
    [
        (
            [0] * 9,
            r"process 0 has 9 devices of the mesh and 8 CPU devices: .*_devices\", 9\)",
        ),
        (
            [0, 1, 1],
            r"process 1 has 2 devices of the mesh and 0 CPU devices: .*_devices\", 2\)",
        ),
    ],
)
def test_a_process_with_too_few_cpu_devices_is_told_how_to_make_them(
    processes, message
):
    devices = np.array([SimpleNamespace(process_index=number) for number in processes])
    with pytest.raises(ValueError, match=message):
        gossip.host_mesh(SimpleNamespace(devices=devices))
