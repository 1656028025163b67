"""`python -m train.bench race`: step times on an emulated cluster, beside peers."""

import sys

import tyro

from train.bench.race import Race, main

if __name__ == "__main__":
    race = tyro.extras.subcommand_cli_from_dict({"race": Race}, prog="train.bench")
    sys.exit(main(race))
