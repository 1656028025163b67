"""Speed, side by side: `python -m train.bench race` and `python -m train.bench gpu`."""

import sys

import tyro

from train.bench import gpu, race


def run() -> int:
    try:
        bench = tyro.extras.subcommand_cli_from_dict(
            {"race": race.Race, "gpu": gpu.GpuBench}, prog="train.bench"
        )
        return gpu.main(bench) if isinstance(bench, gpu.GpuBench) else _race(bench)
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
