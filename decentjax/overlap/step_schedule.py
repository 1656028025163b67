"""The schedule of a compiled step: its collectives, and what runs beside each."""

import dataclasses
import itertools

from decentjax.overlap.flops import NOTHING, Work


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of a step, and what runs beside it.

    Args:
      name: name in the program.
      kind: opcode in HLO, such as "collective-permute".
      axes: mesh axes along which it sends.
      groups: pairs (sender, receiver) of a permute, else the members of each group.
      num_bytes: bytes of the whole array on one device, before a scatter or after a
        gather.
      calls: number of calls per step: trips of its loop, 1/B in one of B branches.
      start: index in the schedule of its computation.
      end: index of the op that waits for it; that of its start if it is not
        asynchronous or its end was not found.
      beside: work between start and end, per call.
      in_conditional: whether it is in a branch.
      in_loop: whether it is in a loop.
      op_name: names that jax gave it, outermost first.
    """

    name: str
    kind: str
    axes: tuple[str, ...]
    groups: tuple[tuple[int, ...], ...]
    num_bytes: float
    calls: float
    start: int
    end: int
    beside: Work
    in_conditional: bool
    in_loop: bool
    op_name: str

    @property
    def is_covered(self) -> bool:
        """Whether a matmul or a convolution runs beside it."""
        return any(self.beside.flops.values())


@dataclasses.dataclass(frozen=True)
class Op:
    """One op of a schedule: work, or the start or the end of a collective.

    Args:
      name: name in the program.
      work: work of the op, or of all repeats of its bodies.
      starts: index in `StepSchedule.collectives` of the collective that it starts.
      ends: index of the collective that it waits for.
      bodies: body of a loop or a call, or the branches of a conditional.
      repeats: number of runs of each body; 1/B for B branches.
    """

    name: str
    work: Work
    starts: int | None = None
    ends: int | None = None
    bodies: tuple[tuple["Op", ...], ...] = ()
    repeats: float = 1


@dataclasses.dataclass(frozen=True)
class StepSchedule:
    """A compiled step.

    Args:
      ops: ops in the order of their dispatch.
      collectives: collectives of all computations.
      num_devices: number of devices that run it.
      uncounted: names of loops whose trip count the compiler does not know, which count
        once, and of sends and receives, which are not analysed.
      unpaired: names of collectives whose end was not found, or that are in a
        computation that no known instruction runs. They count as sent and not covered.
    """

    ops: tuple[Op, ...]
    collectives: tuple[Collective, ...]
    num_devices: int
    uncounted: tuple[str, ...]
    unpaired: tuple[str, ...]

    @property
    def work(self) -> Work:
        return sum((op.work for op in self.ops), NOTHING)

    def sent_bytes(self, axis: str | None = None) -> float:
        """Returns the bytes per step and device, along one mesh axis or all axes."""
        return sum(self._sent(c) for c in self._along(axis))

    def covered(self, axis: str | None = None) -> float:
        """Returns the share of sent bytes beside which a matmul or convolution runs.

        1 if nothing is sent.
        """
        total = self.sent_bytes(axis)
        beside = sum(self._sent(c) for c in self._along(axis) if c.is_covered)
        return beside / total if total else 1.0

    def _along(self, axis: str | None) -> list[Collective]:
        return [c for c in self.collectives if axis is None or axis in c.axes]

    def _sent(self, collective: Collective) -> float:
        sent = sum(num_bytes for _, _, num_bytes in links(collective))
        return collective.calls * sent / self.num_devices


def links(collective: Collective) -> list[tuple[int, int, float]]:
    """Returns sender, receiver and bytes of what is sent in one call of a collective.

    A permute sends the array along each pair, an all-to-all `1/S` of it to each other
    member of a group of S. The others go around a ring: each member sends `1 - 1/S` of
    the array, twice that in an all-reduce.
    """
    found = []
    for group in collective.groups:
        if collective.kind == "collective-permute":
            pairs, part = [group], 1.0
        elif collective.kind in ("all-to-all", "ragged-all-to-all"):
            pairs, part = itertools.permutations(group, 2), 1 / len(group)
        else:
            # Each sends to the next, the last to the first.
            pairs = itertools.pairwise([*group, group[0]])
            passes = 2 if collective.kind == "all-reduce" else 1
            part = passes * (1 - 1 / len(group))
        # A device keeps its own part: a permute may pair it with itself, and so does a
        # ring of one member.
        found += [(i, j, part * collective.num_bytes) for i, j in pairs if i != j]
    return found
