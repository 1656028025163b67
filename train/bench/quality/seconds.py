"""Seconds of a step of each method, on an emulated cluster whose links change."""

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

from train.bench.quality.methods import ALONE, Method
from train.bench.race.team import Team, measure_in
from train.bench.race.turns import Turn
from train.job.namespaces import EmulatedCluster, Nodes

Seconds = dict[str, dict[str, float]]
"""Seconds of a step by the name of a network, and of a method."""

WARMUP = 4  # Steps before those that are measured.


class Setting(NamedTuple):
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
    methods: Sequence[Method],
    settings: Sequence[Setting],
    num_nodes: int,
    rounds: int,
    steps: int,
    configs: Path,
    out: Path,
) -> Seconds:
    """Returns the median seconds of a step, by setting and method.

    The methods take turns, so that whatever slows the machine slows all of them.

    Args:
      methods: the methods; what computes alone is added.
      settings: networks.
      num_nodes: number of nodes, each with one worker.
      rounds: turns of each method in each setting.
      steps: steps of a turn, a multiple of all methods' rounds.
      configs: folder of the methods' configs.
      out: folder for the workers' output.
    """
    cluster = EmulatedCluster(nodes=num_nodes, rate=settings[0].rate)
    every = [ALONE, *methods]

    def in_turn(nodes: Nodes) -> Seconds:
        teams = {
            module: Team(module, configs, out, cluster, nodes)
            for module in {x.worker for x in every}
        }
        # The first turn compiles, and measures how messages are sent best: on a link
        # that is slow beside the calls, but not so slow that it takes long.
        nodes.set_rate(settings[(len(settings) - 1) // 3].rate)
        for method in every:
            print(f"compiling: {method.name}", flush=True)
            teams[method.worker].take(Turn(method, 0, WARMUP))
        alone = teams[ALONE.worker].take(Turn(ALONE, WARMUP, steps))
        seconds = {str(x): {m.name: [] for m in every} for x in settings}
        for number in range(rounds):
            for setting in settings:
                nodes.set_rate(setting.rate)
                delay = alone if setting.late else 0.0
                for method in every:
                    turn = Turn(method, WARMUP, steps, delay)
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

    return measure_in(cluster, in_turn)
