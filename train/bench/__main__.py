"""Speed, side by side: `python -m train.bench {race,gpu,step,data,model}`."""

import sys
from collections.abc import Callable
from typing import Any

import tyro

from train.bench import data, gpu, model, race, step

# Each with what runs it.
BENCHES: dict[str, tuple[Any, Callable[[Any], int]]] = {
    "race": (race.Race, race.main),
    "gpu": (gpu.GpuBench, gpu.main),
    "step": (step.StepBench, step.main),
    "data": (data.DataBench, data.main),
    "model": (model.ModelBench, model.main),
}


def run() -> int:
    kinds = {name: kind for name, (kind, _) in BENCHES.items()}
    try:
        bench = tyro.extras.subcommand_cli_from_dict(kinds, prog="train.bench")
        return dict(BENCHES.values())[type(bench)](bench)
    except PermissionError as error:
        if error.filename is not None:
            raise SystemExit(f"error: {error}") from error
        raise SystemExit(
            f"error: emulated clusters need root, for their namespaces ({error})"
        ) from error
    except (ValueError, OSError) as error:
        raise SystemExit(f"error: {error}") from error


if __name__ == "__main__":
    sys.exit(run())
