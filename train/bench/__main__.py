"""Speed, side by side: `python -m train.bench {race,gpu,step,data}`."""

import sys
from collections.abc import Callable
from typing import Any

import tyro

from train.bench import data, gpu, race, step


def _race(bench: race.Race) -> int:
    try:
        return race.main(bench)
    except PermissionError as error:
        raise SystemExit(
            f"error: the race needs root, for the cluster's namespaces ({error})"
        ) from error


# Each with what runs it.
BENCHES: dict[str, tuple[Any, Callable[[Any], int]]] = {
    "race": (race.Race, _race),
    "gpu": (gpu.GpuBench, gpu.main),
    "step": (step.StepBench, step.main),
    "data": (data.DataBench, data.main),
}


def run() -> int:
    kinds = {name: kind for name, (kind, _) in BENCHES.items()}
    try:
        bench = tyro.extras.subcommand_cli_from_dict(kinds, prog="train.bench")
        return dict(BENCHES.values())[type(bench)](bench)
    except (ValueError, OSError) as error:
        raise SystemExit(f"error: {error}") from error


if __name__ == "__main__":
    sys.exit(run())
