"""The bench of one GPU: what it refuses, its arithmetic, and a run on a CPU."""

import contextlib
import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
from rich.console import Console

from benches.gpu import pieces
from benches.gpu.gpu import (
    ACCUM,
    BOTH,
    COMPUTE,
    COPY,
    EXCHANGE,
    OURS,
    PLAIN,
    UPDATE,
    GpuBench,
    GpuTiming,
    shared_sentence,
    slowest,
    table,
)
from benches.gpu.gpu_alone import (
    copy_step,
    explained,
    first_batch,
    of_workers,
    update_step,
)
from benches.gpu.gpu_shared import runners
from benches.runner import Runner
from benches.train_steps import in_turns, our_step, plain_step, wrapped_step
from decentjax import local_update, overlap, simulate, topology
from decentjax.optim import accum_adamw
from tests import tiny
from tests.checkout import ENV, ROOT
from tests.gpus import compiled, gpu_mesh, shapes
from train.run.setup import make_run

# A compiler without a device reads no program from the cache of compiled programs.
pytestmark = pytest.mark.filterwarnings(
    "ignore:Error reading persistent compilation cache"
)

TINY = ROOT / "tests" / "tiny.py"


def bench(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "benches", "gpu", *options],
        cwd=ROOT,
        # A box around the sentence would break it into lines.
        env=ENV | {"JAX_PLATFORMS": "cpu", "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"rounds": 0}, "rounds must be at least 1, got 0"),
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"batch": 0}, "batch must be at least 1, got 0"),
        ({"processes": -1}, "processes must be at least 0, got -1"),
        ({"processes": 1}, "must be 0, or 2 or more, got 1"),
        ({"config": Path("none.py")}, "there is no config file none.py"),
    ],
)
def test_bad_input_gets_a_sentence(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        GpuBench(**{"config": TINY, **options})


def test_the_default_config_is_one_that_comes_with_the_program():
    assert GpuBench().config == Path("gpt2_small")


@pytest.mark.nightly
def test_without_a_gpu_nothing_is_measured(tmp_path):
    result = bench("--config", str(TINY), "--out", str(tmp_path))
    assert result.returncode == 1
    assert "error: nothing measured, jax sees no gpu: " in result.stderr
    assert "Traceback" not in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_gets_a_sentence():
    result = bench("--config", str(TINY), "--out", f"{TINY}/x")
    assert result.returncode == 1
    assert result.stderr.strip().endswith(
        f"Not a directory: '{TINY}/x'; give another path"
    )
    assert "Traceback" not in result.stderr


@pytest.mark.nightly
def test_a_run_on_a_cpu_measures_steps_and_processes(tmp_path):
    options = f"--device cpu --config {TINY} --rounds 1 --steps 1 --out {tmp_path}"
    result = bench(*options.split())
    assert result.returncode == 0, result.stderr
    facts = json.loads((tmp_path / "gpu.json").read_text())
    assert list(facts["seconds"]) == [PLAIN, OURS, ACCUM, UPDATE, COPY]
    assert list(facts["shared"]) == [COMPUTE, EXCHANGE, BOTH]
    assert min(*facts["seconds"].values(), *facts["shared"].values()) > 0
    assert (facts["device"], facts["tokens"], facts["peak"]) == ("cpu", 2 * 8, None)
    assert facts["compiled_bytes"] > facts["update_bytes"] > 0
    text = (tmp_path / "gpu.md").read_text()
    assert text.startswith("| cpu, tiny | ms/step |")
    assert text.strip() in result.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gpu.json", "gpu.md"]


def test_the_table_divides_by_the_plain_step_and_the_limits():
    seconds = {PLAIN: 0.1, OURS: 0.102, ACCUM: 0.11, UPDATE: 0.005, COPY: 0.002}
    result = GpuTiming(
        device="GPU",
        tokens=1000,
        flops=2e12,
        peak=1e14,
        copied_bytes=4e9,
        update_bytes=8e9,
        compiled_bytes=1e10,
        seconds=seconds,
    )
    lines = table(GpuBench(config=TINY), result, {}).splitlines()
    assert lines[2] == f"| {PLAIN} | 100.00 | 1e+04 | 20.0% | 1.000 |"
    assert lines[3] == f"| {OURS} | 102.00 | 9804 | 19.6% | 1.020 |"
    assert lines[4] == f"| {ACCUM} | 110.00 | 9091 | 18.2% | 1.100 |"
    assert lines[-1].startswith(f"{UPDATE} takes 5 ms. It must move 8 GB, and a copy")
    assert lines[-1].endswith(
        "moves 2000 GB/s: 80.0% of that limit, of at most 80% as compiled."
    )


def test_processes_that_share_are_as_fast_as_the_slowest():
    each = [dict.fromkeys((COMPUTE, EXCHANGE, BOTH), value) for value in (1.0, 2.0)]
    assert slowest(each) == each[1]


def test_what_is_hidden_is_what_both_at_once_save():
    seconds = {COMPUTE: 0.03, EXCHANGE: 0.04, BOTH: 0.05}
    assert shared_sentence(2, seconds).endswith(
        "both at once 50 ms, 1.25 of the longer: 50% of the exchange is hidden, of at "
        "most 75%."
    )


def test_each_turn_begins_with_a_step_that_does_not_count():
    calls = []
    some = {
        name: Runner(lambda name=name: calls.append(name), lambda: calls.append(""))
        for name in ("a", "b")
    }
    seconds = in_turns(some, rounds=2, steps=3, console=Console(quiet=True))
    turn = [*"aaaa", "", *"bbbb", ""]
    assert calls == ["a", "", "b", "", *turn, *turn]
    assert list(seconds) == ["a", "b"]


@pytest.mark.slow
def test_our_step_is_the_plain_step_and_that_is_optax():
    """One worker has no peer to average with."""
    config = of_workers(GpuBench(config=TINY, batch=3), 1, "complete")
    model = dataclasses.replace(tiny.config.task.model, dropout=0.0)
    task = dataclasses.replace(tiny.config.task, model=model).build()
    batch = first_batch(config, task)
    assert batch.shape == (3, 8 + 1)
    optimizer = optax.sgd(0.1, momentum=0.9)
    run = make_run(config, task=task, optimizer=optimizer)
    plain, flops = plain_step(run, batch)
    # Four matmuls of width 16 in its one block, the logits, and the attention; and the
    # backward pass of twice as many.
    assert flops == 3 * 2 * 3 * 8 * (12 * 16**2 + 256 * 16 + 2 * 8 * 16)
    ours = our_step(run, batch)
    wrapped = wrapped_step(run, batch)
    for _ in range(3):
        params, _, _ = plain.step()
        state, other_state = ours.step(), wrapped.step()

    start = run.first_state([0]).params
    wanted = jax.tree.map(lambda x: x[0], start)
    opt_state = optimizer.init(wanted)
    gradient = jax.jit(jax.grad(task.loss_fn, has_aux=True))
    for _ in range(3):
        grads, _ = gradient(wanted, (), batch, jax.random.key(1))
        updates, opt_state = optimizer.update(grads, opt_state, wanted)
        wanted = optax.apply_updates(wanted, updates)
    for stacked in (
        state.params,
        other_state.params,
        jax.tree.map(lambda x: x[None], params),
    ):
        for one, right in zip(*map(jax.tree.leaves, (stacked, wanted)), strict=True):
            np.testing.assert_allclose(one[0], right, rtol=1e-4, atol=1e-6)


@pytest.mark.nightly
def test_what_the_processes_do_is_a_step_an_exchange_and_both():
    """Here as four workers of one process, with the same examples and other dropout."""
    config = of_workers(GpuBench(config=TINY, batch=8), 4, "one_peer_exponential")
    task = config.task.build()
    optimizer = optax.sgd(0.1, momentum=0.9)
    run, after = make_run(config, task=task, optimizer=optimizer), {}
    with contextlib.ExitStack() as stack:
        shared = runners(run, stack)
        for name, runner in shared.items():
            runner.step()
            after[name] = jax.tree.leaves(runner.step().params)
            runner.finish()

    def start():
        return run.first_state(range(4))

    batch = np.stack([first_batch(config, task)] * 4)
    local = local_update(loss_fn=task.loss_fn, optimizer=optimizer)
    first = jax.tree.map(lambda x: x[:1], start())
    for name, graph, state in [
        (COMPUTE, topology.complete(1), first),
        (BOTH, topology.one_peer_exponential(4), start()),
    ]:
        train_step = simulate(local, graph)
        for t in range(2):
            state, _ = train_step(state, batch[: graph.num_workers], t)
        for ours, wanted in zip(
            after[name], jax.tree.leaves(state.params), strict=True
        ):
            np.testing.assert_allclose(ours, wanted, rtol=1e-4, atol=1e-6)
    assert any(np.ptp(x, axis=0).max() > 1e-4 for x in jax.tree.leaves(state.params))
    for ours, wanted in zip(
        after[EXCHANGE], jax.tree.leaves(start().params), strict=True
    ):
        np.testing.assert_array_equal(ours, wanted)


def test_too_little_memory_gets_a_sentence():
    out = "RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes.\nAnd much more."
    wanted = r"take a smaller --batch: RES.* 9 bytes\.$"
    with pytest.raises(ValueError, match=wanted), explained():
        raise jax.errors.JaxRuntimeError(out)
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"), explained():
        raise jax.errors.JaxRuntimeError("INTERNAL: another")


def test_the_processes_share_the_batch():
    config = of_workers(GpuBench(config=TINY, batch=9), 4, "one_peer_exponential")
    assert config.step.batch_per_worker == 2
    assert config.topology.build(config.workers).num_workers == 4
    assert of_workers(GpuBench(config=TINY), 4, "complete").step.batch_per_worker == 1


def test_the_update_moves_each_array_once():
    """Compiled for a GPU: it reads 5 arrays and writes 4, in one pass."""
    optimizer = accum_adamw(1e-4, accum_steps=4)

    def update(params, opt_state, grads):
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    model = jax.ShapeDtypeStruct((2**20,), np.float32)
    state = jax.eval_shape(optimizer.init, model)
    arguments = shapes(gpu_mesh(1, 1), (model, state, model))
    moved = overlap.read(compiled(update, *arguments)).work.num_bytes
    assert moved == pytest.approx(9 * 4 * 2**20, rel=1e-3)


@pytest.mark.slow
def test_limits_count_what_must_be_moved():
    """The moments are written once in a window of 3 steps; a copy reads and writes."""
    config = of_workers(GpuBench(config=TINY), 1, "complete")
    task = config.task.build()
    params, _ = jax.eval_shape(task.init, jax.random.key(0))
    model_bytes = sum(4 * x.size for x in jax.tree.leaves(params))
    assert config.optimizer.accum_steps == 3
    accum = accum_adamw(1e-4, accum_steps=3)
    run = make_run(config, task=task, optimizer=accum)
    _, must_move, as_compiled = update_step(run)
    assert must_move == pytest.approx((7 + 2 / 3) * model_bytes)
    assert as_compiled > must_move
    copy, num_bytes = copy_step(task)
    assert num_bytes == 2 * copy.step().nbytes == 8 * model_bytes


@pytest.mark.nightly
def test_the_pieces_are_measured_on_any_device(capsys):
    pieces.main("80000")
    found = capsys.readouterr().out
    # On a CPU it is compared with itself.
    assert found.count("GPU and CPU differ by 0.0e+00") == len(pieces.GRAPHS)
    assert float(re.search(r"mean_model: (\S+) copies", found)[1]) > 0
