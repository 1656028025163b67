"""A job file for a cluster: `decentjax slurm CONFIG --nodes 2 --gpus 4 > job.sbatch`.

It is configs/cluster.sbatch, or with --jobset configs/jobset.yaml, filled in.
"""

import contextlib
import dataclasses
import hashlib
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import tyro

from train.cli.command import command
from train.cli.families import FOLDER
from train.cli.new_run import read_new_run
from train.cli.read import from_options
from train.config import Config


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobFile:
    """Prints a job file of a run, for `sbatch` or `kubectl apply -f`.

    One process for each GPU. Options of the run follow after `--`.

    Examples: `decentjax slurm quickstart --nodes 2 --gpus 4 > job.sbatch`, and
    `decentjax slurm quickstart --gpus 4 --jobset -- --num-steps 500 > job.yaml`.

    Args:
      config: file or name of a config.
      nodes: number of nodes.
      gpus: number of GPUs of each node; 0 for one process without GPUs on each node.
      cpus: number of CPU cores of each process, for Slurm.
      hours: longest time of a job, in hours; it is queued again until the run ends; for
        Slurm.
      jobset: whether to print a manifest for Kubernetes, in which each pod has a
        process and counts as a node.
      image: image of the pods, which has the config's file where this names it.
    """

    config: Annotated[Path, tyro.conf.Positional]
    nodes: int = 1
    gpus: int = 8
    cpus: int = 8
    hours: float = 24.0
    jobset: bool = False
    image: str = "decentjax:latest"

    def __post_init__(self):
        counts = self.nodes, self.gpus + 1, self.cpus
        if not all(count > 0 for count in counts) or not 0.1 <= self.hours <= 8760:
            raise ValueError(
                "a job needs at least one node, one core and 0.1 to 8760 hours, got "
                f"nodes = {self.nodes}, gpus = {self.gpus}, cpus = {self.cpus}, "
                f"hours = {self.hours:g}"
            )

    @property
    def per_node(self) -> int:
        """Number of processes on a node."""
        return max(1, self.gpus)


def sbatch(job: JobFile, options: Sequence[str], python: str) -> str:
    """Returns a script for Slurm.

    Args:
      job: what it asks for.
      options: options of the run.
      python: the interpreter, on a file system that all nodes see.
    """
    minutes = round(60 * job.hours)
    name = _config(job, options).name
    values = {
        "job-name": name,
        "nodes": job.nodes,
        "ntasks-per-node": job.per_node,
        "gpus-per-node": job.gpus,
        "cpus-per-task": job.cpus,
        "time": f"{minutes // 60:02}:{minutes % 60:02}:00",
    }
    text = _filled(
        (FOLDER / "cluster.sbatch").read_text(encoding="utf-8"),
        r"#SBATCH --{}=",
        values,
    )
    if not job.gpus:
        text = re.sub(r"#SBATCH --gpus-per-node=.*\n", "", text)
        text = re.sub(r"# Each task sees all GPUs.*\n", "", text)
    _, _, rest = text.partition("\n")
    head = f"#!/bin/bash\n# The run {name}: sbatch FILE [OPTION ...]\n"
    rest = rest.partition("\n")[2]
    run = shlex.join([_place(job.config), *options])
    decentjax = f"{shlex.quote(python)} -m decentjax"
    return head + rest.replace(".venv/bin/decentjax", decentjax).replace(
        'train "$@"', f'train {run} "$@"'
    )


def manifest(job: JobFile, options: Sequence[str]) -> str:
    """Returns a manifest for the JobSet controller.

    Args:
      job: what it asks for.
      options: options of the run.
    """
    name, count = _config(job, options).name, job.nodes * job.per_node
    # Pods are LABEL-workers-0-INDEX-abcde.
    label = _label(name, 63 - len(f"-workers-0-{count - 1}-abcde"))
    text = (FOLDER / "jobset.yaml").read_text(encoding="utf-8")
    text = _filled(text, r" {}: ", {"parallelism": count, "completions": count})
    text = _filled(text, r" {}: ", {"image": _quoted(job.image)})
    text = _filled(
        text,
        r"- --{}=",
        {
            "run-dir": f"/runs/{name}",
            "workers.num-workers": count,
            "distributed.num-processes": count,
        },
    )
    first = rf"{label}-workers-0-0.{label}:5000"
    text = text.replace("decentjax-workers-0-0.decentjax:5000", first)
    text = text.replace("  name: decentjax\n", f"  name: {_quoted(label)}\n")
    text = text.replace("subdomain: decentjax\n", f"subdomain: {_quoted(label)}\n")
    indent = " " * 20
    text = text.replace(
        f"{indent}- quickstart\n", f"{indent}- {_quoted(str(job.config))}\n"
    )
    # Last, so that they count.
    more = "".join(f"{indent}- {_quoted(option)}\n" for option in options)
    last = f"{indent}- --distributed.process-id=$(JOB_COMPLETION_INDEX)\n"
    text = text.replace(last, last + more)
    if not job.gpus:
        text = re.sub(r" +resources:\n.*\n.*nvidia.*\n", "", text)
    _, _, rest = text.partition("# The image is")
    head = (
        f"# The run {name} on Kubernetes, with the JobSet controller: kubectl apply -f"
    )
    return f"{head} FILE\n# The image is{rest}"


def _config(job: JobFile, options: Sequence[str]) -> Config:
    """The config of the run at its size, read as by `train`, for the errors too."""
    size = [
        *("--auto-resume", "--distributed.enabled"),
        f"--workers.num-workers={job.nodes * job.per_node}",
        f"--workers.workers-per-node={1 if job.jobset else job.per_node}",
    ]
    options = [*size, *options] if job.jobset else [*options, *size]
    with contextlib.redirect_stdout(sys.stderr):  # The output is the job file.
        return read_new_run(job.config, options).config


def _label(name: str, most: int) -> str:
    """A name for Kubernetes: letters, digits and hyphens, of which a letter is first.

    Args:
      name: name of the run.
      most: greatest number of characters.
    """
    label = re.sub("[^a-z0-9]+", "-", name.lower()).strip("-")
    if not label[:1].isalpha():
        label = f"run-{label}".strip("-")
    if name.isascii() and len(label) <= most:
        return label
    # Names that have lost letters stay different.
    digest = hashlib.sha256(name.encode()).hexdigest()[:6]
    return f"{label[: most - 7].rstrip('-')}-{digest}"


def _filled(text: str, form: str, values: Mapping[str, object]) -> str:
    """The text with each value in place of the one that follows its name."""
    for name, value in values.items():
        pattern = form.format(re.escape(name))
        text, count = re.subn(
            rf"({pattern}).*", lambda x, value=value: f"{x[1]}{value}", text
        )
        assert count == 1, name
    return text


def _place(config: Path) -> str:
    """The file of a config wherever the job starts, or its name."""
    return str(config.absolute()) if config.suffix else str(config)


def _quoted(option: str) -> str:
    """As a string of YAML."""
    return "'" + option.replace("'", "''") + "'"


@command()
def main(arguments: list[str]) -> None:
    own, options = arguments, []
    if "--" in arguments:
        at = arguments.index("--")
        own, options = arguments[:at], arguments[at + 1 :]
    job = from_options(JobFile, args=own, prog="decentjax slurm")
    if job.jobset:
        print(manifest(job, options), end="")
    else:
        print(sbatch(job, options, sys.executable), end="")


if __name__ == "__main__":
    main(sys.argv[1:])
