"""What is saved of a run: `python -m train.checkpoint list|verify|export RUN`."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import jax
import numpy as np
import tyro
from rich.console import Console
from rich.progress import track
from safetensors.numpy import save_file

from train.cli.command import command
from train.cli.config_json import to_json
from train.cli.tables import aligned, write_whole
from train.run.checkpoint import Found, find_checkpoints, verify
from train.run.folder import process_folders, writing
from train.run.manifest import MANIFEST
from train.run.scores import read_trained

RunFolder = Annotated[Path, tyro.conf.Positional]


def show(run: RunFolder) -> int:
    """Lists the checkpoints of a run, and what is none; reads no arrays.

    Args:
      run: folder of the run.
    """
    rows = []
    for name, found in _of_processes(run):
        for step, path in found.steps.items():
            files = [one.stat() for one in path.rglob("*") if one.is_file()]
            at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(_saved_at(path)))
            size = f"{sum(one.st_size for one in files) / 1e6:,.3f}"
            rows.append([f"{name}{step}", at, size, ""])
        for stray, reason in found.skipped.items():
            rows.append([f"{name}{stray}", "", "", f"no checkpoint: it {reason}"])
    Console().print(aligned(["step", "saved", "MB", ""], rows, title=str(run)))
    return 0


def verify_all(run: RunFolder) -> int:
    """Reads all files of all checkpoints; code 1 if one is not as it was written.

    Args:
      run: folder of the run.
    """
    rows, damaged = [], False
    for name, found in _of_processes(run):
        reasons: dict[Any, str] = {k: f"it {v}" for k, v in found.skipped.items()}
        for step, path in track(found.steps.items(), "reading", transient=True):
            reasons[step] = "whole"
            try:
                verify(path)
            except ValueError as error:
                reasons[step] = f"it {error}"
        damaged |= any(reason != "whole" for reason in reasons.values())
        rows += [[f"{name}{step}", reason] for step, reason in reasons.items()]
    Console().print(aligned(["step", ""], rows, title=str(run)))
    return int(damaged)


def export(
    run: RunFolder,
    worker: int | None = None,
    step: int | None = None,
    to: Path | None = None,
) -> int:
    """Writes a model as safetensors, with the run's config beside it as JSON.

    Args:
      run: folder of the run.
      worker: number of the worker whose model it is; by default the mean model.
      step: step of the checkpoint; by default the newest that is whole.
      to: file to write; by default RUN/model.safetensors.
    """
    path = to or run / "model.safetensors"
    if path.suffix != ".safetensors":
        raise ValueError(f"--to must be a file NAME.safetensors, got {path}")
    trained = read_trained(run, step)
    params, model_state = trained.mean() if worker is None else trained.worker(worker)
    arrays = named({"params": params, "model_state": model_state})
    whose = "mean" if worker is None else f"worker {worker}"
    facts = {"format": "decentjax", "model": whose, "step": str(trained.step)}
    path.parent.mkdir(parents=True, exist_ok=True)
    with writing(path):
        save_file(arrays, part := path.with_name(f".{path.name}.part"), metadata=facts)
        part.replace(path)
    write_whole(path.with_suffix(".json"), to_json(trained.config))
    count = sum(x.size for x in arrays.values())
    print(f"{path}: {whose} of step {trained.step}, {count:,} numbers")
    return 0


def named(model: Any) -> dict[str, np.ndarray]:
    """The arrays of a model by their names, such as params.dense.kernel.

    Raises:
      ValueError: if two have one name.
    """
    found: dict[str, np.ndarray] = {}
    for path, x in jax.tree.leaves_with_path(model):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        if name in found:
            raise ValueError(f"two arrays of the model would be named {name}")
        found[name] = np.ascontiguousarray(x).reshape(np.shape(x))
    return found


def _of_processes(run: Path) -> Iterator[tuple[str, Found]]:
    """The checkpoints of a run; of peers those of each process.

    Raises:
      ValueError: if there is no run.
    """
    if not (run / "config.json").exists():
        raise ValueError(f"{run} holds no run: it has no config.json")
    folders = process_folders(run)
    for folder in folders or [run]:
        yield f"{folder.name}/" if folders else "", find_checkpoints(folder)


def _saved_at(path: Path) -> float:
    return (path / MANIFEST).stat().st_mtime


@command()
def main(arguments: list[str] | None = None) -> int:
    kinds = {"list": show, "verify": verify_all, "export": export}
    return tyro.extras.subcommand_cli_from_dict(
        kinds, prog="python -m train.checkpoint", args=arguments
    )


if __name__ == "__main__":
    raise SystemExit(main())
