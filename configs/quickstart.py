"""A byte-level GPT on the Python standard library, 8 workers as 2 nodes of 4.

Command: `decentjax train quickstart`
Hardware: 2 cores of an AMD EPYC; all workers simulated on one device.
Wall time: 55 to 85 s, compilation, evaluation and report included, the latter beside
other work (Python 3.11, jax 0.10.2).
Result: 2.233 held-out bits per byte of the mean model and of single workers; a count
model of order 2, counted on the whole text, has 2.630, one of order 1 has 3.532.

Per step: 8 workers * 4 windows * 32 bytes = 1,024 bytes; in 2,000 steps 2 MB, a fifth
of the text. The learning rate is the best of four, see docs/results/quickstart.md.
"""

import dataclasses

from train.config import (
    AllReduceMethod,
    CheckpointConfig,
    Config,
    EvaluationConfig,
    OptimizerConfig,
    RoundsMethod,
    StepConfig,
    TopologyConfig,
    WorkersConfig,
)
from train.models.gpt import GPTConfig
from train.tasks.stdlib import StdlibTask

config = Config(
    name="quickstart",
    num_steps=2000,
    task=StdlibTask(
        model=GPTConfig(context=32, num_layers=2, num_heads=4, width=64, init_std=0.12)
    ),
    workers=WorkersConfig(num_workers=8, workers_per_node=4),
    topology=TopologyConfig(name="alternating_exponential_ring"),
    step=StepConfig(batch_per_worker=4),
    optimizer=OptimizerConfig(
        name="adamw",
        learning_rate=1e-2,
        final_learning_rate=2.5e-4,
        warmup_steps=50,
        b2=0.99,
    ),
    evaluation=EvaluationConfig(every_steps=500),
    checkpoint=CheckpointConfig(every_steps=1000),
)
# AccumAdamW: the moments move once in two steps. 2.279 held-out bits per byte of the
# mean model, 2.279 to 2.280 of single workers, in 89 s beside other work.
quickstart_accum = dataclasses.replace(
    config,
    name="quickstart_accum",
    optimizer=dataclasses.replace(config.optimizer, name="accum_adamw", accum_steps=2),
)
# All-reduce: every step averages the gradients of all workers. 2.195 held-out bits per
# byte of the one model that all workers share, in 49 s.
quickstart_allreduce = dataclasses.replace(
    config,
    name="quickstart_allreduce",
    topology=dataclasses.replace(config.topology, name="complete"),
    method=AllReduceMethod(),
    optimizer=dataclasses.replace(config.optimizer, learning_rate=5e-3),
)
# A graph of single workers, whose messages are encoded. `decentjax compare
# quickstart_codec --seeds 3 --vary method.codec none int8 int4`: 2.259 +- 0.012, 2.258
# +- 0.020 and 2.454 +- 0.038 held-out bits per byte.
quickstart_codec = dataclasses.replace(
    config,
    name="quickstart_codec",
    topology=TopologyConfig(name="one_peer_exponential"),
    method=RoundsMethod(every_steps=1, delay=1, merge="shift"),
)
# DiLoCo: AdamW alone for 50 steps, then Nesterov's outer step.
quickstart_diloco = dataclasses.replace(
    config,
    name="quickstart_diloco",
    topology=TopologyConfig(name="complete"),
    method=RoundsMethod(every_steps=50, outer="nesterov"),
    optimizer=dataclasses.replace(config.optimizer, learning_rate=2.5e-3),
)
# NoLoCo: AdamW alone for 50 steps, then an outer step in pairs.
quickstart_noloco = dataclasses.replace(
    quickstart_diloco,
    name="quickstart_noloco",
    topology=TopologyConfig(name="random_matching"),
    method=RoundsMethod(every_steps=50, outer="heavy_ball", momentum=0.5),
)
# Streaming DiLoCo: four fragments, each hidden behind five steps.
quickstart_streaming = dataclasses.replace(
    quickstart_diloco,
    name="quickstart_streaming",
    method=RoundsMethod(
        every_steps=50,
        fragments=4,
        delay=5,
        outer="nesterov",
        learning_rate=0.4,
        merge=("blend", 0.5),
    ),
)
