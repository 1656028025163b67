"""Seconds of a step of each method, on emulated clusters."""

import functools
import itertools
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

from benches.quality.compared import ALONE, ComparedMethod
from benches.race.team import Team, measure_in
from benches.race.turns import WorkerTurn
from train.job.namespaces import EmulatedCluster, Nodes

Seconds = dict[str, dict[str, float]]
"""Seconds of a step by the name of a network, and of a method."""

WARMUP = 4  # Steps before those that are measured.


class NetworkSetting(NamedTuple):
    """A network, and whether workers are late.

    Args:
      rate: rate of each node's link.
      late: whether worker t mod N is late at step t, by the length of its compute.
    """

    rate: str
    late: bool = False

    def __str__(self) -> str:
        return f"{self.rate} with a straggler" if self.late else self.rate


def measure(
    methods: Sequence[ComparedMethod],
    settings: Sequence[NetworkSetting],
    num_nodes: int,
    rounds: int,
    steps: int,
    configs: Path,
    out: Path,
) -> Seconds:
    """Returns the median seconds of a step, by setting and method.

    The methods take turns, so that whatever slows the machine slows all of them. Each
    rate has workers of its own, as they measure at their start how to send.

    Args:
      methods: the methods; what computes alone is added.
      settings: networks.
      num_nodes: number of nodes, each with one worker.
      rounds: turns of each method in each setting.
      steps: steps of a turn, a multiple of all methods' rounds.
      configs: file of the methods' configs.
      out: folder for the workers' output.
    """
    every = [ALONE, *methods]
    found: Seconds = {}
    for rate in dict.fromkeys(x.rate for x in settings):
        cluster = EmulatedCluster(nodes=num_nodes, rate=rate)
        here = [x for x in settings if x.rate == rate]
        in_turn = functools.partial(
            _in_turn, cluster, every, here, (rounds, steps), (configs, out)
        )
        found |= measure_in(cluster, in_turn)
    return {str(x): found[str(x)] for x in settings}


def _in_turn(
    cluster: EmulatedCluster,
    methods: Sequence[ComparedMethod],
    settings: Sequence[NetworkSetting],
    turns: tuple[int, int],
    folders: tuple[Path, Path],
    nodes: Nodes,
) -> Seconds:
    """`measure`, in settings of one rate."""
    (rounds, steps), (configs, out) = turns, folders
    teams = {
        module: Team(module, configs, out, cluster, nodes)
        for module in {x.worker for x in methods}
    }
    for method in methods:
        print(f"compiling for {settings[0].rate}: {method.name}", flush=True)
        teams[method.worker].take(WorkerTurn(method, 0, WARMUP))
    alone = teams[ALONE.worker].take(WorkerTurn(ALONE, WARMUP, steps))
    seconds = {str(x): {m.name: [] for m in methods} for x in settings}
    for number, setting in itertools.product(range(rounds), settings):
        delay = alone if setting.late else 0.0
        for method in methods:
            turn = WorkerTurn(method, WARMUP, steps, delay)
            taken = teams[method.worker].take(turn)
            seconds[str(setting)][method.name].append(taken)
            print(
                f"round {number + 1} of {rounds}, {setting}, {method.name}: "
                f"{taken:.3f} s",
                flush=True,
            )
    for team in teams.values():
        team.close()
    return {
        setting: {name: median(values) for name, values in found.items()}
        for setting, found in seconds.items()
    }
