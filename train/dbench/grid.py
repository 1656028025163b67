"""The cells of a grid: a graph at a scale, as a config."""

import dataclasses
import functools
import re
from typing import Any, Literal, NamedTuple

from train.cli.changes import with_fields
from train.cli.load import load_function
from train.cli.sections import KINDS
from train.config import (
    AllReduceMethod,
    AwcMethod,
    Config,
    FixedPolicy,
    MethodSection,
    TopologyConfig,
)
from train.fields import place_of

HeldBatch = Literal["local", "global"]
Scaling = Literal["none", "linear", "sqrt"]
ALL_REDUCE = "all_reduce"
OWN = "own"  # The config's own graph, whether named or made by a function, and policy.
POWERS: dict[Scaling, float] = {"none": 0.0, "sqrt": 0.5, "linear": 1.0}
# These have graphs of their own.
OWN_GRAPHS = {ALL_REDUCE, "thinning", "holding"}
POLICIES = KINDS["method.policy"].keys() - {"fixed"}


class Cell(NamedTuple):
    """A graph at a scale.

    Args:
      graph: name of the graph, as it was given.
      num_workers: N.
      config: config of its runs; None where the scale cannot have the graph.
      reason: why it cannot.
    """

    graph: str
    num_workers: int
    config: Config | None
    reason: str = ""

    @property
    def name(self) -> str:
        """Name of the cell, and of its file."""
        return f"{re.sub('[^A-Za-z0-9_]+', '-', self.graph)}-{self.num_workers}"


@dataclasses.dataclass(frozen=True)
class Graphs:
    """The graphs of a grid, by name.

    Args:
      config: config whose number of workers, batch and learning rate are the base.
      given: names of graphs, see `graph_fields`.
    """

    config: Config
    given: tuple[str, ...]

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        """The graphs, with the config's own function under its name.

        It comes first where it is not among them as "own".
        """
        config = self.config
        make = config.method if callable(config.method) else config.topology.make
        if make is None:
            return self.given
        place = place_of(make)
        named = [
            re.sub(rf"^{OWN}(?=@|$)", lambda _: place, name) for name in self.given
        ]
        has_own = any(name.partition("@")[0] == place for name in named)
        return (*named,) if has_own else (place, *named)

    def left_out(self) -> str | None:
        """Says that no graph is the config's own with its policy, if that is so."""
        if callable(self.config.method):
            return None
        named = {graph.partition("@")[0] for graph in self.names}
        wanted = graph_fields(self.config, OWN)
        if wanted in [graph_fields(self.config, name) for name in named]:
            return None
        name = self.config.topology.name
        policy = getattr(self.config.method, "policy", FixedPolicy())
        also = "" if policy == FixedPolicy() else f" by the policy {policy.name}"
        return f"left out: the config's own graph, {name}{also}; --graphs {OWN} is that"

    def cells(
        self, workers: tuple[int, ...], batch: HeldBatch, scaling: Scaling
    ) -> list[Cell]:
        """Returns the cells, by scale and graph.

        Args:
          workers: numbers of workers.
          batch: whether a worker's batch stays, or that of all workers together.
          scaling: power of N over the base by which the learning rate is scaled.

        Raises:
          ValueError: if a name is unknown, or the rules contradict each other.
        """
        self._check(batch, scaling)
        for name, given in (("graphs", self.names), ("workers", workers)):
            if not given or len(set(given)) < len(given):
                raise ValueError(f"--{name} needs different values, got {given}")
        if min(workers) < 1:
            raise ValueError(f"--workers must be at least 1 each, got {workers}")
        # A name that is unknown is an error before anything runs.
        fields = {graph: graph_fields(self.config, graph) for graph in self.names}
        return [
            self._cell(Cell(graph, count, None), fields[graph], batch, POWERS[scaling])
            for count in workers
            for graph in self.names
        ]

    def _check(self, batch: HeldBatch, scaling: Scaling) -> None:
        if callable(self.config.optimizer.decay) and scaling != "none":
            raise ValueError(
                f"--scaling {scaling} scales optimizer.learning-rate, but the config "
                "has its own schedule: leave out one of them"
            )
        if batch == "global" and scaling != "none":
            raise ValueError(
                f"--scaling {scaling} follows the batch of all workers, which --batch "
                "global holds: leave one of them out"
            )
        self.config.check_joint(
            "all workers of a grid train in lockstep, and peers have decentjax compare "
            "with --clock"
        )

    def _cell(
        self, cell: Cell, fields: dict[str, Any], batch: HeldBatch, power: float
    ) -> Cell:
        """The cell with a config, or the reason why it has none."""
        config, count = self.config, cell.num_workers
        base, optimizer = config.workers, config.optimizer
        step = fields.get("step", config.step)
        if count % base.workers_per_node:
            why = f"{count} workers do not fill nodes of {base.workers_per_node}"
            return cell._replace(reason=why)
        if batch == "global":
            size, rest = divmod(step.batch_per_worker * base.num_workers, count)
            if rest or not size:
                why = f"{step.batch_per_worker * base.num_workers} examples for {count}"
                why = f"the batch of all cannot be shared: {why}"
                return cell._replace(reason=why)
            step = dataclasses.replace(step, batch_per_worker=size)
            fields = {**fields, "step": step}
        rate = optimizer.learning_rate * (count / base.num_workers) ** power
        try:
            made = dataclasses.replace(
                config,
                name=cell.name,
                workers=dataclasses.replace(base, num_workers=count),
                optimizer=dataclasses.replace(optimizer, learning_rate=rate),
                **fields,
            )
        except ValueError as error:
            return cell._replace(reason=str(error))
        return cell._replace(config=made)


def graph_fields(config: Config, graph: str) -> dict[str, Any]:
    """Returns the fields of a config that a graph's name sets.

    A name is "all_reduce", a function of `decentjax.topology`, a policy, with options
    as in `thinning:degree=16`, by default those of the config, a function FILE.py:NAME,
    or "own" for the config's graph; `@10` after it adds a mean of all models at each
    tenth step.

    Raises:
      ValueError: if there is no such graph.
    """
    named, at, period = graph.partition("@")
    name, *options = named.split(":")
    if at and (not re.fullmatch("0*[1-9][0-9]*", period) or name in OWN_GRAPHS):
        raise ValueError(f"wanted GRAPH or GRAPH@STEPS, such as ring@10, got {graph!r}")
    make = None
    if options and name not in POLICIES and "=" not in named:
        make, options = load_function(named, "--graphs"), []
        if make is config.method:
            return _of_method(graph)
    if options and name not in POLICIES:
        raise ValueError(
            f"only the policies {', '.join(sorted(POLICIES))} take options, as in "
            f"thinning:degree=16, got {graph!r}"
        )
    topology = config.topology
    method = AwcMethod() if callable(config.method) else config.method
    if isinstance(method, AllReduceMethod):
        raise ValueError(
            "the config's own method averages gradients: give one with method awc or "
            f'atc, and "{ALL_REDUCE}" as a graph'
        )
    if name == ALL_REDUCE:
        method = AllReduceMethod()
        topology = TopologyConfig(name="complete")
    elif name in OWN_GRAPHS:  # The config's topology may not fit the scale.
        topology = dataclasses.replace(topology, name="complete", make=None)
    elif make is not None:
        topology = dataclasses.replace(topology, make=make)
    elif name not in POLICIES and name != OWN:
        # Its own function would go before any name.
        topology = dataclasses.replace(topology, name=name, make=None)
    is_own = name == OWN or (make is not None and make is config.topology.make)
    if name in POLICIES:
        method = _with_policy(config, method, name, options)
    elif hasattr(method, "policy") and not is_own:
        method = dataclasses.replace(method, policy=FixedPolicy())
    if period:
        topology = dataclasses.replace(topology, mean_every=int(period))
    return {"topology": topology, "method": method}


def _of_method(graph: str) -> dict[str, Any]:
    """The fields that the config's own method sets: none, as it has its own graph."""
    if "@" in graph:
        raise ValueError(f"a method has its own graph, without means, got {graph!r}")
    return {}


def _with_policy(
    config: Config, method: MethodSection, name: str, options: list[str]
) -> Any:
    pairs = [option.partition("=") for option in options]
    given = {f"policy.{field}": value for field, _, value in pairs}
    config = dataclasses.replace(config, method=method)
    values = {"policy": name, **given}
    return with_fields(config, values, prog=f"--graphs {name}").method
