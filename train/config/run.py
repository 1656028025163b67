"""A run: all sections of a config, and checks of their combinations."""

import dataclasses
import json
import math
from collections.abc import Callable
from dataclasses import field
from typing import Any, NamedTuple

import numpy as np

from decentjax import Rounds
from decentjax.plan import GradientMean, Plan, topology_of
from decentjax.topology import Permutations, Topology, matrices
from train.config.checks import check_at_least
from train.config.exchange_section import (
    ApartExchange,
    AutoExchange,
    BackgroundExchange,
    ExchangeSection,
    GroupExchange,
    PeerExchange,
    QuorumExchange,
)
from train.config.graph import TopologyConfig, WorkersConfig
from train.config.optimizer import OptimizerConfig
from train.config.own import build_plan
from train.config.parts import (
    CheckpointConfig,
    DataConfig,
    DistributedConfig,
    EvaluationConfig,
    LogConfig,
    StepConfig,
    StragglerConfig,
)
from train.config.policy_section import FixedPolicy, PolicySection
from train.config.rounds_section import RoundsConfig
from train.fields import checked, place_of
from train.tasks.task import TaskOptions

ROUNDING = 1e-9  # Of eigenvalues.
# Optimizers that follow what the last exchange has moved.
FOLLOW_EXCHANGES = ("exact_diffusion", "qg_dsgdm")


class Algorithm(NamedTuple):
    """What a config averages.

    Args:
      name: as `step.algorithm`; of an own method that of its kind of plan.
      graph: its exchanges, whatever a policy chooses.
      rounds: its rounds; None without any.
    """

    name: str
    graph: Topology
    rounds: Rounds | None


@checked
class Config:
    """A run.

    Args:
      name: name of the run, and of its folder under `runs`.
      num_steps: number of steps per worker.
      task: data, model, loss and evaluation.
      seed: seed of the initial model, the order of the data and all other randomness.
      method: your own function from the number of workers to a plan, in the place of
        the topology, the algorithm, the rounds and the policy; at the top level of a
        module. On the command line it is `--method FILE.py:NAME`.
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
    policy: PolicySection = field(default_factory=FixedPolicy)
    step: StepConfig = field(default_factory=StepConfig)
    rounds: RoundsConfig = field(default_factory=RoundsConfig)
    exchange: ExchangeSection = field(default_factory=AutoExchange)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)
    straggler: StragglerConfig = field(default_factory=StragglerConfig)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)
    method: Callable[..., Any] | None = None
    on_step: Callable[[int, Any, Any], None] | None = None
    on_evaluation: Callable[[int, dict[str, float]], None] | None = None

    def __post_init__(self):
        _check_task(self.task)
        _check_length(self)
        _check_nodes(self.workers)
        _check_method(self)
        # Raises if the topology or the plan does not fit the workers.
        algorithm = self.algorithm
        _check_messages(self, algorithm)
        _check_correction(self, algorithm)
        match self.exchange:
            case PeerExchange():
                _check_peers(self, algorithm)
            case QuorumExchange():
                _check_quorum(self, self.exchange, algorithm.rounds)
            case GroupExchange():
                _check_groups(self)

    @property
    def plan(self) -> Plan | None:
        """The plan of an own method; None without one."""
        if self.method is None:
            return None
        return build_plan(self.method, self.workers.num_workers)

    @property
    def algorithm(self) -> Algorithm:
        """What is averaged; of rounds in fragments, each stands for a leaf."""
        plan, name = self.plan, self.step.algorithm
        if plan is None:
            graph = self.topology.build(self.workers)
            rounds = self.rounds.build(graph) if name == "rounds" else None
            return Algorithm(name, graph, rounds)
        if isinstance(plan, Rounds):
            return Algorithm("rounds", topology_of(plan), plan)
        name = "all_reduce" if isinstance(plan, GradientMean) else "awc"
        return Algorithm(name, topology_of(plan), None)

    @property
    def is_apart(self) -> bool:
        """Whether each process is a separate run."""
        return isinstance(self.exchange, ApartExchange)

    @property
    def is_elastic(self) -> bool:
        """Whether processes may join and leave."""
        match self.exchange:
            case PeerExchange(elastic=elastic):
                return elastic
            case _:
                return isinstance(self.exchange, QuorumExchange)


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


def _check_method(config: Config) -> None:
    """Raises a ValueError for options that say in part what an own method says."""
    if config.method is None:
        return
    others = {
        "step.algorithm": config.step.algorithm != StepConfig().algorithm,
        "rounds": config.rounds != RoundsConfig(),
        "policy": not isinstance(config.policy, FixedPolicy),
    }
    if given := [name for name, is_given in others.items() if is_given]:
        raise ValueError(
            f"method = {place_of(config.method)} is a whole algorithm: leave "
            f"{' and '.join(given)} at the default, or leave out the method"
        )
    if config.is_elastic or isinstance(config.exchange, GroupExchange):
        raise ValueError(
            f"exchange = {config.exchange.name} makes its own plan for the workers "
            f"that are there, and method = {place_of(config.method)} is another: use "
            "exchange = peers that are not elastic, or --topology for a graph"
        )


def _check_messages(config: Config, of: Algorithm) -> None:
    """Raises a ValueError for messages that the algorithm cannot send."""
    algorithm, rounds, exchange = of.name, of.rounds, config.exchange
    at_once = rounds is not None and rounds.delay == 0
    is_beside = isinstance(exchange, BackgroundExchange)
    if is_beside and (algorithm == "atc" or at_once):
        raise ValueError(
            f"{algorithm} waits for its messages in the step that sends them, so "
            'nothing overlaps a background exchange; set exchange to "in_step"'
            + (", or rounds.delay to 1 or more" if at_once else "")
        )
    chooses = not isinstance(config.policy, FixedPolicy)
    if chooses and (is_beside or config.is_apart or algorithm not in ("awc", "atc")):
        raise ValueError(
            f"the policy {config.policy.name} chooses the exchange of a step before it "
            "begins: it needs one in the compiled step, exchange = in_step, got "
            f"{exchange.name} with {algorithm}"
        )
    if config.step.message_dtype is None:
        return
    if algorithm == "all_reduce":
        raise ValueError("all_reduce sends gradients: leave message_dtype at None")
    if rounds is not None and rounds.compression is not None:
        raise ValueError(
            "messages have one form: leave step.message_dtype at None, or "
            'rounds.codec at "none"'
        )


def _check_correction(config: Config, of: Algorithm) -> None:
    """Raises a ValueError for corrections that the exchange would break."""
    name = config.optimizer.name if config.optimizer.make is None else ""
    step, rounds = config.step, of.rounds
    tracks = rounds is not None and rounds.keeps_sums
    plain = rounds is None or (
        rounds.every == 1 and rounds.compression is None and not rounds.has_hooks
    )
    in_each_step = of.name != "all_reduce" and plain
    if name in FOLLOW_EXCHANGES and not in_each_step:
        raise ValueError(
            f"optimizer.name = {name} uses the movement by the exchange of each "
            'step: set step.algorithm to "awc" or "atc", or rounds.every_steps to 1 '
            f"without codec and tracking, got {_averages(config)}"
        )
    if name == "exact_diffusion":
        _check_steady(of.graph)
    if name != "exact_diffusion" and not tracks:
        return
    needed = {
        "policy": (config.policy.name, "fixed"),
        "step.message_dtype": (step.message_dtype, None),
        "step.not_finite": (step.not_finite, "stop"),
    }
    match config.exchange:
        case PeerExchange(patience=patience, way=way):
            needed |= {"exchange.patience": (patience, None)}
            needed |= {"exchange.way": (way, "arrived")}
        case GroupExchange() | QuorumExchange():
            needed |= {"exchange": (config.exchange.name, "peers")}
    for name, (got, wanted) in needed.items():
        if got != wanted:
            raise ValueError(
                "exact_diffusion, rounds.tracking and methods that keep sums add what "
                "exchanges move, including missing, rounded or non-finite parts, and "
                "changes of graph: "
                f"set {name} to {wanted}, got {got}"
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


def _averages(config: Config) -> str:
    """What a config averages, for errors."""
    rounds = config.rounds
    if config.method is not None:
        return f"method = {place_of(config.method)}"
    return (
        f"{config.step.algorithm} with {rounds.every_steps}, {rounds.codec} and "
        f"{rounds.tracking}"
    )


def _coded(config: Config) -> str:
    """What encodes the messages of a config, for errors."""
    if config.method is not None:
        return f"method = {place_of(config.method)}"
    codec = config.rounds.codec
    return f"rounds.codec = {codec} with rounds.copies or an outer optimizer"


def _check_peers(config: Config, of: Algorithm) -> None:
    """Raises a ValueError for options that need collectives between processes."""
    exchange, topology, rounds = config.exchange, of.graph, of.rounds
    assert isinstance(exchange, PeerExchange)
    _check_apart(config, "awc", "rounds")
    for one in topology:
        # A round sends a mean over a group as messages between all members.
        can_send = isinstance(one.between, Permutations) or rounds is not None
        if one.workers_per_node > 1 or not can_send:
            raise ValueError(
                f"{topology.name} averages over groups or nodes, which takes "
                "collectives; peers need a graph of single workers, such as ring"
            )
    compression = None if rounds is None else rounds.compression
    if (
        compression is not None
        and compression.kind.sends_changes
        and exchange.patience is not None
    ):
        raise ValueError(
            f"{_coded(config)} sends changes, and a lost message would leave the "
            "copies of a worker wrong: set exchange.patience to None, got "
            f"{exchange.patience}"
        )
    if rounds is not None and exchange.way != "arrived":
        raise ValueError(
            "rounds are averaged as they arrive: set exchange.way to arrived, got "
            f"{exchange.way}"
        )
    if exchange.elastic:
        _check_elastic(config, exchange)


def _check_quorum(
    config: Config, exchange: QuorumExchange, rounds: Rounds | None
) -> None:
    """Raises a ValueError for rounds that cannot end without late workers."""
    _check_apart(config, "rounds")
    if rounds is not None and rounds.compression is not None:
        raise ValueError(
            "a quorum merges whole models: leave rounds.codec at none, got "
            f"{config.rounds.codec}"
        )
    num_workers = config.workers.num_workers
    merge = exchange.merge(num_workers)
    _check_places(config, merge.count)
    merge.check(num_workers)


def _check_groups(config: Config) -> None:
    """Raises a ValueError for groups other than WAGMA-SGD's."""
    _check_apart(config, "awc", "atc")
    topology = config.topology
    if (
        topology.name != "butterfly_groups"
        or topology.make is not None
        or topology.mean_every is None
    ):
        raise ValueError(
            'exchange = "groups" needs topology.name = "butterfly_groups" and '
            f"topology.mean_every, got {topology.name} and {topology.mean_every}"
        )


def _check_apart(config: Config, *algorithms: str) -> None:
    """Raises a ValueError for options that processes without a job do not support."""
    step, name = config.step, config.exchange.name
    algorithm = config.algorithm.name
    if algorithm not in algorithms:
        raise ValueError(
            f"{algorithm} with exchange = {name} waits for other workers, and "
            f"processes of {name} do not wait; set step.algorithm to "
            f'{" or ".join(algorithms)}, or exchange to "auto"'
        )
    if step.message_dtype is not None:
        raise ValueError(
            "peers send models in their own dtype: leave step.message_dtype at None, "
            f"got {step.message_dtype}"
        )


def _check_elastic(config: Config, exchange: PeerExchange) -> None:
    """Raises a ValueError for options that need all workers."""
    if config.step.algorithm != "awc":
        raise ValueError(
            'exchange.elastic needs step.algorithm = "awc"; rounds of workers that '
            "come and go have exchange = quorum, got "
            f"{config.step.algorithm}"
        )
    _check_places(config, exchange.quorum)


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
