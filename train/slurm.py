"""A job file for a cluster: `decentjax slurm CONFIG --nodes 2 --gpus 4 > job.sbatch`.

It is configs/cluster.sbatch, or with --jobset configs/jobset.yaml, filled in; for peers
configs/peers.sbatch or configs/peers.yaml.
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
from train.cli.new_run import NewRun, read_new_run
from train.cli.read import from_options
from train.config import ApartExchange, Config


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobFile:
    """Prints a job file of a run, for `sbatch` or `kubectl apply -f`.

    One process for each GPU. Options of the run follow after `--`. With an exchange
    between peers each node, or pod, starts again alone; a pod is then a worker.

    Examples: `decentjax slurm quickstart --nodes 2 --gpus 4 > job.sbatch`, and
    `decentjax slurm quickstart --gpus 4 --jobset -- --num-steps 500 > job.yaml`.

    Args:
      config: file or name of a config.
      nodes: number of nodes.
      gpus: number of GPUs of each node; 0 for one process without GPUs on each node.
      processes_per_worker: number of processes, and so of GPUs of a node, over which
        each worker shards its model.
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
    processes_per_worker: int = 1
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
        each = self.processes_per_worker
        if each < 1 or self.per_node % each:
            raise ValueError(
                "a worker is on one node, with a GPU for each process: "
                f"--processes-per-worker must divide {self.per_node}, got {each}"
            )

    @property
    def per_node(self) -> int:
        """Number of processes on a node."""
        return max(1, self.gpus)

    @property
    def num_processes(self) -> int:
        return self.nodes * self.per_node


def sbatch(job: JobFile, options: Sequence[str], python: str) -> str:
    """Returns a script for Slurm.

    Args:
      job: what it asks for.
      options: options of the run.
      python: the interpreter, on a file system that all nodes see.
    """
    config, minutes = _run(job, options).config, round(60 * job.hours)
    values = {
        "job-name": config.name,
        "gpus-per-node": job.gpus,
        "time": f"{minutes // 60:02}:{minutes % 60:02}:00",
    }
    if config.is_apart:
        file, cores = "peers.sbatch", job.cpus * job.per_node
        values |= {"array": f"0-{job.nodes - 1}", "cpus-per-task": cores}
    else:
        file, tasks = "cluster.sbatch", {"ntasks-per-node": job.per_node}
        values |= {"nodes": job.nodes, "cpus-per-task": job.cpus} | tasks
    text = _filled(_template(file, config), r"#SBATCH --{}=", values)
    of_shell = {"processes": job.per_node, "per_worker": job.processes_per_worker}
    for name, value in of_shell.items():
        text = re.sub(f"^{name}=.*", f"{name}={value}", text, flags=re.M)
    if not job.gpus:
        text = re.sub(r"#SBATCH --gpus-per-node=.*\n", "", text)
        text = re.sub(r"# Each task sees all GPUs.*\n", "", text)
    _, _, rest = text.partition("\n")
    head = f"#!/bin/bash\n# The run {config.name}: sbatch FILE [OPTION ...]\n"
    rest = rest.partition("\n")[2]
    run = shlex.join([_place(job.config), *options])
    decentjax = f"{shlex.quote(python)} -m decentjax"
    return head + rest.replace(".venv/bin/decentjax", decentjax).replace(
        '"$@"', f'{run} "$@"'
    )


def manifest(job: JobFile, options: Sequence[str]) -> str:
    """Returns a manifest for the JobSet controller.

    Args:
      job: what it asks for.
      options: options of the run.
    """
    run, each = _run(job, options), job.processes_per_worker
    config, size = run.config, job.num_processes
    # A pod of peers is a worker; in a job each process has a pod.
    count = size // each if config.is_apart else size
    # Pods are LABEL-workers-0-INDEX-abcde.
    label = _label(config.name, 63 - len(f"-workers-0-{count - 1}-abcde"))
    text = _template("peers.yaml" if config.is_apart else "jobset.yaml", config)
    text = _filled(text, r" {}: ", {"parallelism": count, "completions": count})
    text = _filled(text, r" {}: ", {"image": _quoted(job.image)})
    sizes = {"workers.num-workers": size // each}
    if config.is_apart:
        sizes |= {"places": size, "processes": each, "processes-per-worker": each}
        text = text.replace("nvidia.com/gpu: 1", f"nvidia.com/gpu: {each}")
    else:
        sizes |= {"distributed.num-processes": size}
        sizes |= {"workers.processes-per-worker": each}
    text = _filled(text, r"- --{}=", sizes)
    # By default a folder of the volume.
    folder = f"{'/' * (run.run_dir.parts[0] == 'runs')}{run.run_dir}"
    text = text.replace("/runs/quickstart", folder)
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
    arguments = re.search(rf"args:\n({indent}- .*\n)+", text)
    assert arguments
    text = text[: arguments.end()] + more + text[arguments.end() :]
    if not job.gpus:
        text = re.sub(r" +resources:\n.*\n.*nvidia.*\n", "", text)
    _, _, rest = text.partition("# The image is")
    head = (
        f"# The run {config.name} on Kubernetes, with the JobSet controller: kubectl "
        "apply -f"
    )
    return f"{head} FILE\n# The image is{rest}"


def _template(file: str, config: Config) -> str:
    """The text of a shipped file, for peers with the launcher's option that fits."""
    text = (FOLDER / file).read_text(encoding="utf-8")
    if isinstance(config.exchange, ApartExchange) and not config.exchange.elastic:
        text = text.replace("--elastic", "--max-restarts=5")
    return text


def _run(job: JobFile, options: Sequence[str]) -> NewRun:
    """The run at its size, read as by `train`, for the errors too."""
    each = job.processes_per_worker
    size = [
        *("--auto-resume", "--distributed.enabled"),
        f"--workers.num-workers={job.num_processes // each}",
        f"--workers.workers-per-node={1 if job.jobset else job.per_node // each}",
        f"--workers.processes-per-worker={each}",
    ]
    options = [*size, *options] if job.jobset else [*options, *size]
    with contextlib.redirect_stdout(sys.stderr):  # The output is the job file.
        run = read_new_run(job.config, options)
    exchange = run.config.exchange
    if isinstance(exchange, ApartExchange) and job.nodes > 1 and not job.jobset:
        _check_bind(exchange)
    return run


def _check_bind(exchange: ApartExchange) -> None:
    """Raises a ValueError for peers of several nodes that could not be reached."""
    if exchange.bind.startswith("127.") and not exchange.addresses:
        raise ValueError(
            "peers of several nodes listen at their network: after -- give "
            "--exchange.bind with the name of its interface, such as ib0 or eth0"
        )


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
    if (each := job.processes_per_worker) > 1:
        options = [f"--workers.devices-per-worker={each}", *options]
    if job.jobset:
        print(manifest(job, options), end="")
    else:
        print(sbatch(job, options, sys.executable), end="")


if __name__ == "__main__":
    main(sys.argv[1:])
