"""Searches for a better schedule of a step: options of XLA, and a profile of times."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from rich.console import Console

from decentjax import AXIS, analysis
from decentjax.overlap import Accelerator, Network, StepSchedule
from decentjax.overlap.step_schedule import Op
from decentjax.topology import Topology
from train.preflight.compile import Finding, Options, Preflight
from train.xla import ALL_REDUCE_THRESHOLD, THRESHOLDS

# Bytes up to which messages are joined; with 1 byte none are.
SIZES = ("2500000", "10000000", "100000000", "1")
LIMIT = "xla_gpu_experimental_parallel_collective_overlap_limit"
CANDIDATES: list[Options] = [
    *(dict.fromkeys([*THRESHOLDS, ALL_REDUCE_THRESHOLD], size) for size in SIZES),
    {LIMIT: "2"},
    {LIMIT: "4"},
]
WORTH_A_PROFILE = 0.05  # Saved share of the step: a profile compiles twice.


class Tuning(NamedTuple):
    """The best options found.

    Args:
      options: options of XLA; those of the run if no others are better.
      needs_profile: whether a profile of times makes the step shorter still.
    """

    options: Options
    needs_profile: bool


class Trial(NamedTuple):
    """Options of XLA, and the step compiled with them."""

    options: Options
    finding: Finding

    @property
    def seconds(self) -> float:
        return self.finding.estimate.step


def tuned(preflight: Preflight, console: Console) -> Tuning:
    """Tries options on the exchange that sends most between nodes.

    Starts from the better of the run's options and none, and adds each candidate that
    makes the step shorter. Finally XLA gets the estimated times as a profile, as it
    would get measured ones with `JAX_ENABLE_PGLE=true`.
    """
    t = busiest_step(preflight.method.graph, preflight.config.workers.workers_per_node)
    speeds = preflight.target.accelerator()

    def tried(name: str, options: Options) -> Trial:
        with console.status("trying options of XLA"):
            found = preflight.find("", t, options)
        console.print(f"  {name:64}{_summary(found)}")
        return Trial(options, found)

    def profiled(name: str, trial: Trial) -> Trial:
        times = profile(trial.finding.schedule, speeds, preflight.network)
        options = {**trial.options, "fdo_profile": times}
        # Named by XLA's ops, so it fits this program alone and is not kept.
        found = tried(f"{name}, with a profile of its times", options)
        return found._replace(options=trial.options)

    configured = best = tried("as configured", preflight.options)
    for options in [{}, *CANDIDATES]:
        every = {**best.options, **options} if options else {}
        if every != best.options:
            found = tried(_short(options), every)
            # Messages that are not found in a program take no time in its estimate, so
            # such a program must not win.
            is_whole = found.finding.sends_all
            # Less than 0.1 % is no reason for another option.
            is_better = is_whole and found.seconds < 0.999 * best.seconds
            best = found if is_better else best
    shortest = profiled("as configured", configured)
    if best is not configured:  # The order of the two may differ with a profile.
        of_best = profiled("as tuned", best)
        shortest = min(shortest, of_best, key=lambda trial: trial.seconds)
    if shortest.seconds < (1 - WORTH_A_PROFILE) * best.seconds:
        return Tuning(shortest.options, needs_profile=True)
    return Tuning(best.options, needs_profile=False)


def busiest_step(topology: Topology, workers_per_node: int) -> int:
    """Returns the first step whose exchange sends most bytes from a node."""
    sent = [t.node_bytes.max() for t in analysis.traffic(topology, 1, workers_per_node)]
    return int(np.argmax(sent))


def profile(
    schedule: StepSchedule, accelerator: Accelerator, network: Network
) -> bytes:
    """Returns the estimated times of the ops as XLA's ProfiledInstructionsProto."""
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
    """Returns options as text; thresholds, which all have one value, as one."""
    if not options:
        return "none"
    joined = options.get(ALL_REDUCE_THRESHOLD)
    if joined is not None:
        return f"combine_threshold_bytes {joined}"
    return ", ".join(
        f"{name.removeprefix('xla_gpu_')} {value}" for name, value in options.items()
    )
