"""How runs begin and go on: what is saved, what is refused, what is recorded."""

import contextlib
import errno
import json
import os
import re
import shutil
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

from decentjax import WorkerState
from decentjax.optim import ScaleByAccumAdamState
from tests import job_line, line
from tests.changes import changed
from tests.line import Growing
from tests.run_folders import column
from tests.saving import state_of
from tests.timed import untimed
from train.__main__ import main
from train.checkpoint import named
from train.cli.changes import with_changes
from train.cli.command import SaveError
from train.cli.config_json import to_json
from train.config import AllReduceMethod, OptimizerConfig, RoundsMethod
from train.data.batches import Batch
from train.dbench.grid import Graphs
from train.report import write_report
from train.run.loop import run_steps, train
from train.run.nonfinite import WatchState, build_check
from train.run.rate_jumps import rates_at
from train.run.resume import Begin, Resume, saved_config, what_changed
from train.run.scores import build_score, read_trained
from train.run.setup import make_run
from train.run.start_run import Parts
from train.run.stop import Stop
from train.store.checkpoint_writer import Checkpoints
from train.store.checkpoints import find_checkpoints, read_models, restore, verify
from train.store.folder import lock
from train.store.log import read_metrics

LINE = line.config
# The rate of its last step of 20.
KEPT = tuple(f"optimizer.{x}-rate=0.000715" for x in ("learning", "final-learning"))


def steps(run_dir: Path) -> list[int]:
    return list(find_checkpoints(run_dir).steps)


def newest(run_dir: Path) -> tuple[int, dict]:
    """The newest saved step, and its parameters."""
    shapes = jax.eval_shape(lambda: {"params": {"b": np.zeros(4), "w": np.zeros(4)}})
    step, models = read_models(run_dir, shapes)
    return step, models["params"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("runs") / "line"
    train(changed(LINE, num_steps=20), run_dir)
    return run_dir


@pytest.fixture
def run_dir(finished, tmp_path):
    return Path(shutil.copytree(finished, tmp_path / "run"))


def poisoned(poison: str, worker: int = 2, at: int = 9, **fields):
    task = line.Line(poison=poison, poison_step=at, poison_worker=worker)
    return changed(LINE, task=task, **fields)


def test_changes_hold_together():
    """Whole models in nodes have no codec: neither change fits alone."""
    config = changed(
        LINE,
        workers=dict(workers_per_node=2),
        topology=dict(name="alternating_exponential_ring"),
    )
    changes = ["step.algorithm=rounds", "rounds.codec=int8", "topology.name=ring"]
    found, _ = with_changes(config, changes)
    assert (found.method.codec, found.topology.name) == ("int8", "ring")
    found, fields = with_changes(LINE, ("log.timeline=True",))
    assert found.log.timeline
    assert fields == ("log.timeline",)


def rates(num_steps):
    return optax.constant_schedule(0.1)


def test_a_rate_that_changes_nothing_is_refused():
    config = changed(LINE, optimizer=dict(decay=rates))
    with pytest.raises(ValueError, match=r"optimizer.decay = .*:rates has the r"):
        with_changes(config, ("optimizer.learning-rate=0.5",))
    with pytest.raises(ValueError, match=r"--scaling linear scales .* leave out o"):
        Graphs(config, ("ring",)).cells((4,), "local", "linear")


@pytest.mark.parametrize(
    ("config", "message", "kept"),
    [
        *(  # Though the next look at a number is at step 20, and the next save at 10.
            pytest.param(
                poisoned(poison, log=changed(LINE.log, every_steps=20)),
                rf"worker 2 is not finite at step 9, in params\['{leaf}'\]; resume "
                r"from step 5, which is finite: decentjax resume .* "
                r"--optimizer.learning-rate 0.05",
                [5],
                id=poison,
            )
            for poison, leaf in [("batch", "b"), ("loss", "b"), ("gradient", "w")]
        ),
        (
            changed(poisoned("gradient", 3, 2), workers=dict(where="mesh")),
            "of worker 3 is not finite at step 2",
            [],
        ),
        (  # All-reduce spreads it at once.
            changed(
                poisoned("loss"),
                method=AllReduceMethod(),
                checkpoint=dict(every_steps=100),
            ),
            "of workers 0, 1, 2, 3 is not finite at step 9.* nothing has been saved",
            [],
        ),
        (  # Each gradient is finite, but not what an update of 1e38 comes to.
            changed(
                LINE,
                optimizer=dict(learning_rate=2e38, final_learning_rate=2e38),
                checkpoint=dict(every_steps=1),
            ),
            "worker",
            [1],
        ),
        (
            changed(LINE, task=Growing(), checkpoint=dict(every_steps=1)),
            "state of workers 0, 1, 2, 3 is not finite after step 3, in model_state",
            [1, 2],
        ),
    ],
)
def test_what_is_not_finite_is_named_and_never_saved(config, message, kept, tmp_path):
    with pytest.raises(FloatingPointError, match=message):
        train(config, tmp_path)
    assert steps(tmp_path) == kept
    assert not kept or all(np.isfinite(x).all() for x in newest(tmp_path)[1].values())


def test_one_number_that_is_not_finite_is_enough():
    params = {"x": jax.numpy.ones((4, 3)).at[2, 1].set(np.inf)}
    state = WorkerState(params, (), (), jax.random.split(jax.random.key(0), 4))
    message = r"worker 2 is not finite after step 7, in params\['x'\]"
    with pytest.raises(FloatingPointError, match=message):
        build_check(None)(state, 7)


class Skipping(line.Line):
    """An example of the fourth step cannot be read."""

    def build(self):
        task = super().build()

        def skip(step, batch):
            return batch._replace(skipped=int(step == 3))

        return task._replace(
            steps=lambda *args, **kw: task.steps(*args, **kw).map_with_index(skip)
        )


def test_what_was_skipped_is_in_the_next_row_alone(tmp_path):
    train(
        changed(LINE, task=Skipping(), num_steps=8, log=dict(every_steps=2)), tmp_path
    )
    rows = column(tmp_path, "skipped_examples")
    assert rows == [0, 1, 0, 0, 0]  # After 2, 4, 5, 6 and 8 steps.


def test_a_failed_save_ends_the_run_at_the_next_step(tmp_path, monkeypatch):
    errors = [None, None, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))]

    def check_for_errors(self):
        if error := errors.pop(0):
            raise error

    monkeypatch.setattr(ocp.AsyncCheckpointer, "check_for_errors", check_for_errors)
    with pytest.raises(SaveError, match="no space left on device"):
        train(changed(LINE, checkpoint=dict(every_steps=1000)), tmp_path)
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2]


def test_what_is_saved_is_settled_checked_and_written_down():
    """Settled first: a model in an exchange is not known to be finite yet."""
    zeros = jax.numpy.zeros(1, int)
    state, done = WorkerState({}, (WatchState(*[zeros] * 5),), (), ()), []

    def note(name, result=None):
        return lambda *_: done.append(name) or result

    train_step = note("step", (state, {}))
    train_step.settle = note("settle")
    names = "count", "measure", "flush", "write_rows", "evaluate"
    parts = Parts(
        train_step=train_step,
        batches=iter([Batch(np.zeros(1))]),
        check=note("check"),
        observer=SimpleNamespace(log=None, **{name: note(name) for name in names}),
        checkpoints=SimpleNamespace(
            check=lambda: False, save=note("save"), wait=lambda: False
        ),
        stop=Stop(),
        profile=lambda step, state: None,
    )
    run = make_run(changed(LINE, num_steps=1))
    assert run_steps(run, Begin(0, state, None), parts) == (1, state)
    # The last step is settled once more, to measure the consensus distance.
    order = "count step settle measure settle check flush write_rows save evaluate"
    assert done == order.split()


def test_what_is_evaluated_is_saved_before(tmp_path):
    with pytest.raises(ZeroDivisionError):
        train(
            changed(LINE, task=dict(eval_fails=True), evaluation=dict(every_steps=7)),
            tmp_path,
        )
    assert steps(tmp_path) == [5, 7]


REMOVED = {12: "checkpoints"}  # By the step after which it is.


def removes(step, state, metrics):
    if step in REMOVED:
        run_dir = Path(os.environ["RUN_DIR"])
        while [*run_dir.glob("checkpoints/*tmp*")]:
            time.sleep(0.01)
        path = run_dir / REMOVED[step]
        path.unlink() if path.is_file() else shutil.rmtree(path)


@pytest.mark.slow
@pytest.mark.draw(4)
@pytest.mark.parametrize(
    ("removed", "said"),
    [
        ({12: "checkpoints"}, ["/checkpoints"]),
        ({12: "", 18: ""}, ["", ""]),
        ({7: "checkpoints", 9: "lock"}, ["/checkpoints"]),
        ({12: "config.json"}, ["/config.json"]),
        ({12: "run.json", 13: "tensorboard"}, ["/run.json"]),
        ({13: "metrics.jsonl"}, []),
        ({13: "checkpoints/5"}, []),
    ],
)
def test_what_is_removed_is_made_anew(removed, said, tmp_path, monkeypatch, capsys):
    """And a line says so; the run ends as if nothing had been removed."""
    run_dir = tmp_path / "run"
    monkeypatch.setenv("RUN_DIR", str(run_dir))
    monkeypatch.setattr(sys.modules[__name__], "REMOVED", removed)
    config = changed(LINE, on_step=removes, log=dict(every_steps=1), num_steps=20)
    outcome = train(config, run_dir)
    anew = "was removed while the run trains, and is created again\n"
    warned = untimed(capsys.readouterr().err)
    assert warned == "".join(f"warning: {run_dir}{one} {anew}" for one in said)
    assert steps(run_dir)[-1] == 20
    for name in ("config.json", "run.json", "lock", "tensorboard"):
        assert (run_dir / name).exists()
    assert read_metrics(run_dir)[-1]["step"] == 20
    write_report([run_dir], run_dir / "report.html")
    with lock(run_dir):  # Its own is not held for ever.
        pass
    again = train(config, run_dir, Resume())
    for x, y in zip(rows_of(outcome.state), rows_of(again.state), strict=True):
        np.testing.assert_array_equal(x, y)


def removes_all(step, scores):
    removes("evaluated", None, None)


def test_a_last_checkpoint_that_is_removed_is_saved_again(tmp_path, monkeypatch):
    """Its state is still in memory, as the run has not ended."""
    monkeypatch.setenv("RUN_DIR", str(tmp_path))
    monkeypatch.setattr(
        sys.modules[__name__], "REMOVED", {"evaluated": "checkpoints/20"}
    )
    config = changed(LINE, on_evaluation=removes_all, num_steps=20)
    train(config, tmp_path)
    assert steps(tmp_path) == [15, 20]


def test_a_folder_that_is_removed_stays_locked(tmp_path):
    run_dir = tmp_path / "run"
    with lock(run_dir) as hold:
        shutil.rmtree(run_dir)
        hold()
        hold()
        with pytest.raises(ValueError, match="in use by"), lock(run_dir):
            pass
        shutil.rmtree(run_dir)
        with lock(run_dir), pytest.raises(ValueError, match="in use by"):
            hold()


def test_a_checkpoint_that_is_removed_as_it_is_saved_is_saved_again(tmp_path):
    folder, num_lost = tmp_path / "checkpoints", 0
    with Checkpoints(tmp_path, 3) as checkpoints:
        for step in range(1, 8):
            checkpoints.save(step, state_of(step), LINE)
            time.sleep(0.005 * step)
            shutil.rmtree(folder, ignore_errors=True)
            num_lost += checkpoints.wait()
        checkpoints.save(step, state_of(step), LINE)
    assert num_lost > 3
    assert steps(tmp_path)[-1] == step
    path = find_checkpoints(tmp_path).steps[step]
    verify(path)
    found = restore(path, state_of(0)).params["a"]
    np.testing.assert_array_equal(found, state_of(step).params["a"])


def test_after_an_error_the_last_save_is_waited_for(tmp_path, monkeypatch):
    done = []

    def wait(self):
        time.sleep(0.5)
        done.append(True)

    monkeypatch.setattr(Checkpoints, "wait", wait)
    with pytest.raises(ZeroDivisionError), Checkpoints(tmp_path, 2):
        raise ZeroDivisionError
    assert done


@pytest.mark.slow
def test_a_run_goes_on_with_its_own_config(run_dir, tmp_path):
    """It may train for longer; then it is what a run from a checkpoint would be."""
    config = changed(saved_config(run_dir, None, ["tests.line"]), num_steps=30)
    assert train(config, run_dir, Resume()).step == 30
    rows = [row for row in read_metrics(run_dir) if "changed" in row]
    assert [(row["step"], row["changed"]) for row in rows] == [
        (20, ["num_steps was 20 and is 30"])
    ]
    assert column(run_dir, "step") == list(range(1, 31))
    seconds = [row["seconds"] for row in read_metrics(run_dir)]
    assert seconds == sorted(seconds), "the clock goes on"
    times = [row["time"] for row in read_metrics(run_dir)]
    assert times == sorted(times)
    assert not any(untimed(f"{one} ") for one in times)
    assert json.loads((run_dir / "config.json").read_text())["num_steps"] == 30


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (changed(LINE, seed=3), "seed was 0 and is 3; .* give decentjax resume"),
        (
            changed(LINE, topology=dict(name="complete")),
            "topology.name was '.*' and is 'complete'; .* --topology.name complete",
        ),
        (changed(LINE, num_steps=15), "has done 20 steps, more than"),
        (changed(LINE, workers=dict(num_workers=8)), "num_workers was 4 and is 8"),
        (changed(LINE, num_steps=17), "settings: num_steps was 20 and is 17"),
    ],
)
def test_what_trains_otherwise_is_refused_with_its_name(config, message, run_dir):
    step = 15 if config.num_steps == 17 else None
    with pytest.raises(ValueError, match=message):
        train(config, run_dir, Resume(step=step))


def test_an_earlier_config_has_defaults_of_later_fields(run_dir, monkeypatch):
    saved = json.loads(to_json(LINE))
    del saved["method"], saved["optimizer"]["eps"]
    monkeypatch.setattr("train.run.resume.saved_fields", lambda _: saved)
    run = make_run(LINE)
    assert what_changed(run_dir, 20, run, Resume()) == []
    saved["seed"] = 3
    with pytest.raises(ValueError, match="settings: seed was 3 and is 0; to change"):
        what_changed(run_dir, 20, run, Resume())


def rows_of(state):
    """The arrays of all workers but their keys."""
    return jax.tree.leaves(jax.device_get(state._replace(key=())))


@pytest.mark.slow
@pytest.mark.draw(5)
@pytest.mark.parametrize("num_workers", [1, 3, 7])
@pytest.mark.parametrize("how", ["mean", "repeat", "select"])
def test_another_number_of_workers_takes_the_saved_models(how, num_workers, run_dir):
    before = rows_of(train(LINE, run_dir, Resume()).state)
    config = changed(LINE, workers=dict(num_workers=num_workers))
    resume = Resume(workers=how)
    if how == "select" and num_workers > 4:
        with pytest.raises(ValueError, match="the first of 4 workers, and there are 7"):
            train(config, run_dir, resume)
        return
    after = train(config, run_dir, resume).state
    assert len(set(map(str, jax.random.key_data(after.key)))) == num_workers
    for x, y in zip(before, rows_of(after), strict=True):
        wanted = x[[i % 4 for i in range(num_workers)]]
        if how == "mean":
            mean = x.astype(np.float64).mean(0).astype(x.dtype)
            wanted = np.stack([mean] * num_workers)
        np.testing.assert_allclose(y, wanted, rtol=1e-6)
    longer = changed(config, num_steps=30)
    assert train(longer, run_dir, resume).step == 30
    row = next(row for row in read_metrics(run_dir) if "changed" in row)
    assert f"workers.num_workers was 4 and is {num_workers}" in row["changed"]


@pytest.mark.slow
def test_parts_of_a_sum_go_on_as_their_mean_alone(tmp_path):
    config = changed(
        LINE,
        method=RoundsMethod(every_steps=1, delay=1, tracking=True),
    )
    before = train(config, tmp_path).state
    workers = changed(LINE.workers, num_workers=3)
    config = changed(config, workers=workers)
    for how in ("repeat", "select"):
        with pytest.raises(ValueError, match=f"{how} would drop or .* take mean"):
            train(config, tmp_path, Resume(workers=how))
    after = train(config, tmp_path, Resume(workers="mean")).state
    for one in (before.extra, after.extra):
        sums = [x["w"].sum(0) for x in one.values.values()]
        np.testing.assert_allclose(*sums, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_a_run_on_a_mesh_takes_another_number_of_workers(run_dir, tmp_path):
    workers = changed(LINE.workers, num_workers=8)
    config = changed(LINE, workers=workers, num_steps=30)
    other = shutil.copytree(run_dir, tmp_path / "other")
    wanted = train(config, run_dir, Resume(workers="repeat")).state
    on_mesh = changed(workers, where="mesh")
    config = changed(config, workers=on_mesh)
    found = train(config, other, Resume(workers="repeat")).state
    for x, y in zip(rows_of(found), rows_of(wanted), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-7)


def cosine(step, num_steps, peak=0.1, final=1e-4):
    """The rate of a run of LINE, which has no warm-up."""
    return final + (peak - final) * (1 + np.cos(np.pi * step / num_steps)) / 2


@pytest.mark.slow
@pytest.mark.draw(4)
@pytest.mark.parametrize(
    ("num_steps", "changes", "now", "how"),
    [
        (45, (), cosine(20, 45), "add --optimizer.learning-rate {0} --op.*{0}"),
        (25, ("optimizer.learning-rate=0.5",), cosine(20, 25, 0.5), "to keep it, add"),
        (25, ("optimizer.decay=steps",), 0.1, "to keep it, add"),
        (90, ("optimizer.warmup-steps=80",), 0.1 * 20 / 80, "without the change it"),
        # What the line advises, a change that is no change, and what is not a rate.
        (40, KEPT, None, ""),
        (21, ("optimizer.b1=0.5", KEPT[0], KEPT[1]), None, ""),
        (20, ("optimizer.final-learning-rate=0.5",), None, ""),
    ],
)
def test_a_rate_that_jumps_is_said(num_steps, changes, now, how, run_dir, capsys):
    """By its schedules, whatever the option; the log and the report have it too."""
    longer = changed(LINE, num_steps=num_steps)
    config, fields = with_changes(longer, changes)
    train(config, run_dir, Resume(changes=fields))
    said = capsys.readouterr().err
    rows = [row["rate_jump"] for row in read_metrics(run_dir) if "rate_jump" in row]
    if now is None:
        assert (said, rows) == ("", [])
        return
    np.testing.assert_allclose(rows, [(cosine(19, 20), now)], rtol=1e-4)
    last = f"{cosine(19, 20):.3g}"
    assert re.search(
        rf"^warning: the learning rate jumps from {last}, where the run stopped, to "
        rf"{now:.3g} at step 20: num_steps was 20 and is {num_steps}.*; .*"
        + how.format(last),
        untimed(said),
    )
    page = write_report([run_dir], run_dir / "report.html").read_text()
    assert f"; the learning rate jumped from {last} to {now:.3g}" in page


@pytest.mark.slow
def test_a_run_may_go_on_with_other_windows_of_its_moments(tmp_path):
    """Its moments keep their age, six full windows of three steps."""
    accum = OptimizerConfig(name="accum_adam", accum_steps=3, warmup_steps=0)
    config = changed(LINE, num_steps=20, optimizer=accum)
    before = train(config, tmp_path).state.opt_state
    config, fields = with_changes(config, ["optimizer.accum-steps=8"])
    after = train(config, tmp_path, Resume(changes=fields)).state.opt_state
    (old,), (new,) = (
        [x for x in jax.tree.leaves(state, is_leaf=is_accum) if is_accum(x)]
        for state in (before, after)
    )
    assert new.count.tolist() == [48] * 4
    assert old.mu["w"].tolist() == new.mu["w"].tolist()
    assert not new.acc["w"].any()


def is_accum(x):
    return isinstance(x, ScaleByAccumAdamState)


def test_a_rate_within_a_run_may_jump():
    """One that falls by its schedule does not jump, nor one that is left as it was."""
    falls = OptimizerConfig(decay="steps", decay_steps=(60,), warmup_steps=5)
    assert rates_at((falls, 100), (falls, 200), 60) is None
    sooner = changed(falls, decay_steps=(50,))
    assert rates_at((falls, 100), (sooner, 100), 60) is None  # As it would have been.
    later = changed(falls, decay_steps=(70,))
    assert rates_at((falls, 100), (later, 100), 60) is None  # As it was.
    last, now = rates_at((falls, 100), (sooner, 100), 55) or (0, 0)
    assert (last, now) == pytest.approx((1e-3, 1e-4))
    own = changed(falls, decay=rising, decay_steps=())
    assert rates_at((own, 100), (own, 120), 50) is None
    last, now = rates_at((own, 100), (own, 200), 50) or (0, 0)
    assert (last, now) == pytest.approx((0.49, 0.25))
    zero = changed(falls, learning_rate=0.0)
    assert rates_at((zero, 100), (zero, 200), 60) is None


def rising(num_steps):
    return lambda step: step / num_steps


@pytest.mark.parametrize("change", ["nothing", "=1", "optimizer.learning-rate"])
def test_a_change_has_a_field_and_a_value(change):
    with pytest.raises(ValueError, match="a change is FIELD=VALUE"):
        with_changes(LINE, [change])


@pytest.mark.slow
def test_a_run_goes_on_from_an_earlier_step_and_moves_the_later_ones_aside(run_dir):
    before = newest(run_dir)
    assert train(LINE, run_dir, Resume(step=15)).step == 20
    np.testing.assert_equal(newest(run_dir), before)
    assert (run_dir / "set_aside" / "20" / "state").is_dir()
    with pytest.raises(ValueError, match=r"has checkpoints of steps \[15, 20\], not 7"):
        train(LINE, run_dir, Resume(step=7))


class Keyed(line.Line):
    """Its model state has random keys, as that of flax NNX."""

    def build(self):
        task = super().build()

        def loss_fn(params, model_state, batch, key):
            loss, _ = task.loss_fn(params, (), batch, key)
            return loss, ({"keys": jax.vmap(next_key)(model_state["keys"])}, {})

        def init(key):
            return task.init(key)[0], {"keys": jax.random.split(key)}

        def score_fn(params, model_state, batch):
            drawn = jax.random.normal(model_state["keys"][0])
            return task.score_fn(params, (), batch) | {"drawn": (drawn, 1 + 0 * drawn)}

        return task._replace(init=init, loss_fn=loss_fn, score_fn=score_fn)


class OldKeyed(line.Line):
    """Its model state has a key in jax's old form, beside numbers that are none."""

    def build(self):
        task = super().build()

        def loss_fn(params, model_state, batch, key):
            return task.loss_fn(params, (), batch, key)[0], (model_state, {})

        def init(key):
            state = {"dropout_rng": jax.random.PRNGKey(3), "seen": np.uint32([5, 0])}
            return task.init(key)[0], state

        return task._replace(init=init, loss_fn=loss_fn)


class Wide(Keyed):
    """Its w has three numbers."""

    def build(self):
        task = super().build()
        narrow = lambda params: params | {"w": params["w"].sum()}  # noqa: E731

        def init(key):
            params, model_state = task.init(key)
            return params | {"w": jax.numpy.zeros(3)}, model_state

        return task._replace(
            init=init,
            loss_fn=lambda params, *args: task.loss_fn(narrow(params), *args),
            score_fn=lambda params, *args: task.score_fn(narrow(params), *args),
        )


def next_key(key):
    return jax.random.fold_in(key, 1)


@contextlib.contextmanager
def jax_option(name, value):
    before = getattr(jax.config, name)
    jax.config.update(name, value)
    try:
        yield
    finally:
        jax.config.update(name, before)


@pytest.mark.slow
def test_random_keys_of_another_kind_are_refused_by_name(run_dir):
    longer = changed(LINE, num_steps=22)
    words = (
        r"of step 20 of .* cannot be used: its random keys, key, are of the kind {}, "
        r"and those of this process of the kind {}: set JAX_DEFAULT_PRNG_IMPL={}; "
        r"steps \[20, 15\] are there"
    )
    with jax_option("jax_default_prng_impl", "rbg"):
        kinds = "threefry2x32", "rbg", "threefry2x32"
        with pytest.raises(ValueError, match=words.format(*kinds)):
            train(longer, run_dir, Resume())
    train(longer, run_dir, Resume())


@pytest.mark.slow
def test_a_run_with_another_kind_of_keys_goes_on_with_them_alone(tmp_path):
    config = changed(LINE, task=Keyed(), num_steps=5)
    with jax_option("jax_default_prng_impl", "unsafe_rbg"):
        train(config, tmp_path)
    longer = changed(config, num_steps=6)
    words = "kind unsafe_rbg, .* threefry2x32: set JAX_DEFAULT_PRNG_IMPL=unsafe_rbg"
    with pytest.raises(ValueError, match=words):
        train(longer, tmp_path, Resume())
    words = f"5 of {tmp_path} cannot be used: its random keys, model_state.keys, are"
    with pytest.raises(ValueError, match=words):
        read_trained(tmp_path, trust=["test_resume"])
    with jax_option("jax_default_prng_impl", "unsafe_rbg"):
        read_trained(tmp_path, trust=["test_resume"])
        train(longer, tmp_path, Resume())


@pytest.mark.slow
@pytest.mark.draw(2)
@pytest.mark.parametrize("how", ["mean", "repeat"])
def test_keys_of_a_model_state_are_read_and_new_for_other_workers(how, tmp_path):
    config = changed(LINE, task=Keyed(), num_steps=5)
    last = train(config, tmp_path).state.model_state["keys"]
    read = read_trained(tmp_path, trust=["test_resume"])
    scores = build_score(read.run.task)([read.mean(), read.worker(3)])
    wanted = [float(jax.random.normal(last[i, 0])) for i in (0, 3)]
    assert [x["drawn"] for x in scores] == pytest.approx(wanted)
    assert read.worker(3)[1]["keys"].dtype == last.dtype
    arrays = named({"model_state": read.worker(3)[1]})
    np.testing.assert_array_equal(
        arrays["model_state.keys"], jax.random.key_data(last[3])
    )
    workers = changed(LINE.workers, num_workers=7)
    wider = changed(config, workers=workers, num_steps=6)
    keys = train(wider, tmp_path, Resume(workers=how)).state.model_state["keys"]
    assert keys.shape == (7, 2)
    assert len(set(map(str, jax.random.key_data(keys.ravel())))) == 14


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*is taken for a random key")
def test_old_keys_of_a_model_state_are_new_for_other_workers(tmp_path):
    config = changed(LINE, task=OldKeyed(), num_steps=5)
    train(config, tmp_path)
    workers = changed(LINE.workers, num_workers=7)
    wider = changed(config, workers=workers, num_steps=6)
    state = train(wider, tmp_path, Resume(workers="mean")).state.model_state
    assert len(np.unique(state["dropout_rng"], axis=0)) == 7
    np.testing.assert_array_equal(state["seen"], [[5, 0]] * 7)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["optimizer.name=sgd"], "has no opt_state.3.0.trace.b, .* and it has opt_st"),
        (["optimizer.name=accum_adam"], "it has no opt_state.3.0.acc.b"),
        (["step.algorithm=rounds"], "it has the parts of another optimizer or"),
    ],
)
def test_a_state_of_another_optimizer_is_refused_by_name(changes, words, run_dir):
    """Orbax would say it in pages, with all values."""
    config, fields = with_changes(LINE, [*changes, "num_steps=22"])
    with pytest.raises(ValueError, match=f"cannot be used: .*{words}") as caught:
        train(config, run_dir, Resume(changes=fields))
    said = str(caught.value)
    assert ", which takes a new run, as --init-from begins with this one's mean" in said
    assert len(said) < 600
    assert "\n" not in said


@pytest.mark.slow
@pytest.mark.parametrize("how", [None, "mean"])
def test_a_state_of_another_model_is_refused_by_name(how, tmp_path):
    train(changed(LINE, task=Keyed(), num_steps=5), tmp_path)
    count = 4 if how is None else 3
    wide = changed(LINE, task=Wide(), workers=dict(num_workers=count))
    resume = Resume(changes=("task.kind",), workers=how)
    words = r"its params.w has the shape \(4,\), wanted \(4, 3\); it is of another mod"
    with pytest.raises(ValueError, match=words):
        train(wide, tmp_path, resume)


@pytest.mark.parametrize(
    ("old", "new", "how"),
    [
        ("float32", "float64", "; JAX_ENABLE_X64=0 keeps it"),
        ("float64", "float32", "; JAX_ENABLE_X64=1 keeps it"),
        ("float32", "float16", ""),
        ("float32", "float32", None),
    ],
)
def test_arrays_that_go_on_in_another_dtype_are_said(old, new, how, tmp_path, capsys):
    with jax_option("jax_enable_x64", True):
        cast = lambda tree, dtype: jax.tree.map(lambda x: x.astype(dtype), tree)  # noqa: E731
        state = state_of(1)
        with Checkpoints(tmp_path, 3) as checkpoints:
            saved = state._replace(params=cast(state.params, old))
            checkpoints.save(1, saved, LINE)
        wanted = state._replace(params=cast(state.params, new))
        found = restore(tmp_path / "checkpoints" / "1", wanted)
    assert found.params["b"].dtype == new
    words = f"warning: params.a was saved as {old}, and continues as {new}{how}\n"
    assert untimed(capsys.readouterr().err) == ("" if how is None else words)


def spoil_state(path: Path) -> None:
    for file in (path / "state").rglob("*"):
        if file.is_file():
            file.write_bytes(b"")


@pytest.mark.slow
def test_a_state_that_is_not_finite_is_not_gone_on_with(run_dir, capsys):
    """Whoever saved it, it is no better than one that is broken."""
    state = train(LINE, run_dir, Resume()).state
    spoilt = state._replace(params=jax.tree.map(lambda x: x * np.nan, state.params))
    with Checkpoints(run_dir, 3) as checkpoints:
        checkpoints.save(25, spoilt, LINE)
    assert steps(run_dir) == [15, 20, 25]
    config = changed(LINE, num_steps=30)
    with pytest.raises(ValueError, match=r"after step 25, in .*; steps \[25\] are"):
        train(config, run_dir, Resume(step=25))
    assert train(config, run_dir, Resume()).step == 30
    warned = capsys.readouterr().err
    assert "warning: the checkpoint of step 25 of" in warned
    assert "is not finite after step 25" in warned


def test_where_all_are_broken_it_says_so(run_dir):
    for path in find_checkpoints(run_dir).steps.values():
        spoil_state(path)
    with pytest.raises(ValueError, match=r"of step 15 of .* cannot be used: "):
        train(LINE, run_dir, Resume())


def test_strays_are_no_checkpoints(run_dir, capsys):
    """A run that took a copy for its newest step would go on past its end for ever."""
    folder = run_dir / "checkpoints"
    shutil.copytree(folder / "15", folder / "1971")
    (folder / "25").mkdir()
    (folder / "99").symlink_to(folder / "20")
    (folder / "100").mkdir()
    (folder / "notes.txt").write_text("")
    assert steps(run_dir) == [15, 20]
    config = changed(LINE, num_steps=30)
    assert train(config, run_dir, Resume()).step == 30
    assert steps(run_dir) == [25, 30]
    warned = capsys.readouterr().err
    for name, why in {
        "1971": "is a copy of step 15",
        "99": "is not a folder",
        "100": "holds no state",
        "notes.txt": "is not a folder",
    }.items():
        assert f"left out {folder / name}: it {why}" in warned
    # Else the run could not save when it comes to such a step.
    assert {path.name for path in (run_dir / "set_aside").iterdir()} == {
        *("25", "99", "100", "1971")
    }
    assert newest(run_dir)[0] == 30


def test_what_is_half_written_is_removed_at_the_next_start(run_dir):
    folder = run_dir / "checkpoints"
    (folder / "25.orbax-checkpoint-tmp").mkdir()
    assert steps(run_dir) == [15, 20]
    train(LINE, run_dir, Resume())
    assert not list(folder.glob("*tmp*"))


@pytest.mark.slow
def test_a_run_begins_with_the_mean_model_of_another(tmp_path):
    config = changed(job_line.config, num_steps=3)
    train(config, tmp_path / "first")
    mean = read_trained(tmp_path / "first", trust=["tests.job_line"]).mean()[0]
    wide = changed(
        config,
        workers=dict(num_workers=2, workers_per_node=1),
        optimizer=dict(learning_rate=0.0, final_learning_rate=0.0, weight_decay=0.0),
    )
    outcome = train(wide, tmp_path / "second", init_from=tmp_path / "first")
    for got, wanted in zip(
        jax.tree.leaves(outcome.state.params), jax.tree.leaves(mean), strict=True
    ):
        assert got.shape == (2, *wanted.shape)
        np.testing.assert_allclose(got[1], wanted, rtol=1e-6)
    (row,) = (r for r in read_metrics(tmp_path / "second") if "init_from" in r)
    assert (row["step"], row["init_step"]) == (0, 3)

    grown = changed(config, task=Growing())
    first = tmp_path / "first"
    with pytest.raises(ValueError, match="the model to start from does not fit"):
        train(grown, tmp_path / "third", init_from=first, trust=["tests.job_line"])


def test_a_folder_with_a_run_is_not_overwritten(run_dir):
    with pytest.raises(ValueError, match=r"go on with decentjax resume "):
        train(LINE, run_dir)


def test_a_run_that_is_refused_leaves_no_folder(tmp_path):
    with pytest.raises(ValueError, match="none holds no run"):
        train(LINE, tmp_path / "run", init_from=tmp_path / "none")
    assert list(tmp_path.iterdir()) == []


def test_there_must_be_a_run_to_go_on_with(tmp_path):
    with pytest.raises(ValueError, match="holds no checkpoint of a run"):
        saved_config(tmp_path / "nothing", None)


def test_broken_rows_are_left_out_and_the_others_stay(run_dir, capsys):
    path = run_dir / "metrics.jsonl"
    rows = path.read_text().splitlines()
    rows[3], rows[7] = rows[3][:-9], "[1, 2]"
    path.write_text("\n".join([*rows, '{"step": 21, "lo']))
    assert len(read_metrics(run_dir)) == len(rows) - 2
    assert "left out 2 broken row(s), in line 4, 8" in capsys.readouterr().err
    train(changed(LINE, num_steps=22), run_dir, Resume())
    trained = column(run_dir, "step")
    assert trained == [1, 2, 3, 5, 6, 7, *range(9, 23)]


@pytest.mark.slow
def test_the_command_line_goes_on_from_a_folder_alone(run_dir, capsys, monkeypatch):
    monkeypatch.setattr(os, "environ", dict(os.environ))
    options = ["--trust", "tests.line", "--num-steps", "24"]
    main(["--resume", str(run_dir), *options, "--log.every-steps", "2"])
    assert steps(run_dir)[-1] == 24
    said = capsys.readouterr().out
    assert "held-out loss" in said
    assert "sample of the mean model" in said
    with pytest.raises(SystemExit, match="a run brings its own config"):
        main(["tests/line.py", "--resume"])
    main(["--resume", str(run_dir), *options[:2], "--num-steps=26", "--lr", "0.2"])
    rows = [row["changed"] for row in read_metrics(run_dir) if "changed" in row]
    words = "optimizer.learning_rate was 0.1 and is 0.2"
    assert words in rows[-1]
    page = write_report([run_dir], run_dir / "report.html").read_text()
    assert f"; num_steps was 24 and is 26; {words}" in page
