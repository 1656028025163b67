"""Navigation: maps, paths and scores by hand; runs that resume; what they show."""

import ast
import collections
import dataclasses
import functools
import json
import re
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from decentjax import over_workers, worker_mesh
from tests import rooms
from tests.changes import changed
from tests.trees import assert_close
from train.__main__ import main
from train.cli.config_json import read_config, to_json
from train.cli.load import load_config
from train.config import InStepExchange, WorkersConfig
from train.generate import generate
from train.run.history import read_history
from train.run.loop import train
from train.run.resume import Resume
from train.run.run_info import read_facts
from train.run.scores import read_trained
from train.store.checkpoints import find_checkpoints

navigate, SMALL = rooms.navigate, rooms.config.task
distances, shortest_paths = navigate.distances, navigate.shortest_paths
World, play = navigate.World, navigate.play
shortest_path_policy, uniform = navigate.shortest_path_policy, navigate.uniform
TRUST = [navigate.__file__]
METHODS = ("wagma", "peers", "dadam_aer", "sgp", "local_sgd", "allreduce")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A short run by the command, with its results and its page."""
    run_dir = tmp_path_factory.mktemp("runs") / "rooms"
    main([rooms.__file__, "--run-dir", str(run_dir)])
    return run_dir


# A wall with a door at its lower end: from (1, 1) to (1, 3).
MAP = ["#####", "#.#.#", "#.#.#", "#...#", "#####"]
WALLS = np.array([[tile == "#" for tile in row] for row in MAP])
UP, RIGHT, DOWN, LEFT = range(4)


def test_the_shortest_path_counts_steps_and_turns():
    (found,) = distances(WALLS[None], np.array([[1, 3]]))
    # Down twice, a turn, right twice, a turn, up twice.
    assert found[DOWN, 1, 1] == 8
    assert found[RIGHT, 1, 1] == found[LEFT, 1, 1] == 9
    assert found[UP, 1, 1] == 10
    assert [found[heading, 2, 3] for heading in range(4)] == [1, 2, 3, 2]
    assert (found[:, 1, 3] == 0).all()
    assert (found[:, WALLS] == -1).all()


def searched(walls, goal, start):
    """Breadth-first search from the start, as in a textbook."""
    row, column, heading = start
    seen, queue = {(row, column, heading): 0}, collections.deque([tuple(start)])
    while queue:
        row, column, heading = here = queue.popleft()
        if (row, column) == tuple(goal):
            return seen[here]
        down, right = navigate.HEADINGS[heading]
        ways = [(row, column, (heading + turn) % 4) for turn in (1, 3)]
        if not walls[row + down, column + right]:
            ways.append((row + down, column + right, heading))
        for way in ways:
            if way not in seen:
                seen[way] = seen[here] + 1
                queue.append(way)
    return -1


def test_shortest_paths_are_those_of_a_search_from_the_start():
    random = np.random.default_rng(1)
    walls = random.random((20, 8, 8)) < 0.3
    walls[:, [0, -1]] = walls[:, :, [0, -1]] = True
    episodes = navigate.draw_episodes(walls, 3, random)
    wanted = [searched(x["walls"], x["goal"], x["start"]) for x in episodes]
    assert -1 in wanted  # Also where there is no way.
    np.testing.assert_array_equal(shortest_paths(episodes), wanted)
    assert not episodes["walls"][np.arange(60), *episodes["start"].T[:2]].any()


def test_spl_of_episodes_by_hand():
    """Straight there, by a detour twice as long, missed, and by a fifth more."""
    got = navigate.spl(
        jnp.array([True, True, False, True]),
        jnp.array([4, 6, 3, 5]),
        jnp.array([4, 12, 30, 6]),
    )
    np.testing.assert_allclose(got, [1, 1 / 2, 0, 5 / 6], rtol=1e-6)


def hand_made() -> dict[str, np.ndarray]:
    """The map by hand, from three starts."""
    walls, goals = np.stack([WALLS] * 3), np.array([[1, 3]] * 3)
    start = np.array([[1, 1, DOWN], [1, 1, UP], [2, 3, RIGHT]])
    return {
        "walls": walls,
        "goal": goals,
        "start": start,
        "distance": distances(walls, goals),
    }


@pytest.mark.slow
def test_an_episode_is_played_and_paid_as_by_hand():
    world, episodes = World(size=5, view=5, horizon=32), hand_made()
    memory = jnp.zeros((3, 0))
    policy = shortest_path_policy(episodes)
    rollout = play(world, policy, memory, episodes, jax.random.key(0), greedy=True)
    taken = rollout.steps.played.sum(0)
    np.testing.assert_array_equal(taken, [8, 10, 2])
    scores = navigate.measure(rollout, episodes)
    np.testing.assert_allclose(scores["spl"], 1, rtol=1e-6)
    # Each action leads a step nearer: 0.05 - 0.01, and 1 at the end.
    np.testing.assert_allclose(scores["return"], 1 + 0.04 * taken, rtol=1e-5)
    path = rollout.place[:4, 0].tolist()
    assert path == [[1, 1, DOWN], [2, 1, DOWN], [3, 1, DOWN], [3, 1, LEFT]] or (
        path == [[1, 1, DOWN], [2, 1, DOWN], [3, 1, DOWN], [3, 1, RIGHT]]
    )
    np.testing.assert_array_equal(rollout.reached[:8, 0], [False] * 7 + [True])


@pytest.mark.slow
def test_an_agent_sees_what_is_before_it_and_where_the_goal_is():
    world, episodes = World(size=5, view=5, horizon=8), hand_made()
    rollout = play(world, uniform, jnp.zeros((3, 0)), episodes, jax.random.key(0))
    view, compass = (np.asarray(x[0]) for x in rollout.observation)
    # From (1, 1) down: itself in the last row's middle, its right is the map's left.
    blocked = view[0, ..., 0].astype(bool)
    assert not blocked[4, 2]
    assert not blocked[3, 2]
    assert not blocked[2, 2]
    assert blocked[1, 2]  # The rim below.
    assert blocked[4, 3]  # The rim on the left of the map, its right.
    assert blocked[4, 1]  # The wall between.
    assert view[0, 4, 0, 1] == 1  # The goal, two tiles to its left.
    assert view[0, ..., 1].sum() == 1
    # None ahead, and two tiles to the left.
    np.testing.assert_allclose(compass[0], [0, -1, 0.2], atol=1e-6)
    np.testing.assert_allclose(compass[1], [0, 1, 0.2], atol=1e-6)
    np.testing.assert_allclose(compass[2], [0, -1, 0.1], atol=1e-6)


@pytest.mark.slow
def test_what_was_played_on_a_mesh_first_is_played_off_it_too():
    """As peers are: steps on a mesh, then scores of all workers, batched."""
    world, mesh = World(size=5, view=5, horizon=8), worker_mesh(1)
    episodes, place = hand_made(), NamedSharding(mesh, PartitionSpec("workers"))

    def one(memory):
        return play(world, uniform, memory, episodes, jax.random.key(0)).place

    memory = jax.device_put(jnp.zeros((1, 3, 0)), place)
    on_mesh = jax.jit(over_workers(one, mesh))(memory)
    off_it = jax.jit(jax.vmap(one))(memory)
    np.testing.assert_array_equal(on_mesh, off_it)


def layouts(episodes) -> set[bytes]:
    return {walls.tobytes() for walls in np.asarray(episodes["walls"])}


@pytest.mark.slow
def test_training_maps_never_reach_evaluation():
    """By their walls, of all that a run reads, and none twice under two numbers."""
    task = SMALL.build()
    (held_out,) = task.validation()
    batches = [task.steps(2, 2, seed, range(2))[t] for seed in (0, 1) for t in range(9)]
    trained = set[bytes]().union(
        *(
            layouts({"walls": x.arrays["episodes"]["walls"].reshape(-1, 9, 9)})
            for x in batches
        )
    )
    assert len(trained) > 4
    assert not trained & layouts(held_out)
    train_set, held_out = navigate.read_episodes(changed(SMALL, num_eval_episodes=24))
    assert len(layouts(train_set)) == 12
    assert len(layouts(held_out)) == 6
    assert not layouts(train_set) & layouts(held_out)


@pytest.mark.slow
@pytest.mark.draw(3)
@pytest.mark.parametrize("size", [7, 9, 13])
def test_in_xminigrids_world_the_shortest_path_is_a_path(size):
    """Of the search's length, in each room of the library's."""
    options = changed(SMALL, sizes=(size,), num_maps=6, num_held_out=2, per_map=8)
    train_set, _ = navigate.read_episodes(changed(options, horizon=64))
    world = World(size=size, view=5, horizon=64)
    episodes = navigate.columns(train_set)
    policy = shortest_path_policy(episodes)
    memory = jnp.zeros((len(train_set), 0))
    rollout = play(world, policy, memory, episodes, jax.random.key(0), greedy=True)
    np.testing.assert_array_equal(
        rollout.steps.played.sum(0), shortest_paths(train_set)
    )


@pytest.mark.slow
def test_each_iteration_learns_from_each_episode_once_an_epoch():
    """Two epochs of two batches, and only the first of the four plays."""
    steps = SMALL.build().steps(2, 2, 0, range(2))
    batches = [steps[t].arrays for t in range(8)]
    assert [x["plays"].tolist() for x in batches] == [
        [t % 4 == 0] * 2 for t in range(8)
    ]
    for start in range(0, 8, 2):
        rows = np.concatenate([x["rows"] for x in batches[start : start + 2]], axis=1)
        np.testing.assert_array_equal(np.sort(rows), [[0, 1, 2, 3]] * 2)
    starts = [x["episodes"]["start"] for x in batches]
    np.testing.assert_array_equal(starts[0], starts[3])
    assert not np.array_equal(starts[0], starts[4])
    assert not np.array_equal(starts[0][0], starts[0][1])  # Each worker has its own.
    orders = np.stack([x["rows"] for x in batches])
    assert not np.array_equal(orders[:2], orders[2:4])


def test_a_process_reads_the_rows_of_its_own_workers():
    whole, part = (SMALL.build().steps(4, 2, 3, rows)[5] for rows in (range(4), [2, 3]))
    for a, b in zip(*map(jax.tree.leaves, (whole.arrays, part.arrays)), strict=True):
        np.testing.assert_array_equal(a[2:], b)


def start_of(task, step=0):
    params, ppo_state = task.init(jax.random.key(0))
    batch = jax.tree.map(lambda x: x[0], task.steps(2, 2, 0, range(2))[step].arrays)
    return params, ppo_state, batch


@pytest.mark.slow
def test_the_policy_that_learns_is_the_one_that_played():
    """At the first step of an iteration no probability has changed."""
    task = SMALL.build()
    params, ppo_state, batch = start_of(task)
    loss_fn = jax.jit(task.loss_fn)
    _, (ppo_state, metrics) = loss_fn(params, ppo_state, batch, jax.random.key(1))
    rollout = navigate.unpack(ppo_state.rollout)
    graph = nnx.graphdef(navigate.Navigator(SMALL.model, rngs=nnx.Rngs(0)))
    net = nnx.merge(graph, params)
    logits, values = navigate.replay(net, rollout.observation, rollout.steps)
    chosen = jax.nn.log_softmax(logits)
    chosen = np.take_along_axis(chosen, rollout.steps.action[..., None], axis=2)[..., 0]
    played = np.asarray(rollout.steps.played)
    np.testing.assert_allclose(
        chosen[played], np.asarray(rollout.steps.log_prob)[played], atol=1e-5
    )
    np.testing.assert_allclose(
        np.asarray(values)[played], np.asarray(rollout.steps.value)[played], atol=1e-5
    )
    assert float(metrics["clipped"]) == 0
    assert float(metrics["environment_steps"]) == played.sum() > 0
    lengths = played.sum(0)
    assert float(metrics["longest_episode"]) == lengths.max()
    assert float(metrics["episode_actions"]) == pytest.approx(lengths.mean())


@pytest.mark.slow
def test_a_step_that_plays_nothing_keeps_the_episodes():
    task = SMALL.build()
    params, ppo_state, batch = start_of(task)
    loss_fn = jax.jit(task.loss_fn)
    _, (first, _) = loss_fn(params, ppo_state, batch, jax.random.key(1))
    *_, later = start_of(task, step=1)
    _, (second, _) = loss_fn(params, first, later, jax.random.key(2))
    assert_close(first, second)


@pytest.mark.nightly
def test_blocks_that_are_left_out_change_no_gradient(monkeypatch):
    task = SMALL.build()
    params, ppo_state, batch = start_of(task)
    _, (ppo_state, _) = task.loss_fn(params, ppo_state, batch, jax.random.key(1))
    rollout = navigate.unpack(ppo_state.rollout)
    # All ended after 5 steps, so three of four blocks are left out.
    short = rollout.steps._replace(
        played=rollout.steps.played & (jnp.arange(32) < 5)[:, None]
    )
    ppo_state = ppo_state._replace(rollout=navigate.pack(rollout._replace(steps=short)))
    *_, later = start_of(task, step=1)

    def gradient():
        loss = functools.partial(task.loss_fn, key=jax.random.key(2))
        return jax.grad(loss, has_aux=True)(params, ppo_state, later)[0]

    wanted = gradient()
    monkeypatch.setattr(navigate, "BLOCK", 32)
    assert_close(gradient(), wanted, atol=1e-6)
    assert any(np.abs(x).max() > 0 for x in jax.tree.leaves(wanted))


@pytest.mark.nightly
def test_a_run_resumes_bit_for_bit_amid_an_iteration(tmp_path):
    """Step 6 is the third of four: the episodes are those of the checkpoint."""
    config = rooms.config
    whole = train(config, tmp_path / "run").state
    again = train(config, tmp_path / "run", Resume(step=6)).state
    assert_close(whole, again)
    rollouts = whole.model_state.rollout
    assert not np.array_equal(rollouts.place[0], rollouts.place[1])


@pytest.mark.nightly
@pytest.mark.parametrize(("num_workers", "how"), [(4, "repeat"), (1, "mean")])
def test_other_workers_go_on_with_whole_episodes(finished, num_workers, how, tmp_path):
    """At step 6, amid an iteration: the mean of two workers' episodes is no episode."""
    run_dir = tmp_path / "run"
    shutil.copytree(finished, run_dir)
    saved = read_trained(finished, 6, TRUST)
    config = changed(
        rooms.config, workers=WorkersConfig(num_workers=num_workers), num_steps=7
    )
    resume = Resume(step=6, changes=("num_steps",), workers=how)
    state = train(config, run_dir, resume).state
    for place in range(num_workers):
        (was, now) = (
            jax.tree.map(lambda x, row=row: x[row], of.rollout)
            for of, row in ((saved.models[1], place % 2), (state.model_state, place))
        )
        assert_close(was, now)


@pytest.mark.nightly
@pytest.mark.parametrize("method", METHODS)
def test_the_config_of_each_method_trains(method, tmp_path):
    whole = load_config(Path(f"{navigate.__file__}:{method}"))
    config = changed(
        whole,
        num_steps=3,
        task=SMALL,
        step=dict(batch_per_worker=2),
        optimizer=dict(warmup_steps=1),
    )
    if method == "peers":  # Each a process of its own: here its numbers.
        config = changed(config, exchange=InStepExchange())
    outcome = train(config, tmp_path / "run")
    assert outcome.step == 3
    assert max(find_checkpoints(tmp_path / "run").steps) == 3


@pytest.mark.slow
def test_a_run_is_scored_shown_and_drawn(finished, capsys):
    sample = read_facts(finished)["results"]["sample"]
    assert sample.count("G") == sample.count("SPL") == 4
    *_, last = read_history(finished).evaluations()
    training = [row for row in read_history(finished).rows if "episode_actions" in row]
    assert last["mean_model"]["environment_steps"] == training[-1]["environment_steps"]
    capsys.readouterr()
    generate(finished, ("0",), trust=TRUST)
    shown = capsys.readouterr().out
    assert re.match(r"(reached|missed) after \d+ actions, SPL [01]\.\d\d\n# # #", shown)
    assert "G" in shown
    generate(finished, ("0",), worker=1, trust=TRUST)
    with pytest.raises(ValueError, match="numbers of episodes, from 0 to 7, got '8'"):
        generate(finished, ("8",), trust=TRUST)


def refused(**options):
    return lambda: navigate.NavigateTask(**{"sizes": (7,), "horizon": 32, **options})


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: navigate.NavigatorConfig(view=4), "view must be odd and at least 5"),
        (lambda: navigate.NavigatorConfig(view=3), "view must be odd and at least 5"),
        (refused(sizes=()), "sizes must be different, larger than the view"),
        (refused(sizes=(7, 5)), r"larger than the view of 5 tiles and .* got \(7, 5\)"),
        (refused(sizes=(7, 101)), "at most 99, got"),
        (refused(sizes=(7, 9, 7)), r"sizes must be different, .* got \(7, 9, 7\)"),
        (refused(horizon=30), "horizon must be a multiple of 8, got 30"),
        (refused(environments=0), "environments must be positive, got 0"),
    ],
)
def test_maps_and_views_that_do_not_fit_are_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"step": dict(batch_per_worker=3)}, "batch_per_worker = 3 must divide"),
        ({"task": changed(SMALL, horizon=8)}, "horizon of 8 actions is shorter"),
        ({"step": dict(batch_per_worker=2, num_micro_batches=2)}, "num_micro_batches"),
        ({"task": changed(SMALL, num_maps=90)}, "found 16 different maps of 7 x 7"),
        ({"workers": dict(num_workers=64)}, "64 with batches of 4 need 256"),
    ],
)
def test_a_run_that_cannot_be_is_refused(changes, words, tmp_path):
    with pytest.raises(ValueError, match=words):
        train(changed(rooms.config, **changes), tmp_path / "run")
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_runs_of_earlier_versions_say_where_their_task_is(tmp_path):
    fields = json.loads(to_json(rooms.config))
    fields["task"]["kind"] = "NavigateTask"
    (tmp_path / "config.json").write_text(json.dumps(fields))
    said = r"part of decentjax; .* --trust examples/navigation/navigate\.py$"
    with pytest.raises(ValueError, match=said):
        read_config(tmp_path / "config.json")
    task = read_config(tmp_path / "config.json", TRUST).task
    assert dataclasses.asdict(task) == dataclasses.asdict(SMALL)


def test_the_example_imports_only_what_the_program_offers():
    tree = ast.parse(Path(navigate.__file__).read_text())
    imports = {x.module for x in ast.walk(tree) if isinstance(x, ast.ImportFrom)}
    assert {x for x in imports if x.startswith(("train", "decentjax"))} == {
        *("train.config", "train.data.batches", "train.fields"),
        *("train.models.resnet", "train.models.sizes"),
        *("train.tasks.sampling", "train.tasks.task"),
    }
