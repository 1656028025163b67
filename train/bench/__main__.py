"""`python -m train.bench race`: step times on an emulated cluster, beside peers."""

import sys

import tyro

from train.bench.race import Race, main


def run() -> int:
    try:
        race = tyro.extras.subcommand_cli_from_dict({"race": Race}, prog="train.bench")
        return main(race)
    except ValueError as error:
        raise SystemExit(f"error: {error}") from error
    except PermissionError as error:
        raise SystemExit(
            f"error: the race needs root, for the cluster's namespaces ({error})"
        ) from error


if __name__ == "__main__":
    sys.exit(run())
