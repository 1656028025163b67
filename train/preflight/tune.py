"""Tries what makes XLA schedule a step better: options, and a profile of times."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from rich.console import Console

from decentjax import AXIS, analysis
from decentjax.overlap import Accelerator, Network, Op, Schedule
from decentjax.topology import Topology
from train.preflight.compile import Finding, Options, Preflight
from train.xla import ALL_REDUCE_THRESHOLD, THRESHOLDS

SIZES = ("2500000", "10000000", "100000000", "1")
LIMIT = "xla_gpu_experimental_parallel_collective_overlap_limit"
CANDIDATES: list[Options] = [
    *(dict.fromkeys([*THRESHOLDS, ALL_REDUCE_THRESHOLD], size) for size in SIZES),
    {LIMIT: "2"},
    {LIMIT: "4"},
]
# Of the step; a profile costs a second compilation.
WORTH_A_PROFILE = 0.05


class Tuning(NamedTuple):
    """What was found to make a step shorter.

    Args:
      options: of XLA, those of the run where no others are better.
      needs_profile: whether times for XLA to plan with would shorten it further.
    """

    options: Options
    needs_profile: bool


class Trial(NamedTuple):
    """Options of XLA, and what they make of the step."""

    options: Options
    finding: Finding

    @property
    def seconds(self) -> float:
        return self.finding.estimate.step


def tuned(preflight: Preflight, console: Console) -> Tuning:
    """Tries options on the exchange that sends most between nodes.

    Begins with those of the run and with none, and adds to the better of them each that
    shortens the step. Last, XLA is told the times that were estimated, as it would be
    told measured ones with `JAX_ENABLE_PGLE=true`.
    """
    step, topology = preflight.step()
    t = busiest_step(topology, preflight.config.workers.workers_per_node)
    speeds = preflight.target.accelerator()

    def tried(name: str, options: Options) -> Trial:
        with console.status("trying options of XLA"):
            found = preflight.find("", step, topology, t, options)
        console.print(f"  {name:64}{_summary(found)}")
        return Trial(options, found)

    def profiled(name: str, trial: Trial) -> Trial:
        times = profile(trial.finding.schedule, speeds, preflight.network)
        options = {**trial.options, "fdo_profile": times}
        found = tried(f"{name}, with a profile of its times", options)
        return found._replace(options=trial.options)

    configured = best = tried("as configured", preflight.options)
    for options in [{}, *CANDIDATES]:
        every = {**best.options, **options} if options else {}
        if every != best.options:
            found = tried(_short(options), every)
            # What is not found in a program takes no time in its estimate.
            is_whole = found.finding.sends_all
            is_better = is_whole and found.seconds < 0.999 * best.seconds
            best = found if is_better else best
    shortest = profiled("as configured", configured)
    if best is not configured:  # With a profile others may be better than without.
        of_best = profiled("as tuned", best)
        shortest = min(shortest, of_best, key=lambda trial: trial.seconds)
    if shortest.seconds < (1 - WORTH_A_PROFILE) * best.seconds:
        return Tuning(shortest.options, needs_profile=True)
    return Tuning(best.options, needs_profile=False)


def busiest_step(topology: Topology, workers_per_node: int) -> int:
    """The first step whose exchange sends most from a node."""
    sent = [t.node_bytes.max() for t in analysis.traffic(topology, 1, workers_per_node)]
    return int(np.argmax(sent))


def profile(schedule: Schedule, accelerator: Accelerator, network: Network) -> bytes:
    """The estimated times of a step's ops, as XLA's `ProfiledInstructionsProto`."""
    seconds = {op.name: accelerator.seconds(op.work) for op in _all(schedule.ops)}
    for collective in schedule.collectives:
        seconds[collective.name] = network.seconds(collective)
    return "".join(
        f'costs {{ name: "{name}" cost_us: {1e6 * time:.3f} }}\n'
        for name, time in seconds.items()
    ).encode()


def _all(ops: tuple[Op, ...]) -> Iterator[Op]:
    for op in ops:
        yield op
        for body in op.bodies:
            yield from _all(body)


def _summary(finding: Finding) -> str:
    estimate = finding.estimate
    return (
        f"{finding.schedule.covered(AXIS):7.1%} covered, "
        f"{1e3 * estimate.exposed:8.3g} ms exposed, step {1e3 * estimate.step:.3g} ms"
    )


def _short(options: Options) -> str:
    """Of thresholds, which are all the same, one."""
    if not options:
        return "none"
    joined = options.get(ALL_REDUCE_THRESHOLD)
    if joined is not None:
        return f"combine_threshold_bytes {joined}"
    return ", ".join(
        f"{name.removeprefix('xla_gpu_')} {value}" for name, value in options.items()
    )
