"""Rounds that end without late workers: what they merge, and whom they await."""

import math
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from decentjax import (
    Rounds,
    init_state,
    local_update,
    methods,
    place,
    simulate,
    topology,
)
from decentjax._rounds.schedule import every
from decentjax.codec import int8
from decentjax.compression import error_feedback
from decentjax.gossip import (
    AutoPatience,
    Elastic,
    Folder,
    Guard,
    MergeRecord,
    Peers,
    Quorum,
    Taken,
)
from decentjax.gossip.patience import Waits
from decentjax.gossip.peer_port import from_anchor, of_permutations
from decentjax.gossip.quorum import (
    NUM_PARTS,
    Contribution,
    QuorumMeans,
    count_examples,
    weighted_mean,
)
from decentjax.links import Links, Piece, Said
from tests.contributions import Contributors, means
from tests.parties import (
    LOCAL,
    LONG,
    OPTIMIZER,
    PARTS,
    batches,
    in_threads,
    loss_fn,
    party_of,
    peers_run,
    replayed,
    start,
)

STEPS = 6


def first(num_workers):
    return jax.tree.map(lambda x: x[0], start(num_workers).params)


def train(how, folder, num_steps, quorum, delays=lambda *_: 0.0, skips=True, **options):
    """Trains each worker in a thread; returns models by step, records, and steps."""
    num_workers = how.num_workers
    rows, params = batches(num_workers), first(num_workers)
    done = threading.Barrier(num_workers)

    def work(worker):
        party, found, used = party_of(folder, [worker]), {}, []
        own = params, OPTIMIZER, jax.random.key(0), how
        state = place(init_state(*own, workers=[worker]), party.mesh)
        given = {"patience": LONG, "used": used.append, "merge": quorum, **options}
        with Peers(LOCAL, how, party, **given) as step:
            t = 0
            while t < num_steps:
                batch = place(rows[t % STEPS, worker][None], party.mesh)
                if skips:
                    state, t, _ = step.admit(state, batch, t)
                if t >= num_steps:
                    break
                time.sleep(delays(worker, t))
                batch = place(rows[t % STEPS, worker][None], party.mesh)
                state, _ = step.advance(state, batch, t)
                t += 1
                found[t] = jax.device_get(state.params)
            done.wait(LONG)  # Peers may still pull what this one has left.
        return found, used

    return in_threads(work, num_workers)


@pytest.mark.slow
@pytest.mark.draw(6)
@pytest.mark.parametrize(
    "how",
    [
        methods.diloco(1, 2),
        methods.diloco(2, 3),
        methods.diloco(3, 2),
        methods.diloco(5, 3),
        Rounds(topology.complete(3), 3, delay=2),
        Rounds(topology.damped(topology.ring(4), 0.5), 2, delay=1),
        Rounds(
            topology.complete(3), 4, delay=3, fragments=PARTS, outer=optax.sgd(0.7, 0.9)
        ),
        Rounds(topology.base_k(3, 1), 2, delay=1),
    ],
    ids=["one", "two", "diloco", "five", "late", "ring", "fragments", "changing"],
)
@pytest.mark.parametrize("weights", ["tokens", "tokens_squared_per_step", "equal"])
def test_with_all_contributions_the_numbers_are_those_of_the_step(
    how, weights, tmp_path
):
    num_steps, num_workers = 9, how.num_workers
    quorum = Quorum(num_workers, weights)
    results = train(how, tmp_path, num_steps, quorum, skips=False)
    rows, params = batches(num_workers), first(num_workers)
    train_step = simulate(LOCAL, how)
    state = train_step.init(params, jax.random.key(0))
    for t in range(num_steps):
        state, _ = train_step(state, rows[t % STEPS], t)
        for worker, (found, _) in enumerate(results):
            for name, leaf in state.params.items():
                got = found[t + 1][name][0]
                np.testing.assert_allclose(got, leaf[worker], rtol=4e-6, atol=2e-6)


class Net:
    """Real links of a few workers in one process, with a channel of one array."""

    def __init__(self, folder, count, parts=NUM_PARTS):
        shape = Piece((1, 2), jnp.float32)
        self.links = [
            Links(party_of(folder, [i]), count, [[shape]], num_parts=parts)
            for i in range(count)
        ]
        for i, links in enumerate(self.links):
            links.meet({*range(count)} - {i}, time.monotonic() + LONG)

    def row(self, worker, values):
        return [jax.device_put(jnp.float32([values]), jax.devices()[worker])]

    def close(self):
        for links in self.links:
            links.close()


@pytest.fixture
def three(tmp_path):
    net = Net(tmp_path, 3)
    yield net
    net.close()


def arrives(net, worker, peers, step):
    came = net.links[worker].gather(worker, peers, 0, step, len(peers), LONG)
    assert came.keys() == peers


def test_weights_are_what_was_trained_discounted_by_age_and_each_counts_once():
    """Three workers; the second misses a round, and comes in the next."""
    some = Contributors(*3 * [Quorum(discount=0.25)])
    models = np.array([[1.0, 0.0], [0.0, 1.0], [2.0, 2.0]])
    some.contribute(0, models[0], 10)
    some.contribute(2, models[2], 20)
    used, mean = some.merge(0)
    assert [(one.peer, one.step) for one in used.models] == [(0, 0), (2, 0)]
    np.testing.assert_allclose(mean, (10 * models[0] + 20 * models[2]) / 30, rtol=1e-6)
    # Now the late one, and a second step of worker 0 alone: worker 2 sends nothing new.
    some.contribute(1, models[1], 30)
    some.contribute(0, models[0], 10, step=1)
    weights = {one.peer: one.weight for one in some.merge(0, 1)[0].models}
    wanted = {0: 10 / (10 + 0.25 * 30), 1: 0.25 * 30 / (10 + 0.25 * 30)}
    assert weights == pytest.approx(wanted, rel=1e-6)
    # And never again.
    some.contribute(0, models[0], 10, step=2)
    used, _ = some.merge(0, 2)
    assert [(one.peer, one.weight) for one in used.models] == [(0, 1.0)]


@pytest.mark.parametrize(
    ("weights", "wanted"),
    [
        ("equal", [0.5, 0.5]),
        ("tokens", [0.25, 0.75]),
        ("tokens_squared_per_step", [0.1, 0.9]),
    ],
)
def test_what_a_contribution_weighs(weights, wanted):
    """Ten tokens in one step, and 30 in one."""
    some = Contributors(*2 * [Quorum(weights=weights)])
    some.contribute(0, [0, 0], 10)
    some.contribute(1, [0, 0], 30)
    used, _ = some.merge(0)
    np.testing.assert_allclose([x.weight for x in used.models], wanted, rtol=1e-6)


def test_who_has_trained_nothing_weighs_nothing():
    """It has just joined, with the model of a peer; if none has, all stays."""
    some = Contributors(Quorum(), Quorum())
    some.contribute(0, [0, 0], 0)
    some.contribute(1, [1, 0], 5)
    assert some.merge(0)[1] == [1, 0]
    some.contribute(0, [0, 0], 0, step=1)
    assert some.merge(0, 1)[1] == [0, 0]


def test_a_process_that_starts_again_counts_from_zero():
    """Its numbers are lower than those merged of its last life."""
    some = Contributors(Quorum(), Quorum())
    for step, trained in ((0, 50), (1, 5)):
        some.ways[1] = some.way(Quorum())
        some.contribute(0, [0, 0], 5, step)
        some.contribute(1, [1, 0], trained, step)
        used, _ = some.merge(0, step)
    weights = [taken.weight for taken in used.models]
    np.testing.assert_allclose(weights, [0.5, 0.5], rtol=1e-6)


def test_the_last_contribution_of_who_has_ended_counts_for_its_round(three):
    schedule = every(topology.ring(3), 1, delay=1)
    ways = [means(schedule, links, Quorum(discount=1.0)) for links in three.links]
    for step in range(4):
        rows = [three.row(i, [0.0, 0.0]) for i in range(3)]
        for worker, way in enumerate(ways):
            way.tally.count(worker, 5)
            way.send(worker, 0, rows[worker], step)
        arrives(three, 0, {1, 2}, step)
        if step == 3:
            three.links.pop().close()
            end = time.monotonic() + LONG
            while 2 in three.links[0].alive() and time.monotonic() < end:
                time.sleep(0.01)
            assert three.links[0].look().left == {2}
        used, _ = ways[0].take(0, 0, rows[0], step, 0.0)
    np.testing.assert_allclose([x.weight for x in used.models], 1 / 3, rtol=1e-6)


def test_who_joins_begins_from_its_anchor():
    """What the peer has learned since counts as the peer's, sent or not."""
    how = Rounds(topology.complete(2), 4, delay=3, outer=optax.sgd(0.7, 0.9))
    params = first(2)
    state = init_state(params, OPTIMIZER, jax.random.key(0), how)
    later = jax.tree.map(lambda x: x + 1, state.params)
    found = from_anchor(state._replace(params=later))
    for name, leaf in params.items():
        np.testing.assert_array_equal(found.params[name][0], leaf)
    for number, leaf in enumerate(jax.tree.leaves(params)):
        np.testing.assert_array_equal(found.extra.sent[number][0], leaf)


def test_of_a_peer_that_is_ahead_the_round_itself_counts_first(three):
    schedule = every(topology.ring(3), 1, delay=1)
    ways = [means(schedule, three.links[i], Quorum()) for i in range(2)]
    for worker, way in enumerate(ways):
        way.tally.count(worker, 1)
    rows = [three.row(0, [0.0, 0.0]), three.row(1, [1.0, 0.0]), three.row(1, [2.0, 0])]
    ways[1].send(1, 0, rows[1], 0)
    arrives(three, 0, {1}, 0)
    ways[1].tally.count(1, 1)
    ways[1].send(1, 0, rows[2], 1)
    arrives(three, 0, {1}, 1)
    found = []
    for step in range(2):
        ways[0].send(0, 0, rows[0], step)
        used, _ = ways[0].take(0, 0, rows[0], step, 0.0)
        found.append([(one.peer, one.step) for one in used.models])
        ways[0].tally.count(0, 1)
    assert found == [[(0, 0), (1, 0)], [(0, 1), (1, 1)]]


def given(values, weights, worker=0):
    models = {
        (i, 0): [jnp.float32([x]), jnp.float32([[x[0]]])] for i, x in enumerate(values)
    }
    taken = tuple(Taken(i, 0, 0, w) for i, w in enumerate(weights))
    return MergeRecord(0, worker, 0, taken), models


@pytest.mark.parametrize("count", [1, 2, 3, 5, 7, 8])
@pytest.mark.parametrize("trimmed", [0, 1, 2])
def test_the_mean_and_the_trimmed_mean_are_numpys(count, trimmed):
    draw = np.random.default_rng(count)
    values, weights = draw.normal(size=(count, 4)), draw.uniform(0.1, 1, count)
    weights /= weights.sum()
    got, _ = weighted_mean(*given(values.astype("f4"), weights.tolist()), trimmed)
    wanted = []
    for column in values.T:
        pairs = sorted(zip(column, weights, strict=True))
        if count > 2 * trimmed:
            pairs = pairs[trimmed : count - trimmed]
        wanted.append(sum(x * w for x, w in pairs) / sum(w for _, w in pairs))
    np.testing.assert_allclose(got[0], wanted, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("worker", range(3))
def test_who_merges_the_same_has_the_same_bit_for_bit(worker):
    """Whose own model it is, and in what order they came, does not matter."""
    draw = np.random.default_rng(0)
    values = draw.normal(size=(3, 4)).astype("f4")
    wanted, _ = weighted_mean(*given(values, [0.2, 0.3, 0.5]))
    got, _ = weighted_mean(*given(values, [0.2, 0.3, 0.5], worker))
    assert got.tolist() == wanted.tolist()


@pytest.mark.parametrize("action", ["refuse", "clip"])
def test_a_guard_names_what_is_far(action):
    """The third is ten times as far as the second; or not a number."""
    guarded = Quorum(weights="equal", guard=Guard(2.0, action))
    some = Contributors(guarded, Quorum(), Quorum())
    for worker, model in enumerate([[0, 0], [1, 0], [0, 10]]):
        some.contribute(worker, model, 1)
    used, mean = some.merge(0)
    ((peer, step, why, value),) = used.left_out
    assert (peer, step, why) == (2, 0, "distance")
    assert value == pytest.approx(10)
    # Clipped to twice the median, which is 1.
    wanted = {"refuse": [0.5, 0], "clip": [1 / 3, 2 / 3]}[action]
    np.testing.assert_allclose(mean, wanted, rtol=1e-6)
    for worker, model in enumerate([[0, 0], [1, 0], [math.nan, 0]]):
        some.contribute(worker, model, 1, step=1)
    used, mean = some.merge(0, 1)
    assert [one.peer for one in used.left_out] == [2]
    # Worker 1 has not merged round 0: its contribution is one round old.
    np.testing.assert_allclose(mean, [1 / 3, 0], rtol=1e-6)


@pytest.mark.parametrize("own", [0.25, 0.4, 0.9])
def test_a_clipped_contribution_keeps_its_weight_in_the_exchange(own):
    """Clipping moves the model, and not the weights, whatever W_ii is."""
    graph = topology.damped(topology.complete(4), (1 - own) * 4 / 3)
    how = Rounds(graph).schedule
    quorum = Quorum(weights="equal", guard=Guard(2.0, "clip"))
    merge = QuorumMeans(None, of_permutations(graph), None, quorum, how)
    away = np.array([3, -2], np.float32)  # From 0, where no weight counts.
    models = away + np.array([[0, 0], [1, 0], [0, 1], [0, 10]], np.float32)
    found = [
        Contribution(i, Said(0), 0.5 if i == 3 else 1.0, 0, [jnp.asarray(x)])
        for i, x in enumerate(models)
    ]
    kept, (left_out,) = merge._trusted(0, found)
    weights = merge._weights(0, 0, kept)
    assert left_out.value == pytest.approx(10)
    other = (1 - own) / 3
    given = np.array([own, other, other, other * 0.5])
    clipped = [*models[:3], np.add(away, [0, 2])]  # As far as twice the median.
    wanted = given @ clipped / given.sum()
    got = sum(w * np.asarray(one.rows[0]) for w, one in zip(weights, kept, strict=True))
    np.testing.assert_allclose(got, wanted, rtol=1e-6)


def test_a_guard_refuses_what_is_too_old():
    some = Contributors(Quorum(guard=Guard(oldest=0)), Quorum())
    some.contribute(0, [0, 0], 1)
    some.merge(0)
    some.contribute(1, [1, 0], 1)  # Its anchor is that of round 0.
    some.contribute(0, [0, 0], 1, step=1)
    used, _ = some.merge(0, 1)
    assert used.left_out == ((1, 0, "age", 1.0),)
    assert [taken.peer for taken in used.models] == [0]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Guard(ratio=1.0), "above 1, as half of all contributions"),
        (lambda: Guard(oldest=-1), "a guard that refuses all contributions"),
        (lambda: Guard(action="drop"), "a guard's action is"),
        (lambda: Quorum(count=0), "a count of at least 1"),
        (lambda: Quorum(discount=0.0), r"a discount in \(0, 1\]"),
        (lambda: Quorum(weights="words"), "weights must be"),
        (lambda: Quorum(4).check(3), "a round of 3 workers has no 4 contributions"),
        (lambda: Quorum(trimmed=2).check(4), "of 4 values, 4 trimmed ones leave none"),
        (lambda: AutoPatience(longest=math.inf), "a patience that adapts needs bounds"),
        (lambda: AutoPatience(share=0.0), "a patience that adapts needs bounds"),
    ],
)
def test_what_no_quorum_can_be_is_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()


ENCODED = Rounds(topology.complete(3), 2, compression=error_feedback(int8()))
RING = topology.ring(3)


@pytest.mark.parametrize(
    ("plan", "options", "words"),
    [
        (None, {"merge": Quorum(4)}, "a round of 3 workers has no 4"),
        (None, {"merge": Quorum(), "patience": math.inf}, "waits .* for a while"),
        (
            None,
            {"elastic": Elastic(topology.complete), "patience": math.inf},
            "a finite patience",
        ),
        (ENCODED, {"merge": Quorum()}, "a quorum and elastic peers merge whole"),
        (RING, {"merge": "swaps", "patience": AutoPatience()}, "swaps are not"),
    ],
)
def test_rounds_that_no_quorum_can_end_are_refused(plan, options, words, tmp_path):
    with pytest.raises(ValueError, match=words):
        Peers(LOCAL, plan or methods.diloco(3, 2), party_of(tmp_path, [0]), **options)


@pytest.mark.slow
def test_a_slow_worker_takes_part_in_the_rounds_of_the_others(tmp_path):
    """It contributes to as many rounds, with fewer steps and so a smaller weight."""
    how = methods.diloco(4, 8)
    slow = 3

    def delays(worker, step):
        del step
        return 0.25 if worker == slow else 0.03

    quorum, patience = Quorum(3), 0.2
    results = train(how, tmp_path, 48, quorum, delays, patience=patience)
    rounds = [len(used) for _, used in results]
    assert rounds[slow] >= max(rounds) - 1
    of_slow, of_fast = (len(results[i][0]) for i in (slow, 0))
    assert of_fast > 40
    assert of_slow < 0.7 * of_fast
    later = [one for one in results[0][1] if one.step > 16]
    weights = [{taken.peer: taken.weight for taken in one.models} for one in later]
    merged = [one for one in weights if slow in one]
    assert len(merged) >= len(weights) - 1
    assert np.mean([one[slow] for one in merged]) < 0.7 * np.mean(
        [one[1] for one in merged if 1 in one]
    )


def noise(rows, draw):
    return [x + jnp.float32(100 * draw.standard_normal(x.shape)) for x in rows]


def frozen():
    first = []

    def send(rows, draw):
        del draw
        first[:] = first or rows
        return first

    return send


ATTACKS = {
    "noise": lambda: noise,
    "negative": lambda: lambda rows, _: [-x for x in rows],
    "scaled": lambda: lambda rows, _: [100 * x for x in rows],
    "frozen": frozen,
    "not a number": lambda: lambda rows, _: [x * jnp.nan for x in rows],
}
CENTER = 20.0  # Of what workers are to learn, far from where they begin.


def attacked(folder, attack, quorum, num_workers=8, num_steps=60):
    """The models of the others, [N - 1, 7], where worker 0 sends what it likes."""
    how, params = methods.diloco(num_workers, 3), first(num_workers)
    done = threading.Barrier(num_workers)
    rows = CENTER + np.random.default_rng(0).standard_normal((num_steps, num_workers))

    def work(worker):
        draw, key = np.random.default_rng(worker), jax.random.key(0)
        party = party_of(folder, [worker])
        own = params, OPTIMIZER, key, how
        state = place(init_state(*own, workers=[worker]), party.mesh)
        given = {"patience": LONG, "merge": quorum}
        with Peers(LOCAL, how, party, **given) as step:
            for t in range(num_steps):
                batch = place(np.float32(rows[t, worker])[None], party.mesh)
                step._open(state, batch, t)
                if t == 0 and worker == 0 and attack is not None:
                    publish = step.links.publish

                    def send(i, peer, channel, arrays, said, publish=publish):
                        publish(i, peer, channel, attack(arrays, draw), said)

                    step.links.publish = send
                state, _ = step.advance(state, batch, t)
            done.wait(LONG)
        return np.concatenate([np.ravel(x) for x in jax.tree.leaves(state.params)])

    return np.stack(in_threads(work, num_workers))[1:]


def off(models):
    """How far the mean model of the others is from what they are to learn."""
    return float(np.abs(models.mean(0) - CENTER).max())


@pytest.mark.slow
@pytest.mark.draw(5)
@pytest.mark.parametrize("attack", ATTACKS)
def test_one_of_eight_that_sends_what_it_likes_does_little(attack, tmp_path):
    """With a guard or a trimmed mean the others learn as in a run without it."""
    honest = off(attacked(tmp_path / "honest", None, Quorum(8)))
    defences = {
        "refuse": Quorum(8, guard=Guard(3.0)),
        "clip": Quorum(8, guard=Guard(2.0, "clip")),
        "trimmed": Quorum(8, trimmed=1),
    }
    if attack == "not a number":
        del defences["trimmed"]  # What is no number has no place in an order.
    for name, quorum in defences.items():
        found = off(attacked(tmp_path / name, ATTACKS[attack](), quorum))
        # The noise of the mean of seven, of data with a deviation of 1.
        assert found < honest + 1.0, name
    spoilt = off(attacked(tmp_path / "spoilt", ATTACKS[attack](), Quorum(8)))
    assert not spoilt < honest + 1.5


def test_who_joins_has_the_state_of_a_peer_that_has_left_steps_out():
    """The peer has sent it once its learning rate was at its step."""
    how = Rounds(topology.complete(2), 4)
    optimizer = optax.sgd(0.125, momentum=0.5)
    local = local_update(loss_fn=loss_fn, optimizer=optimizer)
    params, key = first(2), jax.random.key(0)
    states = [
        init_state(params, optimizer, key, how, workers=[worker]) for worker in range(2)
    ]
    models = tuple(Taken(worker, 3, 3, 0.5) for worker in range(2))
    records = [MergeRecord(3, worker, 0, models) for worker in range(2)]

    def moved(state, step):
        return state._replace(
            opt_state=jax.tree.map(lambda x: x + step, state.opt_state)
        )

    def batch(worker, step):
        del worker
        return jnp.full(1, float(step))

    lives = [([0, 1, 3], None), ([3], (0, 3))]
    how = how, Quorum(), states, batch, records
    found = replayed(local, *how, lives=lives, skip=moved)
    one, other = ((x.params, x.opt_state) for x in found)
    jax.tree.map(np.testing.assert_array_equal, one, other)


@pytest.mark.slow
@pytest.mark.draw(2)
@pytest.mark.parametrize(
    "how",
    [
        methods.diloco(3, 2),
        Rounds(
            topology.complete(3), 4, delay=3, fragments=PARTS, outer=optax.sgd(0.7, 0.9)
        ),
    ],
    ids=["diloco", "fragments"],
)
def test_weights_that_are_not_recorded_are_those_of_the_run(how, tmp_path):
    """As in a simulation, whose records say only what arrived when."""
    quorum, num_workers = Quorum(2, discount=0.25), 3
    draw = np.random.default_rng(0).uniform(0, 0.02, (12, num_workers)) * [1, 1, 3]
    options = {"patience": 0.01, "delays": lambda worker, t: draw[t, worker]}
    results = train(how, tmp_path, 12, quorum, **options)
    rows, params = batches(num_workers), first(num_workers)
    key = jax.random.key(0)
    states = [
        init_state(params, OPTIMIZER, key, how, workers=[worker])
        for worker in range(num_workers)
    ]
    records = [
        one._replace(
            models=tuple(
                x._replace(weight=None) for x in one.models if x.peer != one.worker
            )
        )
        for _, used in results
        for one in used
    ]
    weights = {x.weight for _, used in results for one in used for x in one.models}
    assert len(weights) > 1
    lives = [([t - 1 for t in found], None) for found, _ in results]
    after = replayed(
        LOCAL,
        how,
        quorum,
        states,
        lambda worker, step: rows[step % STEPS, worker][None],
        records,
        lives=lives,
    )
    for state, (found, _) in zip(after, results, strict=True):
        jax.tree.map(np.testing.assert_array_equal, state.params, found[max(found)])


def test_the_tokens_of_a_batch_are_its_examples():
    assert count_examples({"x": np.zeros((2, 5, 3)), "y": np.zeros((2, 5))}) == [5, 5]
    assert count_examples(np.zeros(3)) == [1, 1, 1]


def waits_of(arrivals, patience=None, period=1.0, count=40):
    """The waits of exchanges whose arrivals are drawn by a function."""
    waits, found = Waits(patience or AutoPatience()), []
    for step in range(count):
        wait = waits.begin(step * period)
        came = arrivals(step)
        if waits.measures:
            waits.add(x if x <= wait else math.inf for x in came)
        found.append((waits.measures, wait))
    return [wait for measures, wait in found[8:] if not measures]


@pytest.mark.parametrize("seed", range(10))
def test_it_waits_for_the_time_that_is_worth_most(seed):
    """By the formula, over the two exchanges that measure first."""
    draw = np.random.default_rng(seed)
    known = draw.exponential([0.02, 0.02, 0.02, 0.02, 0.1], (2, 5))
    known[draw.uniform(size=known.shape) < 0.2] = math.inf
    waits = Waits(AutoPatience(longest=100.0, share=100.0))
    for step, arrivals in enumerate(known):
        waits.begin(float(step))
        assert waits.measures
        waits.add(arrivals.tolist())
    found = waits.begin(2.0)
    assert not waits.measures

    def worth(wait):
        models = sum(1 + sum(1 if a <= wait else 0.9 for a in x) for x in known)
        return models / sum(1.0 + min(wait, max(x)) for x in known)

    assert worth(found) >= max(map(worth, np.linspace(0, 2, 4001)))
    assert found in {0.0, *known[np.isfinite(known)]}


def test_a_patience_adapts_to_when_models_come():
    draw = np.random.default_rng(0)
    # All about as fast: it waits for most.
    jitter = waits_of(lambda _: abs(draw.normal(0.02, 0.005, 3)))
    assert all(0.02 < wait <= 0.1 for wait in jitter)
    # One straggler of three: it is not awaited.
    late = waits_of(lambda _: [0.001, 0.001, 0.5])
    assert max(late) < 0.01
    # All come much later: none is awaited.
    assert max(waits_of(lambda _: [0.4, 0.4])) == 0
    # What is there before costs nothing.
    assert max(waits_of(lambda _: [0.0, 0.0])) == 0
    # They come sooner after a while: what it measures now and then, it notices.
    sooner = waits_of(lambda step: [0.4 if step < 40 else 0.03], count=400)
    assert sooner[0] == 0 < 0.02 < sooner[-1]
    bounded = waits_of(lambda _: [0.03], AutoPatience(longest=0.02))
    assert max(bounded, default=0) <= 0.02


@pytest.mark.slow
def test_peers_with_such_a_patience_mix_what_comes_and_await_no_straggler(tmp_path):
    """Of three, one begins when the others are at their last step."""
    at_last, both = threading.Barrier(3), threading.Barrier(2)

    def delays(worker, step):
        if worker < 2:
            both.wait(LONG)  # So that each has what the other has sent before.
        if step == (0 if worker == 2 else STEPS - 1):
            at_last.wait(LONG)
        return 0.0

    patience = AutoPatience(longest=0.3)
    results = peers_run(topology.ring(3), Folder(tmp_path), patience, delays)
    for worker in (0, 1):
        _, used = results[worker]
        mixed = [x.peer for one in used for x in one.models if x.peer != worker]
        assert mixed.count(1 - worker) > 1
        assert mixed.count(2) <= 1


def test_a_patience_in_seconds_stays():
    waits = Waits(0.3)
    assert [waits.begin(now) for now in (0.0, 1.0)] == [0.3, 0.3]
    assert not waits.measures
    with pytest.raises(ValueError, match="patience must not be negative"):
        Waits(-1.0)


def test_gathering_ends_with_enough_and_a_while_or_with_all(three):
    links, none = three.links[0], (0,) * NUM_PARTS
    begin = time.monotonic()
    assert links.gather(0, {1, 2}, 0, 0, 0, 0.0) == {}
    three.links[1].publish(1, 0, 0, three.row(1, [0, 0]), Said(0, parts=none))
    came = links.gather(0, {1, 2}, 0, 0, 1, 0.05)
    assert came.keys() == {1}
    three.links[2].publish(2, 0, 0, three.row(2, [0, 0]), Said(3, parts=none))
    came = links.gather(0, {1, 2}, 0, 0, 2, LONG)
    assert came.keys() == {1, 2}
    assert time.monotonic() - begin < LONG
    # Taken, each counts as there, and is returned once.
    for peer, step in ((1, 0), (2, 3)):
        (message,) = links.take(0, peer, 0, 0)
        assert message.said.step == step
        assert links.has_sent(0, peer, 0, 0)
        assert links.take(0, peer, 0, 0) == []
