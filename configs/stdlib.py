"""The Python standard library, 16 workers as 4 nodes of 4, local batches of one window.

Each method on the alternating exponential ring (aer) and on the complete graph.

Command: `decentjax compare 'stdlib_*' --seeds 3`
Hardware: 2 cores of an AMD EPYC; all workers and seeds simulated on one device.
Wall time: 148 to 279 s a config, for three seeds together, beside other work (Python
3.11, jax 0.10.2).
Result: held-out bits per byte of the mean model and training loss, +- two standard
deviations

    allreduce            2.241 +- 0.016   1.484 +- 0.011
    accumadamw_complete  2.371 +- 0.018   1.572 +- 0.013
    accumadamw_aer       2.375 +- 0.011   1.575 +- 0.017
    dadamw_complete      2.447 +- 0.010   1.621 +- 0.011
    dadamw_aer           2.453 +- 0.004   1.626 +- 0.014

accum_steps is 2: on two seeds of their own the mean model has 2.378 with 2, 2.384 with
4, 2.543 with the paper's 8 and 2.834 with 16.
"""

import dataclasses

from train.config import (
    AllReduceMethod,
    CheckpointConfig,
    Config,
    EvaluationConfig,
    OptimizerConfig,
    StepConfig,
    TopologyConfig,
    WorkersConfig,
)
from train.models.gpt import GPTConfig
from train.tasks.stdlib import StdlibTask

stdlib_accumadamw_aer = Config(
    name="stdlib_accumadamw_aer",
    num_steps=3000,
    task=StdlibTask(
        model=GPTConfig(context=32, num_layers=2, num_heads=4, width=64, init_std=0.12)
    ),
    workers=WorkersConfig(num_workers=16, workers_per_node=4),
    topology=TopologyConfig(name="alternating_exponential_ring"),
    step=StepConfig(batch_per_worker=1),
    optimizer=OptimizerConfig(
        name="accum_adamw",
        learning_rate=5e-3,
        warmup_steps=75,
        decay="cosine",
        final_learning_rate=2.5e-4,
        accum_steps=2,
        b1=0.9,
        b2=0.99,
        weight_decay=0.1,
        clip_norm=1.0,
    ),
    evaluation=EvaluationConfig(every_steps=1000),
    checkpoint=CheckpointConfig(every_steps=1000),
)
complete_graph = dataclasses.replace(stdlib_accumadamw_aer.topology, name="complete")
stdlib_accumadamw_complete = dataclasses.replace(
    stdlib_accumadamw_aer, name="stdlib_accumadamw_complete", topology=complete_graph
)
stdlib_dadamw_aer = dataclasses.replace(
    stdlib_accumadamw_aer,
    name="stdlib_dadamw_aer",
    optimizer=dataclasses.replace(stdlib_accumadamw_aer.optimizer, name="adamw"),
)
stdlib_dadamw_complete = dataclasses.replace(
    stdlib_dadamw_aer, name="stdlib_dadamw_complete", topology=complete_graph
)
stdlib_allreduce = dataclasses.replace(
    stdlib_dadamw_complete,
    name="stdlib_allreduce",
    method=AllReduceMethod(),
)
