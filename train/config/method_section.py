"""The method: who averages what, and when."""

from collections.abc import Sequence
from dataclasses import field
from typing import TYPE_CHECKING, ClassVar, Literal

import optax

from decentjax import Rounds
from decentjax import codec as codecs
from decentjax import topology as topologies
from decentjax.codec import Codec
from decentjax.compression import (
    LEAST_KEPT,
    Compression,
    LowRank,
    copies,
    drift,
    error_feedback,
    low_rank,
)
from decentjax.methods import Tracking, all_reduce
from decentjax.plan import GradientMean
from decentjax.policy import Policy
from decentjax.rounds import Merge, blend, cut_leaves, replace, shift
from decentjax.topology import Topology
from train.config.checks import check_at_least, check_at_most
from train.config.graph import MOST_EXCHANGES
from train.config.policy_section import FixedPolicy, PlanParts, PolicySection
from train.fields import checked


def _codec_names() -> tuple[str, ...]:
    """The functions of `decentjax.codec` that make a codec without an argument."""
    kinds = {
        x: getattr(codecs, x).__annotations__.get("return") for x in codecs.__all__
    }
    return tuple(x for x, kind in kinds.items() if kind is Codec and x != "exact")


if TYPE_CHECKING:
    CodecName = str  # A type checker cannot call a function for the names.
else:
    CodecName = Literal["none", *_codec_names()]


def make_codec(name: CodecName, share: float = 0.01, bits: int = 32) -> Codec:
    """Returns a codec by its name; "none" sends numbers as they are.

    Args:
      name: the name.
      share: share of the numbers that "top_k" sends.
      bits: bits of each of them.
    """
    if name == "none":
        return codecs.exact()
    if name == "top_k":
        values = None if bits == 32 else make_codec(f"int{bits}")
        return codecs.top_k(share, values=values)
    return getattr(codecs, name)()


def _low_rank(rank: int, bits: int) -> LowRank:
    return low_rank(rank, "bfloat16" if bits == 16 else None)


def sends_models(codec: Codec) -> bool:
    """Whether models sent by the codec converge."""
    return codec.keeps >= LEAST_KEPT


@checked
class EveryStepMethod:
    """Averages of the models in every step."""

    policy: PolicySection = field(default_factory=FixedPolicy)


@checked
class AwcMethod(EveryStepMethod):
    """Averages of the models while the gradient is computed.

    Args:
      policy: the graph of each step.
    """

    name: ClassVar[str] = "awc"

    def build(self, parts: PlanParts) -> Topology | Policy:
        """Returns the plan."""
        return self.policy.build(parts)


@checked
class AtcMethod(EveryStepMethod):
    """Averages of the models after the update.

    Args:
      policy: the graph of each step.
    """

    name: ClassVar[str] = "atc"

    def build(self, parts: PlanParts) -> Rounds:
        """Returns the plan."""
        return Rounds(self.policy.build(parts))


@checked
class AllReduceMethod:
    """The mean of the gradients of all workers, the baseline.

    Args:
      rank: rank of the factors that are sent in place of gradients, as PowerSGD; None
        sends gradients.
      sent_bits: bits of each number of the factors, 32 or 16.
      begin_at: number of steps with whole gradients at the start.
    """

    name: ClassVar[str] = "all_reduce"

    rank: int | None = None
    sent_bits: Literal[32, 16] = 32
    begin_at: int = 0

    def __post_init__(self):
        if self.rank is not None:
            check_at_least(self, 1, "rank")
        elif self.sent_bits != 32 or self.begin_at:
            raise ValueError(
                "method.sent_bits and method.begin_at are of low-rank factors: set "
                "method.rank too, or leave them out"
            )
        check_at_least(self, 0, "begin_at")

    def build(self, parts: PlanParts) -> GradientMean:
        """Returns the plan."""
        count = parts.workers.num_workers
        if self.rank is None:
            return all_reduce(count)
        return all_reduce(count, _low_rank(self.rank, self.sent_bits), self.begin_at)


@checked
class RoundsMethod:
    """Averages of the models every few steps; see `decentjax.rounds`.

    Args:
      every_steps: H, number of steps between rounds, of each fragment.
      fragments: number of parts of the model, which are sent in turn.
      delay: number of steps until messages are merged, at most H; 0 merges them at
        once.
      outer: optimizer of the shared model: "nesterov" and "heavy_ball" have momentum,
        "none" takes the average unchanged. DiLoCo is "nesterov" with topology.name =
        "complete", NoLoCo "heavy_ball" with "random_matching".
      learning_rate: learning rate of the outer optimizer.
      momentum: its momentum.
      merge: how a worker continues: "replace" takes the result, "shift" adds what the
        worker has learned since it sent, "blend" and a share of the worker's own model
        are `share x + (1 - share) result`.
      codec: how messages are encoded: 16, 8, 4 or 2 bits per number, or the largest
        numbers; the error of a message is sent later. With an outer optimizer it
        encodes how far a worker has moved, and needs means of all models. "int2" and
        "top_k" need one, or `copies`, as their error on whole models is too large.
        "low_rank" sends low-rank differences between neighbors, over a graph whose
        edges recur, such as ring.
      rank: rank of the messages of "low_rank".
      sent_share: share of the numbers that "top_k" sends.
      sent_bits: bits of each of them, in addition to its index, or of each number of
        "low_rank", 32 or 16.
      error_kept: part of the error that is sent later.
      copies: step in (0, 1] towards the average of copies that peers keep, to which
        changes are sent, as in CHOCO-SGD; for a graph that never changes. "auto" is the
        share of a number that the codec keeps, such as 0.5 for "int2" and `sent_share`
        for "top_k"; None has no copies.
      tracking: whether workers descend along an estimate of the mean gradient, which is
        averaged with the model: gradient tracking, for heterogeneous data; without a
        codec, and between peers only if they wait for all.
    """

    name: ClassVar[str] = "rounds"

    every_steps: int = 10
    fragments: int = 1
    delay: int = 0
    outer: Literal["none", "nesterov", "heavy_ball"] = "none"
    learning_rate: float = 0.7
    momentum: float = 0.9
    merge: Literal["replace", "shift"] | tuple[Literal["blend"], float] = "replace"
    codec: CodecName | Literal["low_rank"] = "none"
    rank: int = 16
    sent_share: float = 0.01
    sent_bits: Literal[32, 16, 8, 4, 2] = 32
    error_kept: float = 1.0
    copies: float | Literal["auto"] | None = None
    tracking: bool = False

    def __post_init__(self):
        check_at_least(self, 1, "every_steps", "fragments")
        check_at_most(self, MOST_EXCHANGES, "every_steps", "fragments")
        check_at_least(self, 0, "error_kept")
        step = 1.0 if self.copies in (None, "auto") else self.copies
        if self.error_kept > 1 or not 0 < step <= 1:
            raise ValueError(
                "error_kept must be in [0, 1] and copies in (0, 1], got "
                f"{self.error_kept} and {self.copies}"
            )
        if self.copies is not None and (self.codec == "none" or self.outer != "none"):
            raise ValueError(
                "method.copies needs encoded models: set method.codec, and "
                'method.outer to "none"'
            )
        self._check_low_rank()
        of_models = self.outer == "none" and self.copies is None
        if of_models and self.codec != "low_rank" and not sends_models(self._codec()):
            raise ValueError(
                f"method.codec = {self.codec} has too large an error on models, and "
                "workers would diverge: set method.copies to auto, for a graph that "
                "never changes, "
                'method.outer with topology.name = "complete", or method.codec to int8'
            )
        if self.tracking and self.codec != "none":
            raise ValueError(
                "method.tracking sends models and estimates unencoded: leave "
                f"method.codec at none, got {self.codec}"
            )
        check_at_least(self, 0, "delay", "learning_rate", "momentum")
        self._merge()  # For its errors.
        if not self.momentum < 1:
            raise ValueError(
                f"method.momentum must be less than 1, got {self.momentum}"
            )
        self._check_used()
        # Raises for a delay that is longer than a round.
        Rounds(topologies.ring(1), self.every_steps, self.delay)
        if self.outer != "none" and self.every_steps == 1:
            raise ValueError(
                f"method.outer = {self.outer} moves models that have trained alone "
                "since the last round: set method.every_steps to 2 or more"
            )

    def build(self, parts: PlanParts) -> Rounds:
        """Returns the plan.

        Raises:
          ValueError: if the topology does not fit, or no leaf falls into a fragment.
        """
        return self.over(parts.graph, parts.sizes)

    def over(self, topology: Topology, sizes: Sequence[int] | None = None) -> Rounds:
        """Returns the rounds over a topology.

        Args:
          topology: the topology.
          sizes: numbers of each leaf of the model; by default each fragment is a leaf.

        Raises:
          ValueError: if the topology does not fit, or no leaf falls into a fragment.
        """
        fragments = None
        if self.fragments > 1:
            leaves = [1] * self.fragments if sizes is None else sizes
            fragments = cut_leaves(leaves, self.fragments)
        when = self.every_steps, self.delay, fragments
        how = self._outer(), self._merge(), self._compression()
        return (Tracking if self.tracking else Rounds)(topology, *when, *how)

    def _outer(self) -> optax.GradientTransformation | None:
        if self.outer == "none":
            return None
        looks_ahead = self.outer == "nesterov"
        return optax.sgd(self.learning_rate, self.momentum, nesterov=looks_ahead)

    def _merge(self) -> Merge:
        if isinstance(self.merge, tuple):
            return blend(self.merge[1])
        return {"replace": replace, "shift": shift}[self.merge]

    def _check_low_rank(self) -> None:
        """Raises a ValueError for parts that do not fit a codec."""
        check_at_least(self, 1, "rank")
        is_low = self.codec == "low_rank"
        if is_low and (self.outer != "none" or self.copies is not None):
            raise ValueError(
                'method.codec = low_rank needs models: set method.outer to "none", and '
                "leave out method.copies"
            )
        bits = (16, 32) if is_low else (2, 4, 8, 32)
        if self.sent_bits not in bits:
            raise ValueError(
                f"method.sent_bits of {self.codec} must be one of {bits}, got "
                f"{self.sent_bits}"
            )

    def _codec(self) -> Codec:
        return make_codec(self.codec, self.sent_share, self.sent_bits)

    def _compression(self) -> Compression | None:
        if self.codec == "none":
            return None
        if self.codec == "low_rank":
            return _low_rank(self.rank, self.sent_bits)
        if self.copies is not None:
            return copies(self._codec(), None if self.copies == "auto" else self.copies)
        encoded = error_feedback if self.outer == "none" else drift
        return encoded(self._codec(), keep=self.error_kept)

    def _check_used(self) -> None:
        """Raises a ValueError for a number that nothing would use."""
        is_used = {
            "learning_rate": ("outer", self.outer != "none"),
            "momentum": ("outer", self.outer != "none"),
            "sent_share": ("codec", self.codec == "top_k"),
            "sent_bits": ("codec", self.codec in ("top_k", "low_rank")),
            "rank": ("codec", self.codec == "low_rank"),
            "error_kept": ("codec", self.codec != "low_rank"),
        }
        for name, (of, used) in is_used.items():
            if not used and getattr(self, name) != getattr(type(self), name):
                raise ValueError(
                    f"method.{of} = {getattr(self, of)} has no {name}: set method.{of} "
                    f"too, or leave out method.{name}"
                )


MethodSection = AwcMethod | AtcMethod | RoundsMethod | AllReduceMethod
