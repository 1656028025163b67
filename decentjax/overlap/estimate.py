"""Estimates the time of a compiled step from its schedule.

An asynchronous collective starts at one op of the schedule and ends at another; the ops
between run beside it. This works for any JAX step compiled for GPUs or TPUs, present or
not: the schedule shows that overlap is possible, and with the speeds of an accelerator
and its network, how long a step takes.
"""

import collections
import dataclasses
import math
from collections.abc import Mapping
from typing import NamedTuple

from decentjax.overlap.flops import NOTHING, Work
from decentjax.overlap.step_schedule import Collective, Op, StepSchedule, links
from decentjax.units import Quantity, read_speeds

# A device sends these over one link; the others use a ring for each link of a node.
ONE_TO_ONE = ("all-to-all", "collective-permute", "ragged-all-to-all")


@dataclasses.dataclass(frozen=True)
class Accelerator:
    """Speeds of one device.

    Args:
      flops_per_second: FLOP/s of matmuls by element type of HLO ("bf16", "f32"); other
        types of 8 bits or less run at the fastest of them, the rest at the slowest.
      bytes_per_second: bandwidth of the memory.
      least_seconds: minimum duration of an op: on a GPU the start of a kernel.
    """

    flops_per_second: Mapping[str, float]
    bytes_per_second: float
    least_seconds: float = 2e-6

    def seconds(self, work: Work) -> float:
        """Returns the duration of an op: the longer of compute and memory traffic."""
        if work == NOTHING:
            return 0.0
        compute = sum(
            number / self._rate(dtype) for dtype, number in work.flops.items()
        )
        moving = work.num_bytes / self.bytes_per_second
        return max(compute, moving, self.least_seconds)

    def _rate(self, dtype: str) -> float:
        rates = self.flops_per_second
        # Narrow types without a rate of their own run on the same units as the fastest.
        narrow = dtype.startswith("f8") or dtype in ("s8", "u8", "s4", "u4")
        return rates.get(dtype, (max if narrow else min)(rates.values()))


@dataclasses.dataclass(frozen=True)
class Network:
    """Speeds of messages; rates are in bytes per second in each direction.

    Rates and latencies are numbers or texts such as "25gbit" and "20us".

    Args:
      devices_per_node: number of devices, consecutive in the mesh, that share a node.
      inside_bytes_per_second: rate of a device to others of its node.
      between_bytes_per_second: rate of all links of a node to other nodes.
      links_per_node: number of these links; a device that sends alone uses one, a mean
        over groups all.
      inside_latency: seconds of latency per message inside a node.
      between_latency: seconds of latency per message between nodes.
    """

    devices_per_node: int
    inside_bytes_per_second: Quantity
    between_bytes_per_second: Quantity
    links_per_node: int = 1
    inside_latency: Quantity = 5e-6
    between_latency: Quantity = 20e-6

    def __post_init__(self):
        read_speeds(self)

    def seconds(self, collective: Collective) -> float:
        """Returns the duration of one call: the busiest link, and the latencies."""
        # Bytes by sending device inside and between nodes, and by sending node.
        inside, outside, between = (collections.defaultdict(float) for _ in range(3))
        for sender, receiver, num_bytes in links(collective):
            node = sender // self.devices_per_node
            if node == receiver // self.devices_per_node:
                inside[sender] += num_bytes
            else:
                outside[sender] += num_bytes
                between[node] += num_bytes
        # A node's links together carry what all its devices send, and one link what one
        # device sends; collectives on rings spread a device's bytes over all links.
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
    """Work or a message of a step, in seconds from the start of the step."""

    name: str
    is_message: bool
    start: float
    end: float


@dataclasses.dataclass(frozen=True)
class Estimate:
    """The estimated duration of a step.

    Args:
      compute: seconds of all work without messages.
      communication: seconds of all messages, one after the other.
      step: seconds of both as scheduled.
      spans: work and messages of the step; a loop or a conditional has one span of
        work, and the messages of the first trip or of every branch.
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
    schedule: StepSchedule, accelerator: Accelerator, network: Network
) -> Estimate:
    """Plays a schedule: work in its order, and messages in the order of their starts.

    One collective is in flight at a time, as on one stream. The step waits at an end in
    the schedule until the network has delivered the collective.

    Args:
      schedule: schedule of a step.
      accelerator: speeds of work.
      network: speeds of messages.

    Raises:
      ValueError: if the nodes do not divide the devices.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> from decentjax import overlap
      >>> x = jnp.ones((64, 64))
      >>> schedule = overlap.read(jax.jit(lambda x: x @ x).lower(x).compile())
      >>> accelerator = overlap.Accelerator({"f32": 67e12}, bytes_per_second=3.35e12)
      >>> network = overlap.Network(1, 450e9, 50e9)
      >>> overlap.estimate(schedule, accelerator, network).exposed
      0.0
    """
    if schedule.num_devices % network.devices_per_node:
        raise ValueError(
            f"{schedule.num_devices} devices do not fill nodes of "
            f"{network.devices_per_node}"
        )
    seconds = [network.seconds(c) for c in schedule.collectives]
    player = _Player(accelerator, seconds)
    end = player.play(schedule.ops, 0.0)
    communication = sum(
        c.calls * s for c, s in zip(schedule.collectives, seconds, strict=True)
    )
    compute = sum(map(player.seconds_of, schedule.ops))
    return Estimate(compute, communication, end, tuple(player.spans))


class _Player:
    """Plays ops on one clock and messages on another, the network's."""

    def __init__(self, accelerator: Accelerator, seconds: list[float]):
        self._accelerator = accelerator
        self._seconds = seconds
        self._network = 0.0
        self._ends: dict[int, float] = {}
        self.spans: list[Span] = []

    def play(self, ops: tuple[Op, ...], now: float) -> float:
        """Returns the time at the end of the ops."""
        for op in ops:
            # A start costs the device no time. A blocking collective starts and ends in
            # the same op.
            if op.starts is not None:
                start = max(now, self._network)
                self._network = start + self._seconds[op.starts]
                self._ends[op.starts] = self._network
                self.spans.append(Span(op.name, True, start, self._network))
            if op.ends is not None:
                now = max(now, self._ends[op.ends])
            end = self._end_of(op, now)
            if self.seconds_of(op):
                self.spans.append(Span(op.name, False, now, end))
            now = end
        return now

    def seconds_of(self, op: Op) -> float:
        """Returns the seconds of work alone."""
        if not op.bodies:
            return self._accelerator.seconds(op.work)
        return op.repeats * sum(self.seconds_of(x) for body in op.bodies for x in body)

    def _end_of(self, op: Op, now: float) -> float:
        if not op.bodies:
            return now + self.seconds_of(op)
        spans, self.spans = self.spans, []
        if op.repeats < 1:
            end = now + self._mean_of_branches(op, now)
        else:
            end = self.play(op.bodies[0], now)
        # The messages inside, of one trip; the caller adds the work as one span.
        spans += [span for span in self.spans if span.is_message]
        if op.repeats > 1:
            # The first trip may wait for earlier messages, others do not: with trips of
            # 7 s and 5 s, six trips end after 7 + 5 x 5 = 32 s.
            end += (op.repeats - 1) * (self.play(op.bodies[0], end) - end)
        self.spans = spans
        return end

    def _mean_of_branches(self, op: Op, now: float) -> float:
        """Returns the mean seconds of the branches, each with its own messages."""
        network, seconds = self._network, 0.0
        for body in op.bodies:
            seconds += op.repeats * (self.play(body, now) - now)
            # The other branches do not find the messages of this one on the network.
            # What it leaves there after its end is neglected.
            self._network = network
        return seconds


def _num_messages(collective: Collective) -> int:
    """Returns how many messages in a call wait for each other.

    1 for a permute, the depth of a tree for a gather or a scatter, twice that for an
    all-reduce, as NCCL has it for small arrays.
    """
    if collective.kind == "collective-permute":
        return int(any(sender != receiver for sender, receiver in collective.groups))
    size = max(len(group) for group in collective.groups)
    if collective.kind in ("all-to-all", "ragged-all-to-all"):
        return size - 1
    depth = math.ceil(math.log2(size))
    return 2 * depth if collective.kind == "all-reduce" else depth
