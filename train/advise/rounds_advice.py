"""Rounds on a cluster: the step of workers that average every H steps, by codec."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Collection
from typing import NamedTuple

import jax
import numpy as np

from decentjax import Rounds, Topology, analysis, runtime
from decentjax.plan import GradientMean, rounds_of, topology_of
from decentjax.topology import complete
from train.advise.setting import Setting
from train.cli.config_json import changes
from train.config import (
    CodecName,
    RoundsMethod,
    TopologyConfig,
    TopologyName,
    WorkersConfig,
    build_plan,
    make_codec,
    sends_models,
)
from train.fields import place_of
from train.run.message_bytes import sent_bytes, sent_schedule

PLENTY = 2**20  # Numbers of a model whose codec's bytes a number are those of any.
# A mean of encoded models is a message from each worker to each: too many to plan.
MOST_ENCODED = 64

EVERY = 4, 16, 64
CODECS: tuple[CodecName, ...] = "none", "int8"


class RoundsRow(NamedTuple):
    """What a step takes and sends of workers that average every H steps.

    Args:
      name: name of the graph, or of the method.
      every_steps: H.
      codec: how messages are encoded.
      step: seconds of a step.
      speed_up: speed-up over all-reduce.
      worker_bytes: bytes per step that the busiest worker sends.
      flags: options of `decentjax train` that select it.
    """

    name: str
    every_steps: int
    codec: str
    step: float
    speed_up: float
    worker_bytes: float
    flags: str


def compare_rounds(
    setting: Setting,
    every: Collection[int],
    codecs: Collection[CodecName],
    all_reduce_step: float,
    num_steps: int,
    seed: int,
) -> list[RoundsRow]:
    """Simulates DiLoCo and a one-peer graph for each H and codec.

    DiLoCo waits for its messages; what goes to one peer is merged H steps later where a
    second thread sends it. Encoded means of many workers are left out, and models by a
    codec that drops too much of them.

    Args:
      setting: the question.
      every: numbers of steps from one round to the next, H.
      codecs: codecs of the messages.
      all_reduce_step: seconds of a step of all-reduce, for the speed-up.
      num_steps: number of simulated steps that count.
      seed: seed of the compute times.

    Raises:
      ValueError: if an H is less than 1.
    """
    num_workers = setting.cluster.num_workers
    workers = WorkersConfig(
        num_workers=num_workers,
        workers_per_node=setting.cluster.workers_per_node,
    )
    hides, rows = setting.overlap == "background", []
    row = functools.partial(_row, setting, all_reduce_step, num_steps, seed)
    for every_steps, codec in itertools.product(every, codecs):
        for graph, rounds in _methods(every_steps, codec, hides).items():
            is_encoded_mean = graph == "complete" and codec != "none"
            if is_encoded_mean and num_workers > MOST_ENCODED:
                continue
            topology = TopologyConfig(name=graph).build(workers)
            name = "DiLoCo" if rounds.outer != "none" else graph
            flags = _flags(graph, rounds)
            rows.append(row(name, rounds.over(topology), codec, flags))
    return rows + _own_rows(setting, row)


def _row(
    setting: Setting,
    all_reduce_step: float,
    num_steps: int,
    seed: int,
    name: str,
    rounds: Rounds,
    codec: str,
    flags: str,
) -> RoundsRow:
    step = _seconds(setting, rounds, num_steps, seed)
    sent, speed_up = _worker_bytes(setting, rounds), all_reduce_step / step
    return RoundsRow(name, rounds.every, codec, step, speed_up, sent, flags)


def _own_rows(setting: Setting, row: Callable[..., RoundsRow]) -> list[RoundsRow]:
    """The row of an own method; none of a mean of gradients, which is all-reduce."""
    if setting.method is None:
        return []
    plan = build_plan(setting.method, setting.cluster.num_workers)
    if isinstance(plan, GradientMean):
        return []
    rounds, place = rounds_of(plan), place_of(setting.method)
    compression = rounds.compression
    codec = "none" if compression is None else compression.form
    hides = rounds.delay > 0 and setting.overlap == "background"
    flags = f"--method {place}{' --exchange background' * hides}"
    return [row(place, rounds, codec, flags)]


def _methods(
    every: int, codec: CodecName, hides: bool
) -> dict[TopologyName, RoundsMethod]:
    """The rounds over each graph; of models none whose codec would drop too much."""
    common = functools.partial(RoundsMethod, every_steps=every, codec=codec)
    found: dict[TopologyName, RoundsMethod] = {}
    of_models = sends_models(make_codec(codec))
    # An outer optimizer moves models that have trained alone for a while.
    if every > 1 or of_models:
        found["complete"] = common(outer="nesterov" if every > 1 else "none")
    if of_models:
        late = {"delay": every, "merge": "shift"} if hides else {}
        found["one_peer_exponential"] = common(**late)
    return found


def _flags(graph: TopologyName, rounds: RoundsMethod) -> str:
    changed = changes(vars(RoundsMethod()), vars(rounds), "--method.")
    flags = [f"{name.replace('_', '-')} {value}" for name, _, value in changed]
    flags += ["--exchange background"] if rounds.delay else []
    return " ".join([f"--method rounds --topology.name {graph}", *flags])


def _seconds(setting: Setting, rounds: Rounds, num_steps: int, seed: int) -> float:
    """Returns the predicted seconds of a step, averaged over whole rounds.

    Args:
      setting: the question.
      rounds: the rounds.
      num_steps: number of simulated steps that count, or the first whole periods after
        them; a tenth is simulated before, in which the workers' lateness spreads.
      seed: seed of the compute times.
    """
    schedule, topology = sent_schedule(rounds), topology_of(rounds)
    period = schedule.period
    skipped, counted = (
        period * math.ceil(x / period) for x in (num_steps / 10, num_steps)
    )
    is_mean = topology == complete(topology.num_workers)
    cluster = setting.cluster_of(None if is_mean else topology)
    job = dataclasses.replace(setting.job, model_bytes=_model_bytes(setting, rounds))
    hidden = setting.overlap != "none"
    simulated = cluster, job, schedule, skipped + counted, seed, hidden
    return runtime.rounds(*simulated).seconds_per_step(skipped)


def _model_bytes(setting: Setting, rounds: Rounds) -> float:
    """The size of the setting's model as it is sent."""
    if rounds.compression is None and not rounds.has_hooks:
        return setting.job.model_bytes
    dtype = np.float16 if setting.bytes_per_param == 2 else np.float32
    plenty = [jax.ShapeDtypeStruct((PLENTY,), dtype)]
    per_number = sent_bytes(rounds, None, plenty) / PLENTY
    return per_number * setting.job.model_bytes / setting.bytes_per_param


def _worker_bytes(setting: Setting, rounds: Rounds) -> float:
    schedule = sent_schedule(rounds)
    exchanges = tuple(x.exchange for x in schedule.rounds if x.exchange is not None)
    size, per_node = _model_bytes(setting, rounds), setting.cluster.workers_per_node
    sent = analysis.traffic(Topology("sent", exchanges), size, per_node)
    bytes_of_workers = np.sum([x.worker_bytes for x in sent], axis=0)
    return float(bytes_of_workers.max()) / schedule.period
