"""Keeps small runs of this version, for the tests of later ones, at each release.

`python -m tests.keep_runs` writes tests/runs_VERSION.tar.xz, in some minutes;
its version is added to tests/train/store/test_old_runs.py.
"""

import argparse
import contextlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from decentjax import __version__
from tests.checkout import ROOT
from train.__main__ import main

CONFIG = """
import dataclasses
from pathlib import Path
from configs.quickstart import config as quickstart
from train.cli.load import load_file
from train.config import TopologyConfig

own = load_file(Path("own.py"), "file", "own.py")
config = dataclasses.replace(quickstart, task=own.Line())
graph = dataclasses.replace(config, topology=TopologyConfig(make=own.own_ring))
"""
COMMON = """--num-steps 6 --workers.num-workers 4 --workers.workers-per-node 2
--step.batch-per-worker 2 --evaluation.every-steps 6 --checkpoint.every-steps 4
--optimizer.warmup-steps 1 --log.every-steps 1 --log.consensus-every-steps 2
--log.sinks"""
GPT = """--task.model.width 2 --task.model.num-layers 1 --task.model.num-heads 1
--task.model.context 8 --task.num-eval-windows 1 --task.sample-bytes 8"""
ROUNDS = "--method rounds --topology.name"
ALONE = {
    "gpt": f"{GPT} --topology.name complete",
    "awc": "--topology.name ring --step.num-micro-batches 2",
    "graph": "",
    "atc": "--method atc --optimizer.name accum_adam --optimizer.accum-steps 3",
    "all_reduce": "--method all_reduce --optimizer.name sgd",
    "streaming": f"{ROUNDS} complete --method.every-steps 4 --method.delay 1 "
    "--method.fragments 2 --method.outer nesterov --method.codec int8",
    "tracking": f"{ROUNDS} ring --method.every-steps 2 --method.delay 1 "
    "--method.tracking",
    "copies": f"{ROUNDS} ring --method.every-steps 1 --method.codec int4 "
    "--method.copies auto",
    "policy": "--policy thinning --policy.epoch-steps 2 --policy.degree 2",
}
PEERS = "--log.timeline --topology.name ring --exchange"
LAUNCHED = {
    "job": "--topology.name ring --topology.factor 0.5 --method atc "
    "--optimizer.name exact_diffusion",
    "peers": f"{PEERS} peers",
    "elastic": f"{PEERS} peers --exchange.elastic",
    "groups": f"{PEERS} groups --exchange.patience 20 --topology.mean-every 3 "
    "--topology.name butterfly_groups --topology.group-size 2",
    "quorum": f"{PEERS} quorum {ROUNDS} complete --method.every-steps 2 "
    "--method.outer nesterov",
}
NAMES = {"gpt": "quickstart", "graph": "config.py:graph"}


def keep(folder: Path) -> None:
    """Trains all runs in a folder."""
    shutil.copy(ROOT / "tests" / "own_line.py", folder / "own.py")
    (folder / "config.py").write_text(CONFIG)
    with contextlib.chdir(folder):
        for name, options in {**ALONE, **LAUNCHED}.items():
            config = NAMES.get(name, "config.py")
            words = [config, *COMMON.split(), *options.split(), "--run-dir", name]
            if name in ALONE:
                main(words)
            else:
                launch = [sys.executable, "-m", "train.launch", "-n", "2"]
                subprocess.run([*launch, *words], check=True)


def read_by_none(one: tarfile.TarInfo) -> tarfile.TarInfo | None:
    unread = Path(one.name).name in ("lock", "report.html", "config.py", "code")
    return None if unread else one


if __name__ == "__main__":
    argparse.ArgumentParser(
        "python -m tests.keep_runs", description=__doc__
    ).parse_args()
    kept = f"runs_{__version__}"
    with tempfile.TemporaryDirectory() as folder:
        keep(Path(folder))
        with tarfile.open(ROOT / "tests" / f"{kept}.tar.xz", "w:xz") as file:
            file.add(folder, kept, filter=read_by_none)
