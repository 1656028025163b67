"""Speed, side by side: `python -m train.bench {race,gpu,step,data}`."""

import sys
from typing import Any

import tyro

from train.bench import data, gpu, race, step

BENCHES: dict[str, Any] = {
    "race": race.Race,
    "gpu": gpu.GpuBench,
    "step": step.StepBench,
    "data": data.DataBench,
}


def run() -> int:
    try:
        bench = tyro.extras.subcommand_cli_from_dict(BENCHES, prog="train.bench")
        main = {
            race.Race: _race,
            gpu.GpuBench: gpu.main,
            step.StepBench: step.main,
            data.DataBench: data.main,
        }[type(bench)]
        return main(bench)
    except (ValueError, OSError) as error:
        raise SystemExit(f"error: {error}") from error


def _race(bench: race.Race) -> int:
    try:
        return race.main(bench)
    except PermissionError as error:
        raise SystemExit(
            f"error: the race needs root, for the cluster's namespaces ({error})"
        ) from error


if __name__ == "__main__":
    sys.exit(run())
