"""FSDP over the processes of a worker: it learns, also after a process was killed."""

import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.checkout import ROOT
from tests.jobs import LONG, ended, started

SCRIPT = ROOT / "examples" / "fsdp" / "fsdp_peers.py"
LINE = r"\[(\d)\] (worker (\d) of 2: loss \S+, (\d+) merges, (\d+) of (\d+) bytes here)"


def process_of(folder: Path, number: int) -> int:
    """The process id of a process of the script that runs in a folder."""
    for path in Path("/proc").glob("[0-9]*"):
        try:
            here = path.joinpath("cwd").samefile(folder)
            place = path.joinpath("environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if here and b"DECENTJAX_PROCESS_ID=%d" % number in place:
            return int(path.name)
    raise ProcessLookupError(f"no process {number} in {folder}")


@pytest.mark.slow
@pytest.mark.parametrize("per_worker", [1, 2])
def test_workers_of_several_processes_learn(per_worker, tmp_path):
    size = ["--workers", "2", "--processes-per-worker", str(per_worker)]
    command = "import os, runpy, sys; os.chdir(sys.argv.pop(1)); " + (
        "runpy.run_module('train.launch', run_name='__main__', alter_sys=True)"
    )
    launcher = [sys.executable, "-c", command, str(tmp_path), *size, "--elastic"]
    env = {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    with started(*launcher, str(SCRIPT), **env) as job:
        if per_worker > 1:
            until = time.monotonic() + LONG
            while not (tmp_path / "peers" / "worker-1").exists():
                assert time.monotonic() < until
                time.sleep(0.1)
            os.kill(process_of(tmp_path, 3), signal.SIGKILL)
        output = ended(job)
    found = re.findall(LINE, output)
    assert sorted(int(number) for number, *_ in found) == [*range(2 * per_worker)]
    assert len({text for _, text, *_ in found}) == 2  # The processes of a worker agree.
    for number, _, worker, merges, here, whole in found:
        assert int(number) // per_worker == int(worker)
        assert per_worker * int(here) < int(whole) * 1.1  # But for the vectors.
        assert int(merges) > 0 or worker == "1"
    again = "worker 1 (processes 2, 3) ended, process 3 first, killed by SIGKILL"
    assert output.count("started again") == output.count(again) == per_worker - 1
