"""Rounds on a cluster: the step of workers that average every H steps, by codec."""

import dataclasses
import itertools
import math
from collections.abc import Collection
from typing import Literal, NamedTuple

import jax
import numpy as np

from decentjax import Rounds, Topology, analysis, runtime
from train.advise.setting import Setting
from train.cli.config_json import changes
from train.config import RoundsConfig, TopologyConfig, TopologyName, WorkersConfig
from train.run.rounds import sent_bytes, sent_schedule

STEPS = 64  # Simulated steps of a prediction, or the first whole periods after them.
PLENTY = 2**20  # Numbers of a model whose codec's bytes a number are those of any.
# A mean of encoded models is a message from each worker to each: too many to plan.
MOST_ENCODED = 64

Codec = Literal["none", "float16", "bfloat16", "int8", "int4", "int2", "top_k"]
EVERY = 4, 16, 64
CODECS: tuple[Codec, ...] = "none", "int8"


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
    codecs: Collection[Codec],
    all_reduce_step: float,
) -> list[RoundsRow]:
    """Simulates DiLoCo and a one-peer graph for each H and codec.

    DiLoCo waits for its messages; what pairs send is merged H steps later where a
    second thread sends it.

    Args:
      setting: the question.
      every: numbers of steps from one round to the next, H.
      codecs: codecs of the messages.
      all_reduce_step: seconds of a step of all-reduce, for the speed-up.

    Raises:
      ValueError: if an H is less than 1.
    """
    num_workers = setting.cluster.num_workers
    workers = WorkersConfig(
        num_workers=num_workers,
        workers_per_node=setting.cluster.workers_per_node,
    )
    rows = []
    for every_steps, codec in itertools.product(every, codecs):
        hides = setting.overlap == "background"
        for graph, rounds in _methods(every_steps, codec, hides).items():
            is_many = graph == "complete" and num_workers > MOST_ENCODED
            if is_many and codec != "none":
                continue
            topology = TopologyConfig(name=graph).build(workers)
            step = rounds_seconds(setting, rounds, topology)
            sent = _worker_bytes(setting, rounds.build(topology))
            speed_up, flags = all_reduce_step / step, _flags(graph, rounds)
            name = "DiLoCo" if rounds.outer != "none" else graph
            rows.append(
                RoundsRow(name, every_steps, codec, step, speed_up, sent, flags)
            )
    return rows


def _methods(every: int, codec: Codec, hides: bool) -> dict[TopologyName, RoundsConfig]:
    """The rounds over each graph."""
    common = RoundsConfig(every_steps=every, codec=codec)
    pairs = dataclasses.replace(common, delay=every, merge="shift")
    # An outer optimizer moves models that have trained alone for a while.
    mean = dataclasses.replace(common, outer="nesterov" if every > 1 else "none")
    return {"complete": mean, "one_peer_exponential": pairs if hides else common}


def _flags(graph: TopologyName, rounds: RoundsConfig) -> str:
    changed = changes(vars(RoundsConfig()), vars(rounds), "--rounds.")
    flags = [f"{name.replace('_', '-')} {value}" for name, _, value in changed]
    flags += ["--exchange.where background"] if rounds.delay else []
    return " ".join([f"--step.algorithm rounds --topology.name {graph}", *flags])


def rounds_seconds(setting: Setting, rounds: RoundsConfig, topology: Topology) -> float:
    """Returns the predicted seconds of a step, averaged over whole rounds."""
    built = rounds.build(topology)
    schedule = sent_schedule(built)
    steps = schedule.period * math.ceil(STEPS / schedule.period)
    job = dataclasses.replace(setting.job, model_bytes=_model_bytes(setting, built))
    hidden = setting.overlap != "none"
    times = runtime.rounds(setting.cluster, job, schedule, steps, hidden=hidden)
    return times.seconds_per_step()


def _model_bytes(setting: Setting, rounds: Rounds) -> float:
    """The size of the setting's model as it is sent."""
    plenty = [jax.ShapeDtypeStruct((PLENTY,), np.float32)]
    return setting.job.model_bytes * sent_bytes(rounds, None, plenty) / (4 * PLENTY)


def _worker_bytes(setting: Setting, rounds: Rounds) -> float:
    schedule = sent_schedule(rounds)
    exchanges = tuple(x.exchange for x in schedule.rounds if x.exchange is not None)
    sent = analysis.traffic(
        Topology("sent", exchanges),
        _model_bytes(setting, rounds),
        setting.cluster.workers_per_node,
    )
    bytes_of_workers = np.sum([x.worker_bytes for x in sent], axis=0)
    return float(bytes_of_workers.max()) / schedule.period
