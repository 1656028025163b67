"""The checkpoints of a run: `decentjax checkpoint list|verify|export RUN`."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import numpy as np
import tyro
from safetensors import SafetensorError
from safetensors.numpy import save_file

from train.cli.command import SaveError, command
from train.cli.config_json import to_json
from train.cli.options import Trust
from train.cli.plain_console import PlainConsole
from train.cli.progress import over
from train.cli.read import from_options
from train.cli.tables import aligned, write_json
from train.config import Config
from train.data.files import check_new, new_folder
from train.data.token_files import SEPARATOR
from train.data.vocabulary import load_vocabulary
from train.models.gpt2 import write_gpt2
from train.plain_files import part_of, write_new, write_whole
from train.run.scores import Model, read_trained
from train.store.checkpoints import DamagedError, Found, find_checkpoints, verify
from train.store.fits import is_key
from train.store.folder import check_run, process_folders, writing
from train.store.manifest import MANIFEST
from train.tasks.text import TextTask

RunFolder = Annotated[Path, tyro.conf.Positional]
Facts = dict[str, str]


def show(run: RunFolder) -> int:
    """Lists the checkpoints of a run, and other folders there; reads no arrays.

    Example: `decentjax checkpoint list runs/ring`.

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
    PlainConsole().print(aligned(["step", "saved", "MB", ""], rows, title=str(run)))
    return 0


def verify_all(run: RunFolder) -> int:
    """Reads all checkpoints; exits with code 1 if a checksum does not match.

    Example: `decentjax checkpoint verify runs/ring`.

    Args:
      run: folder of the run.
    """
    rows, damaged, console = [], False, PlainConsole()
    for name, found in _of_processes(run):
        reasons: dict[Any, str] = {k: f"it {v}" for k, v in found.skipped.items()}
        for step, path in over(list(found.steps.items()), "reading", console):
            reasons[step] = "whole"
            try:
                verify(path)
            except DamagedError as error:
                reasons[step] = f"it {error}"
        damaged |= any(reason != "whole" for reason in reasons.values())
        rows += [[f"{name}{step}", reason] for step, reason in reasons.items()]
    console.print(aligned(["step", ""], rows, title=str(run)))
    return int(damaged)


def export(
    run: RunFolder,
    mean: bool = False,
    worker: int | None = None,
    step: int | None = None,
    format: Literal["safetensors", "gpt2"] = "safetensors",
    to: Path | None = None,
    trust: Trust = (),
) -> int:
    """Writes a model as safetensors.

    Example: `decentjax export runs/ring --worker 3 --to worker.safetensors`.

    Args:
      run: folder of the run.
      mean: writes the mean model, the default without `worker`.
      worker: number of the worker whose model to write instead.
      step: step of the checkpoint; by default the newest complete one.
      format: "safetensors", a file with the run's config next to it as JSON, or "gpt2",
        a folder that Hugging Face's GPT2LMHeadModel loads.
      to: NAME.safetensors, or folder; by default RUN/model.safetensors, or RUN/gpt2.
    """
    if mean and worker is not None:
        raise ValueError(f"give --mean or --worker {worker}, not both")
    default = run / {"safetensors": "model.safetensors", "gpt2": "gpt2"}[format]
    # The format's name alone is no file either.
    path = default if to is None or str(to) == format else to
    if format == "safetensors" and path.suffix != ".safetensors":
        raise ValueError(f"--to must be a file NAME.safetensors, got {path}")
    if format == "gpt2":
        check_new(path)
    trained = read_trained(run, step, trust)
    model = trained.mean() if worker is None else trained.worker(worker)
    whose = "mean" if worker is None else f"worker {worker}"
    facts = {"model": whose, "step": str(trained.step)}
    write = {"safetensors": _write_own, "gpt2": _write_gpt2}[format]
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with writing(path):
            write(path, trained.run.config, model, facts)
    except SafetensorError as error:  # No OSError, also where the disk is full.
        raise SaveError(f"{path} could not be written: {error}") from error
    count = sum(x.size for x in jax.tree.leaves(model))
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
        x = jax.random.key_data(x) if is_key(x) else x
        found[name] = np.ascontiguousarray(x).reshape(np.shape(x))
    return found


def _write_own(path: Path, config: Config, model: Model, facts: Facts) -> None:
    params, model_state = model
    arrays = named({"params": params, "model_state": model_state})
    part = part_of(path)
    write_new(part, b"")  # As `save_file` would write through a link.
    save_file(arrays, part, metadata={**facts, "format": "decentjax"})
    part.replace(path)
    write_whole(path.with_suffix(".json"), to_json(config))


def _write_gpt2(path: Path, config: Config, model: Model, facts: Facts) -> None:
    """Writes model.safetensors and config.json, and the tokenizer if there is one."""
    task, end = config.task, None
    with new_folder(path) as folder:
        vocabulary = Path(getattr(task, "data", "")) / "vocabulary.json"
        if isinstance(task, TextTask) and vocabulary.is_file():
            tokenizer = load_vocabulary(vocabulary)
            end = tokenizer.special(SEPARATOR)
            tokenizer.save(folder / "tokenizer.json")
            names = {"bos_token": SEPARATOR, "eos_token": SEPARATOR}
            kind = {"tokenizer_class": "PreTrainedTokenizerFast"}
            write_json(folder / "tokenizer_config.json", kind | names)
        write_gpt2(folder, getattr(task, "model", None), model[0], facts, end)


def _of_processes(run: Path) -> Iterator[tuple[str, Found]]:
    """The checkpoints of a run; of peers those of each process.

    Raises:
      ValueError: if there is no run.
    """
    check_run(run)
    folders = process_folders(run)
    for folder in folders or [run]:
        yield f"{folder.name}/" if folders else "", find_checkpoints(folder)


def _saved_at(path: Path) -> float:
    return (path / MANIFEST).stat().st_mtime


@command()
def main(arguments: list[str] | None = None) -> int:
    kinds = {"list": show, "verify": verify_all, "export": export}
    return from_options(
        kinds,
        read=tyro.extras.subcommand_cli_from_dict,
        prog="decentjax checkpoint",
        description="Shows what is saved of a run.\n\n"
        "Example: `decentjax checkpoint list runs/ring`.",
        args=arguments,
        config=(tyro.conf.FlagCreatePairsOff,),
    )


if __name__ == "__main__":
    raise SystemExit(main())
