"""What runs while messages fly, as the schedule of a compiled step says.

A collective that the compiler makes asynchronous starts at one place of the schedule
and ends at another: what stands between runs beside it. Works for any JAX step,
compiled for GPUs or TPUs, there or not: such a schedule shows that the overlap is
possible, and with the speeds of an accelerator and its network, how long a step takes.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import NamedTuple

from decentjax.overlap.schedule import Collective, Op, Schedule, links
from decentjax.overlap.work import NOTHING, Work

# Each device has its own receivers; the others go around rings, one for each link.
ONE_TO_ONE = ("all-to-all", "collective-permute", "ragged-all-to-all")


@dataclasses.dataclass(frozen=True)
class Accelerator:
    """Speeds of one device.

    Args:
      flops_per_second: of matmuls, by element type as in HLO ("bf16", "f32"); of those
        that are not named, types of 8 bits run at the fastest, others at the slowest.
      bytes_per_second: of its memory.
      least_seconds: of one op, however small: on a GPU, of starting a kernel.
    """

    flops_per_second: Mapping[str, float]
    bytes_per_second: float
    least_seconds: float = 2e-6

    def seconds(self, work: Work) -> float:
        """Of one op, the longer of computing and moving."""
        if work == NOTHING:
            return 0.0
        compute = sum(
            number / self._rate(dtype) for dtype, number in work.flops.items()
        )
        moving = work.num_bytes / self.bytes_per_second
        return max(compute, moving, self.least_seconds)

    def _rate(self, dtype: str) -> float:
        rates = self.flops_per_second
        narrow = dtype.startswith("f8") or dtype in ("s8", "u8", "s4", "u4")
        return rates.get(dtype, (max if narrow else min)(rates.values()))


@dataclasses.dataclass(frozen=True)
class Network:
    """Speeds of messages; bytes per second in each direction.

    Args:
      devices_per_node: devices side by side in the mesh share a node.
      inside_bytes_per_second: of a device, to others of its node.
      between_bytes_per_second: of all links of a node, to other nodes.
      links_per_node: a device that sends alone has one; a mean uses them all.
      inside_latency: seconds of a message inside a node.
      between_latency: seconds of a message between nodes.
    """

    devices_per_node: int
    inside_bytes_per_second: float
    between_bytes_per_second: float
    links_per_node: int = 1
    inside_latency: float = 5e-6
    between_latency: float = 20e-6

    def seconds(self, collective: Collective) -> float:
        """Seconds of one call: of the busiest device or node, and of the latencies."""
        inside, outside, between = {}, {}, {}  # Of devices, and all that leaves a node.
        for sender, receiver, num_bytes in links(collective):
            node = sender // self.devices_per_node
            if node == receiver // self.devices_per_node:
                inside[sender] = inside.get(sender, 0) + num_bytes
            else:
                outside[sender] = outside.get(sender, 0) + num_bytes
                between[node] = between.get(node, 0) + num_bytes
        link = self.between_bytes_per_second
        if collective.kind in ONE_TO_ONE:
            link /= self.links_per_node
        latency = self.between_latency if between else self.inside_latency
        return _num_messages(collective) * latency + max(
            max(inside.values(), default=0) / self.inside_bytes_per_second,
            max(outside.values(), default=0) / link,
            max(between.values(), default=0) / self.between_bytes_per_second,
        )


class Span(NamedTuple):
    """Something of a step that takes time, in seconds from its begin."""

    name: str
    is_message: bool
    start: float
    end: float


@dataclasses.dataclass(frozen=True)
class Estimate:
    """How long a step takes, by the schedule and the speeds.

    Args:
      compute: seconds of all work, without a message.
      communication: seconds of all messages, one after the other.
      step: seconds of both, as scheduled.
      spans: of the step; of a loop or a conditional, the work as one, and the messages
        of the first trip, or of every branch.
    """

    compute: float
    communication: float
    step: float
    spans: tuple[Span, ...]

    @property
    def exposed(self) -> float:
        """Seconds that the step waits for messages."""
        return self.step - self.compute

    @property
    def limit(self) -> float:
        """`max(compute, communication)`: no schedule is faster."""
        return max(self.compute, self.communication)


def estimate(
    schedule: Schedule, accelerator: Accelerator, network: Network
) -> Estimate:
    """Plays a schedule: work in its order, and messages in the order of their starts.

    One collective is on its way at a time, as on one stream. A step waits where a
    collective ends in the schedule and not yet on the network.

    Args:
      schedule: of a step.
      accelerator: how fast work is done.
      network: how fast messages are.

    Raises:
      ValueError: if the nodes do not divide the devices.
    """
    if schedule.num_devices % network.devices_per_node:
        raise ValueError(
            f"{schedule.num_devices} devices do not fill nodes of "
            f"{network.devices_per_node}"
        )
    seconds = [network.seconds(c) for c in schedule.collectives]
    player = _Player(accelerator, seconds)
    compute, end = player.play(schedule.ops, 0.0)
    communication = sum(
        c.calls * s for c, s in zip(schedule.collectives, seconds, strict=True)
    )
    return Estimate(compute, communication, end, tuple(player.spans))


class _Player:
    """Plays ops on a clock; the network has a clock of its own."""

    def __init__(self, accelerator: Accelerator, seconds: list[float]):
        self._accelerator = accelerator
        self._seconds = seconds
        self._network = 0.0
        self._ends: dict[int, float] = {}
        self.spans: list[Span] = []

    def play(self, ops: tuple[Op, ...], now: float) -> tuple[float, float]:
        """Returns the seconds of the work alone, and the time at the end."""
        compute = 0.0
        for op in ops:
            if op.starts is not None:
                start = max(now, self._network)
                self._network = start + self._seconds[op.starts]
                self._ends[op.starts] = self._network
                self.spans.append(Span(op.name, True, start, self._network))
            if op.ends is not None:
                now = max(now, self._ends[op.ends])
            seconds, end = self._run(op, now)
            if seconds:
                self.spans.append(Span(op.name, False, now, end))
            compute, now = compute + seconds, end
        return compute, now

    def _run(self, op: Op, now: float) -> tuple[float, float]:
        if not op.bodies:
            seconds = self._accelerator.seconds(op.work)
            return seconds, now + seconds
        num_spans = len(self.spans)
        run = self._branch if op.repeats < 1 else self._loop
        result = run(op, now)
        # Of what is inside, the messages are shown, and the work as one.
        inside = self.spans[num_spans:]
        self.spans[num_spans:] = [span for span in inside if span.is_message]
        return result

    def _loop(self, op: Op, now: float) -> tuple[float, float]:
        """The first trip may wait for what was sent before; all others are alike."""
        (body,) = op.bodies
        seconds, first = self.play(body, now)
        if op.repeats == 1:
            return seconds, first
        num_spans = len(self.spans)
        _, second = self.play(body, first)
        del self.spans[num_spans:]
        return op.repeats * seconds, first + (op.repeats - 1) * (second - first)

    def _branch(self, op: Op, now: float) -> tuple[float, float]:
        """The mean of the branches, each of which waits for its own messages."""
        network, compute, end = self._network, 0.0, now
        for body in op.bodies:
            seconds, last = self.play(body, now)
            self._network = network
            compute += op.repeats * seconds
            end += op.repeats * (last - now)
        return compute, end


def _num_messages(collective: Collective) -> int:
    """One after the other in a call: of a permute 1, of a mean those of a tree."""
    if collective.kind == "collective-permute":
        return int(any(sender != receiver for sender, receiver in collective.groups))
    size = max(len(group) for group in collective.groups)
    if collective.kind in ("all-to-all", "ragged-all-to-all"):
        return size - 1
    depth = math.ceil(math.log2(size))
    return 2 * depth if collective.kind == "all-reduce" else depth
