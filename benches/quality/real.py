"""Whole runs of the quality race on the emulated cluster."""

import itertools
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np

from benches.logged import run_logged
from benches.quality import late
from benches.quality.compared import ComparedMethod
from benches.quality.curves import Curve, Settings, name_of, with_values
from benches.quality.seconds import NetworkSetting
from train.config import Config
from train.job.namespaces import INTERFACE
from train.store.folder import process_folders
from train.store.log import read_metrics


def real(
    method: ComparedMethod,
    path: Path,
    setting: NetworkSetting | None,
    delay: float,
    values: Settings,
    horizon: float,
    out: Path,
) -> Curve:
    """A real run on the emulated cluster, kept in a folder.

    Args:
      method: the method.
      path: its config file.
      setting: network; None has no limit.
      delay: seconds by which worker t mod N is late at step t.
      values: values of the fields that are tuned.
      horizon: number of its steps, as a multiple of the config's.
      out: folder for the runs.

    Raises:
      SystemExit: if it fails.
    """
    config = with_values(path, values, horizon)
    where = "no limit" if setting is None else str(setting)
    name = f"{method.name}, {where}, {config.num_steps} steps, {name_of(values)}"
    folder = out / name.replace(", ", "-").replace(" ", "_")
    if not (folder / "done").exists():
        print(f"real run: {name}", flush=True)
        shutil.rmtree(folder, ignore_errors=True)  # One that was stopped.
        argv = [*_train(method, path, config, delay, values), "--run-dir", str(folder)]
        log = out / f"{folder.name}.txt"  # The name ends with a number: no suffix.
        _run(argv, config.workers.num_workers, setting, log, delay)
        (folder / "done").touch()
    own = process_folders(folder)  # Of peers each process has its rows.
    return as_curve(read_metrics(own[0] if own else folder), config.num_steps)


def as_curve(rows: list[dict[str, Any]], num_steps: int) -> Curve:
    """The curve of a run's rows, timed by its training alone."""
    timed = [(x["step"], x["steps_per_second"]) for x in rows if "loss" in x]
    steps, per_second = (np.array(column) for column in zip(*timed, strict=True))
    per_second[0] = per_second[1]  # The first row has compiled.
    seconds = np.cumsum(np.diff(steps, prepend=0) / per_second)
    scores = [(x["step"], x["mean_model"]) for x in rows if "mean_model" in x]
    at = [step for step, _ in scores]
    losses = [score["bits_per_byte"] for _, score in scores]
    return Curve(num_steps, at, losses, np.interp(at, steps, seconds).tolist())


def _train(
    method: ComparedMethod, path: Path, config: Config, delay: float, values: Settings
) -> list[str]:
    """The module and the arguments of each worker."""
    fields = {**values, "num-steps": str(config.num_steps)}
    if method.torch:
        module, options = "benches.quality.torch_run", ["--wrapper", method.torch]
        options += ["--straggler", str(delay)]
        options += ["--fields", *itertools.chain(*fields.items())]
    else:
        module, options = "train", ["--distributed.enabled"]
        for field, value in fields.items():
            options += [f"--{field}", value]
        if config.is_apart:
            options += ["--exchange.bind", INTERFACE]
        if delay:
            options += ["--on-step", f"{late.__file__}:rotating"]
    return [module, str(path), *options]


def _run(
    argv: list[str],
    num_nodes: int,
    setting: NetworkSetting | None,
    log: Path,
    delay: float,
) -> None:
    """Runs a module as the workers of an emulated cluster.

    Raises:
      SystemExit: if it fails, with the end of its output.
    """
    limit = [] if setting is None else ["--rate", setting.rate]
    python = [sys.executable, "-m", "decentjax"]
    emulate = [*python, "train.emulate", "--nodes", str(num_nodes), *limit]
    run_logged([*emulate, "--", *python, *argv], log, {late.SECONDS: str(delay)})
