"""What a run is: shown when it starts, and kept in run.json for sinks and reports."""

import dataclasses
import math
import os
import reprlib
import shlex
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from decentjax import AXIS, WorkerState
from train.cli.config_json import sources
from train.cli.tables import counted, write_json
from train.cli.times import now
from train.fields import fits, words
from train.job.provenance import commits, own_files, provenance_of
from train.plain_files import read_object
from train.run.nonfinite import build_local
from train.run.setup import Run
from train.targets import peak_flops

FACTS = "run.json"
# What the facts are, where there are any; a number that is not finite is null.
FORMS: dict[str, Any] = {
    **dict.fromkeys(("id", "began", "command", "algorithm", "topology"), str),
    **dict.fromkeys(("exchange", "devices", "headline", "amount"), str),
    **dict.fromkeys(("parameters", "workers", "nodes", "processes"), float),
    "training_examples": float | None,
    "versions": dict[str, str],
    **dict.fromkeys(("units", "sources", "commits"), dict[str, str]),
    "graph": str,
    "sinks": list[str],
    "results": dict[str, Any],
}
RESULTS: dict[str, Any] = {
    "baselines": dict[str, float | None],
    "test": dict[str, float | None],
    "sample": str,
}
SHOWN_VERSIONS = "decentjax", "jax", "Python"
LONG_NAMES = {"awc": "adapt while communicating", "atc": "adapt then combine"}


def describe(run: Run, state: WorkerState) -> dict[str, Any]:
    """Returns the facts of a run that starts here.

    Args:
      run: the run.
      state: stacked state of the workers.
    """
    config, task, mesh = run.config, run.task, run.mesh
    leaves = jax.tree.leaves(state.params)
    devices = [jax.devices()[0]] if mesh is None else list(mesh.devices.flat)
    workers = config.workers
    return {
        "id": uuid.uuid4().hex[:12],
        "began": now(),
        "command": command_line(sys.argv),
        "parameters": sum(math.prod(x.shape[1:]) for x in leaves),
        "workers": workers.num_workers,
        "nodes": workers.num_workers // workers.workers_per_node,
        "processes": run.place.num_processes,
        "algorithm": run.method.name,
        "topology": _graph(run),
        "exchange": run.place.phrase(run.is_in_thread),
        "devices": f"{len(devices)} x {devices[0].device_kind}",
        "training_examples": None if task.num_examples is None else task.num_examples(),
        **provenance_of(config)._asdict(),
        "commits": commits(own_files(config)),
        "headline": task.headline.name,
        "units": dict(task.units),
        "amount": task.amount.unit,
    }


def write_facts(
    run_dir: Path,
    facts: dict[str, Any],
    sinks: Sequence[str] = (),
    goes_back: bool = False,
) -> tuple[dict[str, Any], list[str]]:
    """Writes run.json; a run that resumes keeps its id, date and command.

    One that goes back behind what its sinks have has a new id, as sinks forget nothing.

    Args:
      run_dir: folder of the run.
      facts: facts of a run that starts here.
      sinks: names of its sinks.
      goes_back: whether it has rows of steps that it does again.

    Returns:
      What is written, and the sinks that have no row yet under that id.
    """
    before = read_facts(run_dir)
    # Of earlier versions, which do not tell, all have.
    known = set() if goes_back else set(before.get("sinks", sinks if before else ()))
    kept = {x: before[x] for x in ("id", "began", "command") if x in before}
    if goes_back and "id" in kept:
        name, _, number = kept["id"].partition("-")
        times = int(number) if number.isdecimal() and len(number) < 9 else 1
        kept["id"] = f"{name}-{times + 1}"
    facts = facts | kept | {"sinks": sorted(known | set(sinks))}
    write_json(run_dir / FACTS, facts)
    return facts, [name for name in sinks if name not in known]


def add_results(run_dir: Path, **results: Any) -> None:
    """Adds results, such as scores or the sample, to run.json."""
    facts = read_facts(run_dir)
    facts["results"] = facts.get("results", {}) | results
    write_json(run_dir / FACTS, facts)


def read_facts(run_dir: Path) -> dict[str, Any]:
    """Returns the facts of a run; none of one from before there were any.

    Raises:
      ValueError: if one is of another form than `FORMS`.
    """
    path = run_dir / FACTS
    facts = read_object(path) if path.exists() else {}
    _check(path, facts, FORMS)
    _check(path, facts.get("results", {}), RESULTS)
    return facts


def _check(path: Path, facts: dict[str, Any], forms: dict[str, Any]) -> None:
    for name in forms.keys() & facts.keys():
        if not fits(facts[name], forms[name]):
            said = f"must be {words(forms[name])}, got {reprlib.repr(facts[name])}"
            raise ValueError(f"{path}: {name} {said}")


def header(facts: dict[str, Any], run_dir: Path) -> str:
    """Returns the lines that are shown when a run starts."""
    examples, versions = facts["training_examples"], facts["versions"]
    data = "" if examples is None else f"{counted(examples, 'training example')}; "
    processes = "" if facts["processes"] == 1 else f", {facts['processes']} processes"
    order = facts["algorithm"]
    if order in LONG_NAMES:
        order = f"{order} ({LONG_NAMES[order]})"
    if order != "all_reduce":  # It has no topology.
        order = f"{order} over {facts['topology']}"
    return (
        f"{counted(facts['parameters'], 'parameter')}, "
        f"{counted(facts['workers'], 'worker')} on {counted(facts['nodes'], 'node')}"
        f"{processes}; {order}, {facts['exchange']}\n"
        f"{data}{facts['devices']}; "
        f"{', '.join(f'{x} {versions[x]}' for x in SHOWN_VERSIONS)}; "
        f"folder {run_dir}"
    )


def command_line(argv: list[str]) -> str:
    """Returns the command of this process as a user types it."""
    if launched := os.environ.get("DECENTJAX_COMMAND"):
        return launched
    program, *rest = argv
    words = ["python", program]
    if Path(program).parts[-2:] == ("train", "__main__.py"):
        words = ["decentjax", "resume" if rest[:1] == ["--resume"] else "train"]
        rest = rest[1:] if rest[:1] == ["--resume"] else rest
    return shlex.join([*words, *rest])


def resume_line(run: Run) -> str:
    """Returns the command that resumes a run, as a user types it."""
    count, each = run.place.count, run.config.workers.processes_per_worker
    is_launched = count * each > 1 and "DECENTJAX_COMMAND" in os.environ
    start = ["launch", "-n", str(count)]
    if each > 1:
        many = run.config.workers.num_workers
        start = ["launch", "--workers", str(many), "--processes-per-worker", str(each)]
    words = ["decentjax", *start * is_launched, "resume"]
    files = dict.fromkeys(sources(run.config))
    trust = [x for one in files for x in ("--trust", one)]
    return shlex.join([*words, str(run.place.run_dir), *trust])


def peak_seconds(run: Run, state: WorkerState) -> float | None:
    """Returns the seconds of a step at the devices' peak; None where that is unknown.

    Divided by the seconds of a step they are the share of the peak (MFU).
    """
    peak = peak_flops(jax.devices()[0].device_kind)
    if peak is None:
        return None
    flops, mesh = worker_flops(run, state), run.mesh
    if flops is None:
        return None
    num_devices = 1 if mesh is None else mesh.size
    workers = run.config.workers.num_workers if mesh is None else mesh.shape[AXIS]
    return workers * flops / peak / num_devices


def worker_flops(run: Run, state: WorkerState) -> float | None:
    """Returns the FLOPs of a worker's local update, as XLA's cost analysis counts them.

    It counts a loop once, so the micro-batches are taken as one batch; kernels of
    cuDNN, such as fused attention, count as nothing. None where jax has no CPU device
    to analyse it with.
    """
    step, task = run.config.step, run.task
    whole = dataclasses.replace(step, num_micro_batches=1)
    local = build_local(whole, task.loss_fn, run.optimizer)
    one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), state)
    batch = task.batch_shape(step.batch_per_worker)
    try:
        # A GPU's client analyses compiled programs alone, and compiling would take as
        # long again as the step itself.
        cpu = jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        return None
    with jax.default_device(cpu):
        costs = jax.jit(local).lower(one, batch, one.params).cost_analysis()
    assert costs is not None
    return float(costs["flops"])


def _graph(run: Run) -> str:
    """What the workers average over."""
    is_chosen = run.method.policy is not None
    return f"{'the graphs of the policy ' * is_chosen}{run.method.graph.name}"
