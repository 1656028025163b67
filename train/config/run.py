"""A run: all sections of a config, and checks of their combinations."""

import dataclasses
import functools
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import MISSING, field
from typing import Any, NamedTuple

import numpy as np

from decentjax import Rounds
from decentjax.gossip.merging import check_whole, sends_by_edge, swaps_of
from decentjax.gossip.peer_port import peer_graph
from decentjax.plan import GradientMean, Plan, policy_of, rounds_of, topology_of
from decentjax.topology import Topology, matrices
from train.config.checks import check_at_least
from train.config.exchange_section import (
    ApartExchange,
    AutoExchange,
    ExchangeSection,
    GroupExchange,
    PeerExchange,
    QuorumExchange,
)
from train.config.graph import MOST_EXCHANGES, TopologyConfig, WorkersConfig
from train.config.method_section import AwcMethod, MethodSection
from train.config.optimizer import OptimizerConfig
from train.config.own import build_plan
from train.config.parts import (
    CheckpointConfig,
    DataConfig,
    DistributedConfig,
    EvaluationConfig,
    LogConfig,
    StepConfig,
)
from train.config.policy_section import PlanParts
from train.fields import checked, place_of
from train.tasks.task import TaskOptions

ROUNDING = 1e-9  # Of eigenvalues.
# Optimizers that follow what the last exchange has moved.
FOLLOW_EXCHANGES = ("exact_diffusion", "qg_dsgdm")


IN_JOB = "auto", "in_step", "background"
OWN = "your own function"


class Need(NamedTuple):
    """What excludes what.

    Args:
      applies: whether the config has it.
      why: what it is, and the reason.
      fields: by name of a field, the values that go with it.
    """

    applies: bool
    why: str
    fields: dict[str, tuple[Any, ...] | range]


@checked
class Config:
    """A run.

    Args:
      name: name of the run, and of its folder under `runs`.
      num_steps: number of steps per worker.
      task: data, model, loss and evaluation.
      seed: seed of the initial model, the order of the data and all other randomness.
      method: who averages what, and when; or your own function from the number of
        workers to a plan, which also has its own graph, at the top level of a module.
      on_step: your own function, called after each step in each process with the number
        of steps done, the state of its workers, which the next step donates, and their
        metrics; at the top level of a module.
      on_evaluation: your own function, called after each evaluation in process 0, or in
        each of the peers, with the number of steps done and the scores of the mean
        model; at the top level of a module.
    """

    name: str
    num_steps: int
    task: TaskOptions
    seed: int = 0
    data: DataConfig = field(default_factory=DataConfig)
    workers: WorkersConfig = field(default_factory=WorkersConfig)
    topology: TopologyConfig = field(default_factory=TopologyConfig)
    method: MethodSection | Callable[..., Any] = field(default_factory=AwcMethod)
    step: StepConfig = field(default_factory=StepConfig)
    exchange: ExchangeSection = field(default_factory=AutoExchange)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)
    on_step: Callable[[int, Any, Any], None] | None = None
    on_evaluation: Callable[[int, dict[str, float]], None] | None = None

    def __post_init__(self):
        _check_task(self.task)
        _check_length(self)
        _check_nodes(self.workers)
        # Raises if the topology or the method does not fit the workers.
        plan = self.plan
        for need in _needs(self, plan):
            if need.applies:
                _check_need(self, need)
        if _corrects(self) == "exact_diffusion":
            _check_steady(self.graph)
        _check_apart(self, plan)

    @property
    def plan(self) -> Plan:
        """Who averages what, and when; of fragments, each stands for a leaf."""
        return self.plan_of()

    @property
    def graph(self) -> Topology:
        """The exchanges of its plan."""
        return topology_of(self.plan)

    def plan_of(self, sizes: Sequence[int] | None = None) -> Plan:
        """Returns the plan for a model.

        Args:
          sizes: numbers of each leaf of the model, see `RoundsMethod.over`.

        Raises:
          ValueError: if the method does not fit the workers or the model.
        """
        if isinstance(self.method, MethodSection):
            parts = self.topology, self.workers, self.optimizer, self.num_steps
            return self.method.build(PlanParts(*parts, sizes))
        return build_plan(self.method, self.workers.num_workers)

    def check_joint(self, why: str) -> None:
        """Raises a ValueError for peers, where all workers must train in one program.

        Args:
          why: what needs them together, for the error.
        """
        if self.is_apart:
            raise ValueError(f"{why}: use --exchange auto")

    @property
    def is_apart(self) -> bool:
        """Whether each process is a separate run."""
        return isinstance(self.exchange, ApartExchange)


def _check_length(config: Config) -> None:
    """Raises a ValueError for an invalid name, or parts that outlast the run."""
    check_at_least(config, 1, "num_steps")
    check_at_least(config, 0, "seed")
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
    warmup = config.optimizer.warmup_steps
    if not callable(config.optimizer.decay) and (warmup or 0) >= config.num_steps:
        raise ValueError(
            f"warmup_steps = {warmup} must be less than "
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


def _needs(config: Config, plan: Plan) -> list[Need]:
    """What each part of a config needs of the others."""
    rounds = None if isinstance(plan, GradientMean) else rounds_of(plan)
    coded = None if rounds is None else rounds.compression
    corrects, policy = _corrects(config), policy_of(plan)
    keeps_sums = rounds is not None and rounds.keeps_sums
    is_plain = rounds is not None and rounds.every == 1 and not rounds.has_hooks
    return [
        Need(
            rounds is None,
            "all_reduce sends gradients, and waits for all workers",
            {"step.message_dtype": (None,), "exchange": IN_JOB},
        ),
        Need(
            coded is not None,
            "messages have one form, of a codec or a dtype",
            {"step.message_dtype": (None,)},
        ),
        Need(
            rounds is not None and rounds.delay == 0 and not config.is_apart,
            "a method without a delay (of rounds method.delay) waits for its messages "
            "in the step that sends them, and a second thread would hide nothing",
            {"exchange": ("auto", "in_step")},
        ),
        Need(
            policy is not None,
            "a policy chooses the exchange of a step before it begins, in the "
            "compiled step",
            {"exchange": ("auto", "in_step")},
        ),
        Need(
            corrects in FOLLOW_EXCHANGES and not (is_plain and coded is None),
            f"optimizer.name = {corrects} uses the movement by the exchange of each "
            "step, which rounds of every_steps = 1 without codec and tracking have too",
            {"method": ("awc", "atc")},
        ),
        Need(
            keeps_sums or corrects == "exact_diffusion",
            "exact_diffusion, method.tracking and methods that keep sums add what "
            "exchanges move, including missing, rounded or non-finite parts, and "
            "changes of graph",
            {
                "method.policy": ("fixed",),
                "step.message_dtype": (None,),
                "step.not_finite": ("stop",),
                "exchange": (*IN_JOB, "peers"),
                "exchange.patience": (None,),
                "exchange.way": ("arrived",),
            },
        ),
        Need(
            coded is not None and coded.sends_changes and coded.sends_alike,
            "messages of changes are summed by their receivers, and none may be lost",
            {"exchange.patience": (None,)},
        ),
        *_needs_of_exchange(config, plan),
    ]


def _needs_of_exchange(config: Config, plan: Plan) -> list[Need]:
    """What the exchange of a config needs of the other parts."""
    exchange, is_rounds = config.exchange, isinstance(plan, Rounds)
    is_of_edges = isinstance(plan, Rounds) and sends_by_edge(plan)
    return [
        Need(
            is_of_edges,
            "low-rank messages differ between neighbors, and peers send them as swaps",
            {"exchange": (*IN_JOB, "peers"), "exchange.way": ("swaps",)},
        ),
        Need(
            is_of_edges and isinstance(exchange, PeerExchange),
            "swaps exchange whole models in every step, while the gradient is computed",
            {
                "method.every_steps": (1,),
                "method.delay": (1,),
                "method.fragments": (1,),
                "method.merge": ("replace", "shift"),
            },
        ),
        Need(
            config.is_apart,
            "peers send models in their own dtype",
            {"step.message_dtype": (None,)},
        ),
        Need(
            isinstance(exchange, PeerExchange),
            "peers do not wait for the messages of a step",
            {"method": ("awc", "rounds", OWN)},
        ),
        Need(
            isinstance(exchange, PeerExchange) and is_rounds and not is_of_edges,
            "rounds are averaged as they arrive",
            {"exchange.way": ("arrived",)},
        ),
        Need(
            isinstance(exchange, PeerExchange) and exchange.elastic,
            "elastic peers average over the graph of those that are there, and rounds "
            "of workers that come and go have exchange = quorum",
            {"method": ("awc",)},
        ),
        Need(
            isinstance(exchange, QuorumExchange),
            "a quorum merges whole models, in rounds of the workers that are there",
            {"method": ("rounds",), "method.codec": ("none",)},
        ),
        Need(
            isinstance(exchange, GroupExchange),
            "the groups are WAGMA-SGD's",
            {
                "method": ("awc", "atc"),
                "topology.make": (None,),
                "topology.name": ("butterfly_groups",),
                "topology.mean_every": range(1, MOST_EXCHANGES + 1),
            },
        ),
    ]


def _check_need(config: Config, need: Need) -> None:
    """Raises a ValueError for a field with a value that does not go with the need."""
    for name, wanted in need.fields.items():
        got: Any = functools.reduce(_part, name.split("."), config)
        place = place_of(got) if callable(got) else ""
        value = OWN if place else getattr(got, "name", got)
        if value is not MISSING and value not in wanted:
            is_number = isinstance(wanted, range)
            allowed = "a number" if is_number else " or ".join(map(str, wanted))
            got = place or value
            raise ValueError(f"{need.why}: set {name} to {allowed}, got {got}")


def _part(config: Any, name: str) -> Any:
    return getattr(config, name, MISSING)


def _corrects(config: Config) -> str:
    """The name of its optimizer; empty of an own one."""
    return "" if callable(config.optimizer.name) else config.optimizer.name


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
            "exchange, whose W has no eigenvalue of -1/3 or less: use ring with "
            f"topology.factor = 0.5, got {topology.name}, which has {what}"
        )


def _check_task(task: Any) -> None:
    """Raises a ValueError for options that config.json cannot store."""
    kind = type(task)
    if not getattr(getattr(kind, "__dataclass_params__", None), "frozen", False):
        raise ValueError(
            "Config.task must be an instance of a frozen dataclass, as by "
            f"train.fields.checked, got {task!r}"
        )
    place_of(kind)
    json.dumps(dataclasses.asdict(task), default=place_of)
    try:
        hash(task)  # A comparison caches what it has built for a task.
    except TypeError as error:
        raise ValueError(
            f"a task's fields must not change, such as tuples and not lists, got {task}"
        ) from error


def _check_apart(config: Config, plan: Plan) -> None:
    """Raises a ValueError for what processes without a job cannot do."""
    exchange, num_workers = config.exchange, config.workers.num_workers
    if not isinstance(exchange, PeerExchange | QuorumExchange):
        return
    peer_graph(topology_of(plan), takes_groups=isinstance(plan, Rounds))
    if isinstance(exchange, PeerExchange) and exchange.way == "swaps":
        swaps_of(plan)  # For its errors.
    else:
        check_whole(rounds_of(plan), math.inf if exchange.patience is None else 0)
    if exchange.elastic:
        _check_places(config, exchange.quorum_of(num_workers))
    if isinstance(exchange, QuorumExchange):
        exchange.build_merge(num_workers).check(num_workers)


def _check_places(config: Config, quorum: int) -> None:
    """Raises a ValueError unless workers may come and go, down to a quorum."""
    num_workers = config.workers.num_workers
    if quorum > num_workers:
        raise ValueError(
            f"exchange.quorum must be at most {num_workers}, the number of all "
            f"workers, got {quorum}"
        )
    for n in range(1, num_workers):
        try:
            config.topology.build_for(n)
        except ValueError as error:
            raise ValueError(
                "workers that come and go need a topology for each number that may be "
                f"left, such as ring; for {n} workers: {error}"
            ) from error
