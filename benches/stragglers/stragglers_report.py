"""The tables, bars and timelines of step times beside late workers."""

from statistics import fmean
from typing import Any, NamedTuple

from benches.race.contestants import Contestant, Scheme
from benches.race.race_figure import Bar
from benches.race.race_report import Timing, colour
from benches.race.turns import Late, StepTime, WorkerTurn
from train.cli.tables import markdown
from train.store.timeline import ActivitySpan

COMPUTE = Contestant(Scheme.COMPUTE)  # Nobody to wait for: the limit of the others.
ALL_REDUCE = Contestant(Scheme.ALL_REDUCE)


class Delayed(NamedTuple):
    """What was measured with one kind of delay.

    Args:
      turn: turn of each method, with its delays.
      predicted: seconds of a step of each method, predicted before the measurement.
      rounds: measured steps of each worker, [N][T], by method, for each round.
    """

    turn: WorkerTurn
    predicted: dict[Contestant, float]
    rounds: list[dict[Contestant, list[list[StepTime]]]]

    @property
    def timings(self) -> list[Timing]:
        """The methods' step times, over the workers that count."""
        workers = counted(self.turn)
        return [
            Timing(method, [_mean_seconds(x[method][workers]) for x in self.rounds])
            for method in self.predicted
        ]

    def facts(self) -> dict[str, Any]:
        """Returns what the JSON file says."""
        return {
            "late": self.turn.late,
            "delay": self.turn.straggler,
            "methods": [
                {
                    "name": str(x.contestant),
                    "rounds": x.rounds,
                    "predicted": self.predicted[x.contestant],
                }
                for x in self.timings
            ],
        }


def counted(turn: WorkerTurn) -> slice:
    """Returns the workers whose steps count: beside a slow worker the others."""
    return slice(1 if turn.late == Late.ALWAYS else 0, None)


def table(name: str, kinds: list[Delayed]) -> str:
    """Returns Markdown: the step times on one cluster.

    Args:
      name: name of the cluster.
      kinds: measurements, for each kind of delay.
    """
    rows = []
    for delayed in kinds:
        seconds = {x.contestant: x.seconds for x in delayed.timings}
        for timing in delayed.timings:
            own, predicted = timing.seconds, delayed.predicted[timing.contestant]
            # The same graph, by a step that waits for its neighbours.
            waiting = timing.contestant._replace(scheme=Scheme.BACKGROUND)
            rows.append(
                [
                    f"{delayed.turn.late}, {delayed.turn.straggler:.2f} s",
                    timing.contestant,
                    f"{own:.3f} ({min(timing.rounds):.3f} to {max(timing.rounds):.3f})",
                    f"{own / seconds[COMPUTE]:.2f}",
                    f"{predicted / delayed.predicted[COMPUTE]:.2f}",
                    f"{seconds[ALL_REDUCE] / own:.2f}",
                    f"{seconds[waiting] / own:.2f}" if waiting in seconds else "",
                ]
            )
    head = [
        "late, by",
        name,
        "s/step (of the rounds)",
        "/ limit",
        "predicted / limit",
        "all-reduce / this",
        "waiting for peers / this",
    ]
    return markdown(head, rows)


def bars(delayed: Delayed) -> list[Bar]:
    """Returns the bars of one kind of delay; the limit is compute alone."""
    seconds = {x.contestant: x.seconds for x in delayed.timings}
    return [
        Bar(
            str(timing.contestant),
            timing.seconds,
            (min(timing.rounds), max(timing.rounds)),
            seconds[COMPUTE],
            colour(timing.contestant),
        )
        for timing in delayed.timings
    ]


def spans(times: list[list[StepTime]]) -> list[ActivitySpan]:
    """Returns what each worker did, for a timeline.

    Args:
      times: steps of each worker, [N][T].
    """
    return [
        ActivitySpan(worker, activity, step, start, end)
        for worker, steps in enumerate(times)
        for step, (begun, delay, awake, done) in enumerate(steps)
        for activity, start, end in (
            ("delay", begun, begun + delay),
            ("compute", begun + delay, awake),
            ("wait", awake, done),
        )
        if end > start
    ]


def _mean_seconds(times: list[list[StepTime]]) -> float:
    return fmean(x.seconds for steps in times for x in steps)
