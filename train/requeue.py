"""A command of a cluster's job, which a requested stop does not end.

`decentjax requeue [--max-restarts K] srun ...`, as configs/cluster.sbatch has it.
"""

import argparse
import os
import signal
import subprocess
import sys

from train.cli.command import command
from train.job.processes import Process, run_job

EPILOG = """\
A failure starts COMMAND again, at once and then after 1, 2, 4, ... up to 60 s, at most
K times without a newer checkpoint. SIGUSR1, which Slurm sends ahead of a time limit,
stops it and queues the job again; after another signal the code is 128 + its number, by
which Kubernetes replaces the pod.

Example: decentjax requeue srun decentjax train configs/NAME.py --auto-resume
"""


@command()
def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="decentjax requeue",
        description=(__doc__ or "").partition("\n")[0],
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--max-restarts", type=int, default=5, metavar="K")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="COMMAND ...")
    options = parser.parse_args(arguments)
    if not options.command:
        parser.error("give the command to run")
    name = os.path.basename(options.command[0])
    process = Process(name, options.command, {})
    ended = run_job(lambda: [process], max_restarts=options.max_restarts)
    if ended.asked == signal.SIGUSR1 and (job := os.environ.get("SLURM_JOB_ID")):
        subprocess.run(["scontrol", "requeue", job], check=True)
    elif ended.asked and not ended.code:
        return 128 + ended.asked
    return ended.code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
