"""Every knob of a run, as frozen plain values.

A config file holds one `config = Config(...)`. Impossible values raise here, or where
they are used for the first time, before anything is compiled.
"""

import dataclasses
import inspect
import itertools
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import optax

from decentjax import Rounds
from decentjax import policy as policies
from decentjax import schedule as schedules
from decentjax import topology as topologies
from decentjax.codec import Codec, bfloat16, exact, float16, int2, int4, int8, top_k
from decentjax.compression import (
    LEAST_KEPT,
    Compression,
    copies,
    drift,
    error_feedback,
)
from decentjax.rounds import blend, replace, shift
from decentjax.topology import Permutations, Topology, matrices
from train.fields import checked, place_of
from train.tasks.task import TaskOptions
from train.xla import read_options

ROUNDING = 1e-9  # Of eigenvalues.
# Optimizers that follow what the last exchange has moved.
FOLLOW_EXCHANGES = ("exact_diffusion", "qg_dsgdm")


def _graphs() -> tuple[str, ...]:
    """The functions of `decentjax.topology` from a number of workers to a topology."""
    graph = {"num_workers": int, "return": Topology}.items()
    functions = filter(inspect.isfunction, vars(topologies).values())
    return tuple(f.__name__ for f in functions if graph <= f.__annotations__.items())


if TYPE_CHECKING:
    TopologyName = str  # A type checker cannot call a function for the names.
else:
    TopologyName = Literal[_graphs()]


@checked
class WorkersConfig:
    """The workers and their placement.

    Args:
      num_workers: N; each has its own model and its own part of the data.
      workers_per_node: number of consecutive workers that share a node; used by
        topologies with nodes.
      where: "simulate" puts all workers on one device as one batched program, "mesh"
        gives each its own device. A job of several processes always uses a mesh.
    """

    num_workers: int = 8
    workers_per_node: int = 1
    where: Literal["simulate", "mesh"] = "simulate"

    def __post_init__(self):
        _check_at_least(self, 1, "num_workers", "workers_per_node")


@checked
class DataConfig:
    """How the data is read.

    Args:
      num_processes: number of processes that read and decode ahead, per process that
        trains; 0 uses a thread instead.
      skew: "dirichlet" and its concentration alpha deal each class to the workers by
        shares that are drawn: with 0.1 a worker has few classes. None deals evenly.
    """

    num_processes: int = 0
    skew: tuple[Literal["dirichlet"], float] | None = None

    def __post_init__(self):
        _check_at_least(self, 0, "num_processes")
        if self.skew is not None and not 0 < self.skew[1] < math.inf:
            raise ValueError(
                f"data.skew needs a positive concentration, got {self.skew[1]}"
            )


@checked
class TopologyConfig:
    """Who averages with whom; see `decentjax.topology`.

    The function takes the options that its signature names and ignores the others.

    Args:
      name: name of the function.
      degree: number of peers, for ring_lattice, base_k and k_peer_exponential.
      group_size: number of workers in a group, for butterfly_groups; None for about
        the root of the number of workers.
      period: number of matchings, for random_matching.
      seed: seed of the matchings, for random_matching.
      between: graph between the nodes, for hierarchical.
      factor: damping f in (0, 1], (1 - f) I + f W.
      mean_every: exchanges from one mean over all workers to the next, not damped; None
        has none. With the name alone it is the period of local SGD.
      make: function of your own from the number of workers to a `Topology`, which takes
        the place of the named one and its options; at the top of a module.
    """

    name: TopologyName = "alternating_exponential_ring"
    degree: int = 2
    group_size: int | None = None
    period: int = 8
    seed: int = 0
    between: TopologyName = "ring"
    factor: float = 1.0
    mean_every: int | None = None
    make: Callable[[int], Topology] | None = None

    def build(self, workers: WorkersConfig) -> Topology:
        """Returns the topology of these workers.

        Raises:
          ValueError: if the graph does not exist for them, with the reason.
        """

        def between(num_nodes: int) -> Topology:
            # A graph of nodes: it gets neither workers per node nor a graph between.
            return self._make(self.between, num_nodes)

        nodes = {"workers_per_node": workers.workers_per_node, "between": between}
        if self.make is None:
            topology = self._make(self.name, workers.num_workers, **nodes)
        else:
            topology = _checked_topology(self.make, workers.num_workers)
        if self.factor != 1:
            topology = topologies.damped(topology, self.factor)
        if self.mean_every is not None:
            topology = topologies.with_mean_every(topology, self.mean_every)
        return topology

    def build_for(self, num_workers: int) -> Topology:
        """As `build`, for so many workers on nodes of their own."""
        return self.build(WorkersConfig(num_workers=num_workers))

    def _make(self, name: str, num_workers: int, **nodes: Any) -> Topology:
        function = getattr(topologies, name)
        options = {**vars(self), **nodes}
        _, *wanted = inspect.signature(function).parameters  # After num_workers.
        # A hierarchy of hierarchies has no meaning here.
        if "workers_per_node" in wanted and not nodes:
            raise ValueError(
                f"topology.between must be a graph without nodes of its own, got {name}"
            )
        return function(num_workers, **{option: options[option] for option in wanted})


def _checked_topology(make: Callable[[int], Topology], num_workers: int) -> Topology:
    made = make(num_workers)
    if isinstance(made, Topology) and made.num_workers == num_workers:
        return made
    got = f"one of {made.num_workers}" if isinstance(made, Topology) else repr(made)
    raise ValueError(
        f"topology.make = {place_of(make)} must return a Topology of {num_workers} "
        f"workers, got {got}"
    )


@checked
class PolicyConfig:
    """Which graph each step averages over; see `decentjax.policy`.

    Args:
      name: "fixed" takes the topology; "thinning" is Ada, a ring lattice that loses
        neighbours with each epoch; "holding" takes as few neighbours as hold a
        dispersion; "damping" is DSGD-AC, the topology with a mixing factor that falls
        with the learning rate; "merged" is the topology, with a mean of all models at
        the last step. Gossip-PGA is "fixed" with `topology.mean_every`.
      degree: number of neighbours at the start, for "thinning"; None for all.
      per_epoch: number of neighbours lost per epoch, for "thinning".
      least: number of neighbours at the end, for "thinning".
      epoch_steps: number of steps that are an epoch, for "thinning".
      graphs: names of the graphs of "holding", from many connections to few; by default
        the complete graph and ring lattices of ever fewer neighbours.
      target: dispersion to hold, the mean over all tensors.
      slack: relative distance from the target that changes nothing.
      measure: measure of the dispersion of norms over the workers.
      every_steps: steps from one measurement to the next.
      power: p in the factor (learning rate / its peak)^p, for "damping".
      levels: number of mixing factors, each a program, for "damping".
    """

    name: Literal["fixed", "thinning", "holding", "damping", "merged"] = "fixed"
    degree: int | None = None
    per_epoch: float = 1.0
    least: int = 2
    epoch_steps: int = 100
    graphs: tuple[TopologyName, ...] = ()
    target: float = 0.01
    slack: float = 0.2
    measure: Literal[
        "gini",
        "index_of_dispersion",
        "coefficient_of_variation",
        "quartile_coefficient",
    ] = "gini"
    every_steps: int = 10
    power: float = 1.0
    levels: int = 8

    def __post_init__(self):
        _check_at_least(self, 1, "epoch_steps", "every_steps", "levels")
        _check_at_least(self, 0, "power")
        # Raises for numbers that no policy takes.
        most = self.least if self.degree is None else self.degree
        policies.thinning(2, most, self.per_epoch, self.least)
        policies.holding(policies.ladder(2), self.target, self.slack)


CodecName = Literal["none", "float16", "bfloat16", "int8", "int4", "int2", "top_k"]


def make_codec(name: CodecName, share: float = 0.01, bits: int = 32) -> Codec:
    """Returns a codec by its name; "none" sends numbers as they are.

    Args:
      name: the name.
      share: share of the numbers that "top_k" sends.
      bits: bits of each of them.
    """
    of_bits = {32: None, 8: int8(), 4: int4(), 2: int2()}
    codecs = {
        "none": exact(),
        "float16": float16(),
        "bfloat16": bfloat16(),
        "int8": int8(),
        "int4": int4(),
        "int2": int2(),
        "top_k": top_k(share, values=of_bits[bits]),
    }
    return codecs[name]


def sends_models(codec: Codec) -> bool:
    """Whether models that are sent by the codec come together."""
    return codec.keeps >= LEAST_KEPT


@checked
class RoundsConfig:
    """Rounds of communication, for step.algorithm = "rounds"; see `decentjax.rounds`.

    Args:
      every_steps: H, steps from one round to the next, or of a fragment to its next.
      fragments: number of parts of the model that are sent in turn.
      delay: steps until what was sent is merged, at most H; 0 merges it at once.
      outer: optimizer of what the workers agree on: "nesterov" and "heavy_ball" have
        momentum, "none" takes the average as it is. DiLoCo is "nesterov" with
        topology.name = "complete", NoLoCo "heavy_ball" with "random_matching".
      learning_rate: learning rate of the outer optimizer.
      momentum: its momentum.
      merge: how a worker goes on: "replace" takes the result, "shift" adds what the
        worker has learned since it sent, "blend" is `share` x + (1 - share) result.
      share: part of the worker's own model, for "blend".
      codec: how messages are encoded: 16, 8, 4 or 2 bits a number, or the largest
        numbers; what a message drops is sent later. With an outer optimizer it encodes
        how far a worker has moved, and needs means of all models. "int2" and "top_k"
        need one, or `copies`: of models they would drop too much.
      sent_share: share of the numbers that "top_k" sends.
      sent_bits: bits of each of them, beside its place.
      error_kept: part of what was dropped that is sent later.
      copies: whether to send changes of copies that the peers keep, as CHOCO-SGD does;
        for a graph that never changes.
      copy_step: step towards the average of the copies, in (0, 1]; by default what the
        codec keeps of a number, such as 0.5 of "int2" and `sent_share` of "top_k".
      tracking: whether an estimate of the mean gradient is averaged with the model,
        along which a worker descends: gradient tracking, for uneven data. It runs in
        the step, without a codec.
    """

    every_steps: int = 10
    fragments: int = 1
    delay: int = 0
    outer: Literal["none", "nesterov", "heavy_ball"] = "none"
    learning_rate: float = 0.7
    momentum: float = 0.9
    merge: Literal["replace", "shift", "blend"] = "replace"
    share: float = 0.5
    codec: CodecName = "none"
    sent_share: float = 0.01
    sent_bits: Literal[32, 8, 4, 2] = 32
    error_kept: float = 1.0
    copies: bool = False
    copy_step: float | None = None
    tracking: bool = False

    def __post_init__(self):
        _check_at_least(self, 1, "every_steps", "fragments")
        _check_at_least(self, 0, "error_kept")
        step = 1.0 if self.copy_step is None else self.copy_step
        if self.error_kept > 1 or not 0 < step <= 1:
            raise ValueError(
                "error_kept must be in [0, 1] and copy_step in (0, 1], got "
                f"{self.error_kept} and {self.copy_step}"
            )
        if self.copies and (self.codec == "none" or self.outer != "none"):
            raise ValueError(
                "rounds.copies are of encoded models: set rounds.codec, and "
                'rounds.outer to "none"'
            )
        of_models = self.outer == "none" and not self.copies
        if of_models and not sends_models(self._codec()):
            raise ValueError(
                f"rounds.codec = {self.codec} drops too much of a model, and workers "
                "would part: set rounds.copies, for a graph that never changes, "
                'rounds.outer with topology.name = "complete", or rounds.codec to int8'
            )
        if self.tracking and self.codec != "none":
            raise ValueError(
                "rounds.tracking sends models and estimates as they are: leave "
                f"rounds.codec at none, got {self.codec}"
            )
        _check_at_least(self, 0, "delay", "learning_rate", "momentum", "share")
        if not (self.momentum < 1 and self.share < 1):
            raise ValueError(
                "momentum and share must be less than 1, got "
                f"{self.momentum} and {self.share}"
            )
        self._check_used()
        # Raises for a delay that is longer than a round.
        schedule = schedules.every(topologies.ring(1), self.every_steps, self.delay)
        if self.outer != "none" and schedule.period == 1:
            raise ValueError(
                f"rounds.outer = {self.outer} moves models that have trained alone "
                "since the last round: set rounds.every_steps to 2 or more"
            )

    def build(self, topology: Topology, sizes: Sequence[int] | None = None) -> Rounds:
        """Returns the rounds over a topology.

        Args:
          topology: the topology.
          sizes: numbers of each leaf of the model; by default each fragment is a leaf.

        Raises:
          ValueError: if the topology does not fit, or no leaf falls into a fragment.
        """
        schedule = schedules.every(topology, self.every_steps, self.delay)
        if self.fragments > 1:
            leaves = [1] * self.fragments if sizes is None else sizes
            fragments = schedules.cut_leaves(leaves, self.fragments)
            schedule = schedules.in_fragments(
                topology, self.every_steps, fragments, self.delay
            )
        merges = {"replace": replace, "shift": shift, "blend": blend(self.share)}
        merge = merges[self.merge]
        parts = self._outer(), merge, self._compression(), self.tracking
        return Rounds(schedule, *parts)

    def _outer(self) -> optax.GradientTransformation | None:
        if self.outer == "none":
            return None
        looks_ahead = self.outer == "nesterov"
        return optax.sgd(self.learning_rate, self.momentum, nesterov=looks_ahead)

    def _codec(self) -> Codec:
        return make_codec(self.codec, self.sent_share, self.sent_bits)

    def _compression(self) -> Compression | None:
        if self.codec == "none":
            return None
        if self.copies:
            return copies(self._codec(), self.copy_step)
        encoded = error_feedback if self.outer == "none" else drift
        return encoded(self._codec(), keep=self.error_kept)

    def _check_used(self) -> None:
        """Raises a ValueError for a number that nothing would use."""
        is_used = {
            "learning_rate": ("outer", self.outer != "none"),
            "momentum": ("outer", self.outer != "none"),
            "share": ("merge", self.merge == "blend"),
            "sent_share": ("codec", self.codec == "top_k"),
            "sent_bits": ("codec", self.codec == "top_k"),
        }
        for name, (of, used) in is_used.items():
            if not used and getattr(self, name) != getattr(type(self), name):
                raise ValueError(
                    f"rounds.{of} = {getattr(self, of)} has no {name}: set rounds.{of} "
                    f"too, or leave out rounds.{name}"
                )


@checked
class StepConfig:
    """One training step.

    Args:
      algorithm: "awc" averages the models while the gradient is computed, "atc" after
        the update, "rounds" now and then, as `rounds` says; "all_reduce" averages the
        gradients instead.
      batch_per_worker: batch size per worker and step, in the task's unit: windows,
        images, or for translation tokens on each side.
      num_micro_batches: number of parts of that batch, computed one after the other.
      message_dtype: dtype of the models that are sent; None keeps theirs.
      not_finite: what becomes of numbers that are no longer finite: "stop" ends the
        run, with nothing of them saved; "quarantine" drops the worker's update, which
        goes on with the average of its neighbours, and logs it.
      xla_options: XLA options NAME=VALUE for steps compiled for a mesh with their
        exchange inside, and for the programs of compared seeds on a mesh;
        "recommended" stands for those of `train.xla`. Options of another platform, such
        as xla_gpu_... on a TPU, are ignored. Empty for XLA's defaults.
    """

    algorithm: Literal["awc", "atc", "rounds", "all_reduce"] = "awc"
    batch_per_worker: int = 8
    num_micro_batches: int = 1
    message_dtype: Literal["bfloat16"] | None = None
    not_finite: Literal["stop", "quarantine"] = "stop"
    xla_options: tuple[str, ...] = ("recommended",)

    def __post_init__(self):
        _check_at_least(self, 1, "batch_per_worker", "num_micro_batches")
        # For its errors: any platform reads the same forms.
        read_options(self.xla_options, platform="cpu")
        if self.algorithm == "all_reduce" and self.message_dtype is not None:
            raise ValueError("all_reduce sends gradients: leave message_dtype at None")


@checked
class ExchangeConfig:
    """Where the models are averaged.

    Args:
      where: "in_step" compiles the exchange into the step, which overlaps it on GPU and
        TPU; "background" runs it in a second thread, over the host's network, which
        overlaps it on any platform; "peers" makes each process a run of its own, which
        takes the models that have come from its peers; "auto" is "background" for "awc"
        and rounds with a delay, in a job of several processes on CPU, else
        "in_step".
      way: how models of peers are used: "arrived" averages with what has come, "swaps"
        swaps models in pairs whose mean stays, "wagma" averages in the groups of the
        topology without waiting for who is late.
      patience: longest time that a step waits for the models of peers, seconds; None
        waits for all peers who live. For "wagma" it is the longest wait for a peer that
        lives and is silent, and 0 stands for a minute.
      bind: IP address, or name of a network interface, where a process of "peers"
        listens. Nothing is encrypted: an address other than loopback must be on a
        private network.
      addresses: IP:PORT, or [IP]:PORT for IPv6, of each process of "peers"; by default
        they find each other through files in the run's folder.
      secret_file: file with the secret by which processes of "peers" know each other,
        readable by its owner alone; by default one that is made in the run's folder.
      elastic: whether processes of "peers" may come and go: a step's graph is then the
        topology of as many workers as live, and who comes or comes back takes the model
        and the moments of a peer. `workers.num_workers` is their greatest number.
      quorum: number of living workers, in an elastic run, below which a process waits;
        1 lets both sides of a broken network train, and more than half only one.
      silent_seconds: a process of an elastic run that is not heard for so long counts
        as gone, until it is heard again.
    """

    where: Literal["auto", "in_step", "background", "peers"] = "auto"
    way: Literal["arrived", "swaps", "wagma"] = "arrived"
    patience: float | None = 0.0
    bind: str = "127.0.0.1"
    addresses: tuple[str, ...] = ()
    secret_file: str | None = None
    elastic: bool = False
    quorum: int = 1
    silent_seconds: float = 5.0

    def __post_init__(self):
        if self.patience is not None:
            _check_at_least(self, 0, "patience")
        _check_at_least(self, 1, "quorum")
        # A process says that it lives twice in a second.
        _check_at_least(self, 1, "silent_seconds")
        if self.elastic and (
            self.where != "peers" or self.way != "arrived" or self.patience is None
        ):
            raise ValueError(
                'exchange.elastic needs exchange.where = "peers", exchange.way = '
                '"arrived" and an exchange.patience that ends, got '
                f"{self.where}, {self.way} and {self.patience}"
            )


@checked
class StragglerConfig:
    """Delays that make some processes slow, to measure how far they spread.

    Args:
      kind: "none"; "fixed" delays the processes `who` at each step; "rotating" delays
        process t mod P at step t; "random" delays each process at each step by a draw
        from a normal distribution, clipped at 0.
      who: numbers of the processes, for "fixed".
      seconds: the delay, or the mean of the draws.
      deviation: standard deviation of the draws, seconds.
    """

    kind: Literal["none", "fixed", "rotating", "random"] = "none"
    who: tuple[int, ...] = (0,)
    seconds: float = 0.3
    deviation: float = 0.1

    def __post_init__(self):
        _check_at_least(self, 0, "seconds", "deviation")
        if min(self.who, default=0) < 0:
            raise ValueError(f"straggler.who must be at least 0, got {min(self.who)}")


@checked
class DistributedConfig:
    """How the processes of a job find each other.

    Args:
      enabled: whether this process is one of several. Slurm and Open MPI provide the
        other fields, and so does `decentjax launch`.
      coordinator: HOST:PORT, or [HOST]:PORT for IPv6, the only address at which
        process 0 listens; peers have none.
      num_processes: P.
      process_id: number of this process, 0 to P - 1.
      start_seconds: longest wait for all processes at the start.
      timeout_seconds: longest wait of an exchange on CPU, or of a checkpoint, for a
        peer, before the job ends.
    """

    enabled: bool = False
    coordinator: str | None = None
    num_processes: int | None = None
    process_id: int | None = None
    start_seconds: int = 300
    timeout_seconds: int = 300

    def __post_init__(self):
        _check_at_least(self, 3, "start_seconds")
        _check_at_least(self, 1, "timeout_seconds")
        count, own = self.num_processes, self.process_id
        if not self.enabled:
            if (self.coordinator, count, own) != (None, None, None):
                # Otherwise each process would train alone, all into one folder.
                raise ValueError(
                    "distributed.coordinator, num_processes and process_id need "
                    "distributed.enabled"
                )
            return
        if count is not None and own is not None and not 0 <= own < count:
            raise ValueError(
                f"distributed.process_id must be from 0 to {count - 1}, got {own}"
            )


@checked
class OptimizerConfig:
    """The local optimizer and its schedule: a linear warm-up, then the decay.

    Args:
      name: "accum_adamw", "adamw", "lion" and "muon" subtract weight decay times
        learning rate times parameters from the parameters; the others add weight decay
        times parameters to the gradient. "muon" is for matrices; parameters of other
        shapes have Adam with Nesterov momentum. "exact_diffusion" and "qg_dsgdm"
        correct for uneven data; the first wants a topology.factor of 0.5, is D² with
        step.algorithm = "atc" and EXTRA with "awc", and adds up what exchanges round,
        for which rounds.tracking is better in many steps at a low rate.
      learning_rate: peak of the schedule.
      initial_learning_rate: learning rate at the first step of the warm-up.
      warmup_steps: number of steps up to the peak.
      decay: "cosine" down to the final learning rate at the last step; "inverse_sqrt",
        the peak times sqrt(warmup_steps / step); "steps", the peak times `decay_factor`
        once for each of the `decay_steps` reached.
      final_learning_rate: learning rate at the last step, for "cosine".
      decay_steps: ascending steps, for "steps"; none keeps the peak.
      decay_factor: factor at each of them, in (0, 1].
      momentum: m in `v <- m v + gradient`, the direction of a step of "sgd" and
        "exact_diffusion", the quasi-global momentum of "qg_dsgdm", and the decay rate
        of the momentum of "muon".
      accum_steps: steps per update of the moments, for accum_adamw and accum_adam.
      b1: decay rate of the first moment.
      b2: decay rate of the second moment.
      eps: term added to the root of the second moment.
      weight_decay: coefficient for parameters of two dims or more.
      clip_norm: largest global norm of a worker's gradient, or of its estimate with
        rounds.tracking; None does not clip.
      make: function of your own from the schedule to an optax optimizer, which takes
        the place of the named one, its options and the weight decay; at the top of a
        module.
      schedule: function of your own from `num_steps` to an optax schedule, which takes
        the place of warm-up and decay; at the top of a module.
    """

    name: Literal[
        "accum_adamw",
        "accum_adam",
        "adamw",
        "adam",
        "lion",
        "muon",
        "sgd",
        "exact_diffusion",
        "qg_dsgdm",
    ] = "accum_adamw"
    learning_rate: float = 1e-3
    initial_learning_rate: float = 0.0
    warmup_steps: int = 50
    decay: Literal["cosine", "inverse_sqrt", "steps"] = "cosine"
    final_learning_rate: float = 1e-4
    decay_steps: tuple[int, ...] = ()
    decay_factor: float = 0.1
    momentum: float = 0.9
    accum_steps: int = 4
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip_norm: float | None = 1.0
    make: Callable[[Callable], Any] | None = None
    schedule: Callable[[int], Callable] | None = None

    def __post_init__(self):
        _check_at_least(self, 0, "learning_rate", "initial_learning_rate")
        _check_at_least(self, 0, "final_learning_rate", "warmup_steps")
        _check_at_least(self, 0, "eps", "weight_decay")
        _check_at_least(self, 1, "accum_steps")
        if self.decay == "inverse_sqrt":
            _check_at_least(self, 1, "warmup_steps")
        self._check_decay_steps()
        for name in ("b1", "b2", "momentum"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be in [0, 1), got {getattr(self, name)}")
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise ValueError(f"clip_norm must be positive, got {self.clip_norm}")

    def _check_decay_steps(self) -> None:
        if self.decay_steps and self.decay != "steps":
            raise ValueError(
                f'decay_steps need decay = "steps", got decay = "{self.decay}"'
            )
        # The decay begins after the warm-up.
        ascending = (self.warmup_steps, *self.decay_steps)
        if any(a >= b for a, b in itertools.pairwise(ascending)):
            raise ValueError(
                "decay_steps must ascend and be greater than warmup_steps = "
                f"{self.warmup_steps}, got {self.decay_steps}"
            )
        if not 0 < self.decay_factor <= 1:
            raise ValueError(f"decay_factor must be in (0, 1], got {self.decay_factor}")


@checked
class EvaluationConfig:
    """When the mean model and the workers' models are evaluated.

    Args:
      every_steps: steps between evaluations; the last step is always evaluated.
    """

    every_steps: int = 500

    def __post_init__(self):
        _check_at_least(self, 1, "every_steps")


@checked
class CheckpointConfig:
    """When the run is saved, and how much is kept.

    Args:
      every_steps: steps between checkpoints; each evaluation and the last step have one
        too.
      num_kept: number of newest checkpoints that stay on disk; older ones are removed,
        those of evaluations and the best one too.
    """

    every_steps: int = 500
    num_kept: int = 2

    def __post_init__(self):
        _check_at_least(self, 1, "every_steps", "num_kept")


@checked
class LogConfig:
    """What is logged, and when.

    Args:
      every_steps: steps between rows of metrics.jsonl and updates of the progress line.
      consensus_every_steps: steps between measurements of the consensus distance, which
        cost an all-reduce of the model.
      timeline: whether to record when each process computes, waits and exchanges, which
        `train.report` draws; the run then waits for the end of each step.
      profile: FIRST:LAST, such as "100:110", traces with jax's profiler what runs from
        the end of step FIRST to the end of step LAST.
      sinks: where rows go beside metrics.jsonl; each needs the extra of its name, but
        for "tensorboard".
    """

    every_steps: int = 10
    consensus_every_steps: int = 10
    timeline: bool = False
    profile: str | None = None
    sinks: tuple[Literal["tensorboard", "wandb", "mlflow", "trackio"], ...] = (
        "tensorboard",
    )

    def __post_init__(self):
        _check_at_least(self, 1, "every_steps", "consensus_every_steps")
        if len(set(self.sinks)) < len(self.sinks):
            raise ValueError(f"log.sinks must name each sink once, got {self.sinks}")
        if self.profile is not None and not self.profiled():
            raise ValueError(
                "log.profile must be FIRST:LAST, two numbers of steps of which the "
                f'second is larger, such as "100:110", got {self.profile!r}'
            )

    def profiled(self) -> range:
        """The steps to trace; step t begins when t steps are done."""
        first, _, last = (self.profile or "").partition(":")
        if not (first.isdecimal() and last.isdecimal()):
            return range(0)
        return range(int(first), int(last))


@checked
class Config:
    """A run.

    Args:
      name: name of the run, and of its folder under `runs`.
      num_steps: number of steps per worker.
      task: data, model, loss and evaluation.
      seed: seed of the initial model, the order of the data and all other randomness.
      on_step: function of your own that is called after each step in each process, with
        the number of steps done, the state of its workers, which the next step donates,
        and their metrics; at the top of a module.
      on_evaluation: function of your own that is called after each evaluation in
        process 0, or each of the peers, with the number of steps done and the scores of
        the mean model; at the top of a module.
    """

    name: str
    num_steps: int
    task: TaskOptions
    seed: int = 0
    data: DataConfig = field(default_factory=DataConfig)
    workers: WorkersConfig = field(default_factory=WorkersConfig)
    topology: TopologyConfig = field(default_factory=TopologyConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    step: StepConfig = field(default_factory=StepConfig)
    rounds: RoundsConfig = field(default_factory=RoundsConfig)
    exchange: ExchangeConfig = field(default_factory=ExchangeConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)
    straggler: StragglerConfig = field(default_factory=StragglerConfig)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)
    on_step: Callable[[int, Any, Any], None] | None = None
    on_evaluation: Callable[[int, dict[str, float]], None] | None = None

    def __post_init__(self):
        _check_task(self.task)
        _check_length(self)
        _check_algorithm(self)
        _check_nodes(self.workers)
        # Raises for workers to whom the topology does not apply.
        topology = self.topology.build(self.workers)
        _check_correction(self, topology)
        if self.exchange.where == "peers":
            _check_peers(self.step, topology, self.exchange.way)
        if self.step.algorithm == "rounds":
            self.rounds.build(topology)  # For its errors.
            if self.exchange.where == "peers":
                _check_changes(self.rounds, self.exchange.patience)
        if self.exchange.elastic:
            _check_elastic(self)
        if self.exchange.way == "wagma":
            _check_wagma(self.topology)


def _check_length(config: Config) -> None:
    """Raises a ValueError for a run of no name, or parts that do not end within it."""
    _check_at_least(config, 1, "num_steps")
    _check_at_least(config, 0, "seed")
    # It is the name of a folder, in which `..` or `/` would lead elsewhere.
    if not config.name or not all(c.isalnum() or c in "_-" for c in config.name):
        raise ValueError(
            f"name must be letters, digits, '_' and '-', got {config.name!r}"
        )
    if config.log.profiled().stop > config.num_steps:
        raise ValueError(
            f"log.profile = {config.log.profile} must end within the run, which has "
            f"num_steps = {config.num_steps}"
        )
    # The decay begins after the warm-up and needs a step of its own.
    given = config.optimizer.schedule
    if given is None and config.optimizer.warmup_steps >= config.num_steps:
        raise ValueError(
            f"warmup_steps = {config.optimizer.warmup_steps} must be less than "
            f"num_steps = {config.num_steps}: set optimizer.warmup-steps, to "
            f"{config.num_steps // 10} for example"
        )


def _check_nodes(workers: WorkersConfig) -> None:
    """Raises a ValueError for workers that do not fill their nodes."""
    count, size = workers.num_workers, workers.workers_per_node
    if count % size:
        *some, last = [str(n) for n in range(1, count + 1) if count % n == 0]
        sizes = f"{', '.join(some)} or {last}" if some else last
        raise ValueError(
            f"workers.num_workers = {count} does not fill nodes of {size}: set "
            f"workers.workers_per_node to {sizes}"
        )


def _check_algorithm(config: Config) -> None:
    """Raises a ValueError for an exchange that the algorithm cannot have."""
    algorithm = config.step.algorithm
    at_once = algorithm == "rounds" and config.rounds.delay == 0
    if config.exchange.where == "background" and (algorithm == "atc" or at_once):
        raise ValueError(
            f"{algorithm} waits for its messages in the step that sends them, so "
            "nothing overlaps a background exchange; set exchange.where to "
            '"in_step"' + ", or rounds.delay to 1 or more" * at_once
        )
    if config.policy.name != "fixed" and (
        config.exchange.where in ("background", "peers")
        or algorithm not in ("awc", "atc")
    ):
        raise ValueError(
            f"policy.name = {config.policy.name} chooses the exchange of a step "
            "before it begins: it needs one in the compiled step, "
            f"exchange.where = in_step, got {config.exchange.where} with "
            f"{config.step.algorithm}"
        )
    if config.step.message_dtype is not None and config.rounds.codec != "none":
        raise ValueError(
            "messages have one form: leave step.message_dtype at None, or "
            'rounds.codec at "none"'
        )


def _check_correction(config: Config, topology: Topology) -> None:
    """Raises a ValueError for corrections that the exchange would spoil."""
    name = config.optimizer.name if config.optimizer.make is None else ""
    step, rounds = config.step, config.rounds
    tracks = step.algorithm == "rounds" and rounds.tracking
    plain = rounds.every_steps == 1 and rounds.codec == "none" and not tracks
    in_each_step = step.algorithm in ("awc", "atc") or (
        step.algorithm == "rounds" and plain
    )
    if name in FOLLOW_EXCHANGES and not in_each_step:
        raise ValueError(
            f"optimizer.name = {name} follows what the exchange of each step has "
            'moved: set step.algorithm to "awc" or "atc", or rounds.every_steps to 1 '
            f"without codec and tracking, got {step.algorithm} with "
            f"{rounds.every_steps}, {rounds.codec} and {rounds.tracking}"
        )
    if name == "exact_diffusion":
        _check_steady(topology)
    if name != "exact_diffusion" and not tracks:
        return
    exchange = config.exchange
    if tracks and exchange.where in ("background", "peers"):
        raise ValueError(
            "rounds.tracking runs in the step: set exchange.where to in_step, got "
            f"{exchange.where}"
        )
    needed = {
        "policy.name": (config.policy.name, "fixed"),
        "step.message_dtype": (step.message_dtype, None),
        "step.not_finite": (step.not_finite, "stop"),
    }
    if exchange.where == "peers":
        needed["exchange.patience"] = exchange.patience, None
        needed["exchange.way"] = exchange.way, "arrived"
    for name, (got, wanted) in needed.items():
        if got != wanted:
            raise ValueError(
                "exact_diffusion and rounds.tracking add up what exchanges move, also "
                "what is missing, rounded, not finite or of another graph once: set "
                f"{name} to {wanted}, got {got}"
            )


def _check_steady(topology: Topology) -> None:
    """Raises a ValueError for a graph over which exact diffusion can diverge."""
    first, *more = matrices(topology)
    is_symmetric = np.allclose(first, first.T)
    least = np.linalg.eigvalsh(first)[0] if is_symmetric else math.nan
    if more or not least > -1 / 3 + ROUNDING:
        what = (
            f"{1 + len(more)} exchanges in turn"
            if more
            else f"a least eigenvalue of {least:.3g}"
            if is_symmetric
            else "directed edges"
        )
        raise ValueError(
            "exact_diffusion can diverge unless each step has the same symmetric "
            "exchange, whose W has no eigenvalue of -1/3 or less: take ring with "
            f"topology.factor = 0.5, got {topology.name}, which has {what}"
        )


def _check_wagma(topology: TopologyConfig) -> None:
    """Raises a ValueError for other groups than WAGMA-SGD's."""
    if (
        topology.name != "butterfly_groups"
        or topology.make is not None
        or topology.mean_every is None
    ):
        raise ValueError(
            'exchange.way = "wagma" needs topology.name = "butterfly_groups" and '
            f"topology.mean_every, got {topology.name} and "
            f"{topology.mean_every}"
        )


def _check_task(task: Any) -> None:
    """Raises a ValueError for options that a run's config.json would not keep."""
    kind = type(task)
    if not getattr(getattr(kind, "__dataclass_params__", None), "frozen", False):
        raise ValueError(
            "Config.task must be an instance of a frozen dataclass, as by "
            f"train.fields.checked, got {task!r}"
        )
    place_of(kind)
    json.dumps(dataclasses.asdict(task), default=place_of)
    try:
        hash(task)  # A comparison keeps what it has made for a task.
    except TypeError as error:
        raise ValueError(
            f"a task's fields must not change, such as tuples and not lists, got {task}"
        ) from error


def _check_changes(rounds: RoundsConfig, patience: float | None) -> None:
    """Raises a ValueError for peers who would go on without a change of others."""
    are_changes = rounds.copies or rounds.outer != "none"
    if rounds.codec != "none" and are_changes and patience is not None:
        raise ValueError(
            f"rounds.codec = {rounds.codec} with rounds.copies or an outer optimizer "
            "sends changes, and a lost message would leave the copies of a worker "
            f"wrong: set exchange.patience to None, got {patience}"
        )


def _check_peers(step: StepConfig, topology: Topology, way: str) -> None:
    """Raises a ValueError for what takes collectives between the processes."""
    ways = {"atc": "wagma", "rounds": "arrived"}  # That of each other algorithm.
    other = ways.get(step.algorithm)
    if step.algorithm != "awc" and way != other:
        raise ValueError(
            f"{step.algorithm} with exchange.way = {way} waits for other workers, and "
            'peers wait for none; set step.algorithm to "awc", '
            + (f'exchange.way to "{other}", ' if other else "")
            + 'or exchange.where to "auto"'
        )
    if step.message_dtype is not None:
        raise ValueError(
            "peers send models in their own dtype: leave step.message_dtype at None, "
            f"got {step.message_dtype}"
        )
    if way == "wagma":
        return
    for exchange in topology:
        # A round sends a mean over a group as messages from each to each.
        can_send = (
            isinstance(exchange.between, Permutations) or step.algorithm == "rounds"
        )
        if exchange.workers_per_node > 1 or not can_send:
            raise ValueError(
                f"{topology.name} averages over groups or nodes, which takes "
                "collectives; peers need a graph of single workers, such as ring"
            )


def _check_elastic(config: Config) -> None:
    """Raises a ValueError for what needs all workers."""
    num_workers = config.workers.num_workers
    if config.step.algorithm != "awc":
        raise ValueError(
            'exchange.elastic needs step.algorithm = "awc", got '
            f"{config.step.algorithm}"
        )
    if config.exchange.quorum > num_workers:
        raise ValueError(
            f"exchange.quorum must be at most {num_workers}, the number of all "
            f"workers, got {config.exchange.quorum}"
        )
    for n in range(1, num_workers):
        try:
            config.topology.build_for(n)
        except ValueError as error:
            raise ValueError(
                "exchange.elastic needs a topology for each number of workers that may "
                f"be left, such as ring; of {n} workers: {error}"
            ) from error


def _check_at_least(config: Any, least: float, *names: str) -> None:
    for name in names:
        if not getattr(config, name) >= least:
            raise ValueError(
                f"{name} must be at least {least}, got {getattr(config, name)}"
            )
