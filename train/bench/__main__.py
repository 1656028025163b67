"""Speed, side by side: `python -m train.bench race` and `python -m train.bench gpu`."""

import sys

import tyro

from train.bench import gpu, race


def run() -> int:
    try:
        bench = tyro.extras.subcommand_cli_from_dict(
            {"race": race.Race, "gpu": gpu.GpuBench}, prog="train.bench"
        )
        if isinstance(bench, gpu.GpuBench):
            return gpu.main(bench)
        return race.main(bench)
    except ValueError as error:
        raise SystemExit(f"error: {error}") from error
    except PermissionError as error:
        raise SystemExit(
            f"error: the race needs root, for the cluster's namespaces ({error})"
        ) from error


if __name__ == "__main__":
    sys.exit(run())
