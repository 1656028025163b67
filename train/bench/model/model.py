"""The runtime model against measurements: emulated clusters, and the papers' own."""

import dataclasses
import re
from pathlib import Path
from typing import Literal

from rich.console import Console

from train.bench.model import emulated, imbalance, model_report, published, simulator
from train.bench.race.contestants import Graph, Scheme
from train.bench.race.graphs import graph_of
from train.bench.race.race import check_clusters
from train.bench.race.turns import Load
from train.job.namespaces import Cluster, parse_rate

Part = Literal["emulated", "published", "imbalance", "simulator"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelBench:
    """Predicts step times, and sets them beside what was measured.

    Args:
      parts: emulated (as root: network namespaces), published (paper 1, Fig 6),
        imbalance (paper 2), simulator (how long it takes itself).
      clusters: that are emulated, each as NODESxWORKERS_PER_NODE.
      rates: of each node's link, as for `train.emulate`.
      work: what each worker computes, beside a pause.
      pause: seconds that each worker sleeps in a step, as a host does while its
        accelerator computes.
      straggler: seconds by which worker t mod N is late at step t, in turns of its own.
      steps: measured in a turn.
      out: folder for model.json, model.md, model.svg and the workers' output.
    """

    parts: tuple[Part, ...] = ("emulated", "published", "imbalance", "simulator")
    clusters: tuple[str, ...] = ("4x1", "4x2")
    rates: tuple[str, ...] = ("100mbit", "200mbit", "400mbit")
    work: Load = dataclasses.field(
        default_factory=lambda: Load(layers=4, width=768, batch=16)
    )
    pause: float = 0.4
    straggler: float = 0.4
    steps: int = 16
    out: Path = Path("runs/model")

    def __post_init__(self):
        check_clusters(self.clusters)
        for course in courses(self):
            per_node = course.cluster.workers_per_node
            for scheme in emulated.schemes(per_node):
                if scheme != Scheme.ALL_REDUCE:
                    graph_of(Graph(scheme), course.cluster.num_workers, per_node)
        for rate in self.rates:
            if parse_rate(rate) is None:
                raise ValueError("the model needs rates, such as 200mbit")
        for name in ("pause", "straggler"):
            if not getattr(self, name) >= 0:
                raise ValueError(
                    f"{name} must be at least 0, got {getattr(self, name)}"
                )
        if self.steps < 1:
            raise ValueError(f"steps must be at least 1, got {self.steps}")


def main(bench: ModelBench) -> int:
    """Predicts, measures, says, writes and draws."""
    bench.out.mkdir(parents=True, exist_ok=True)
    console = Console(soft_wrap=True, markup=False, highlight=False)
    results = model_report.Results(
        emulated=_emulated(bench, console) if "emulated" in bench.parts else [],
        published=_published(console) if "published" in bench.parts else [],
        imbalance=imbalance.lines() if "imbalance" in bench.parts else [],
        simulator=simulator.rows() if "simulator" in bench.parts else [],
    )
    model_report.write(bench, results, console)
    return 0


def courses(bench: ModelBench) -> list[emulated.Course]:
    """Returns what is emulated, one after the other."""
    return [
        emulated.Course(
            Cluster(nodes=int(nodes), workers_per_node=int(per_node), rate=rate),
            bench.work,
            bench.pause,
            bench.straggler,
            bench.steps,
            bench.out,
        )
        for nodes, per_node in (re.findall(r"\d+", name) for name in bench.clusters)
        for rate in bench.rates
    ]


def _emulated(bench: ModelBench, console: Console) -> list[emulated.Row]:
    rows, all_courses = [], courses(bench)
    for number, course in enumerate(all_courses):
        of = f"{number + 1} of {len(all_courses)}"
        console.print(f"{course.name} at {course.cluster.rate}, {of}")
        rows += emulated.run(course)
    return rows


def _published(console: Console) -> list[published.Line]:
    lines = []
    for measured in published.PUBLISHED:
        with console.status(f"fitting {measured.name}"):
            lines += published.lines(measured)
    return lines
