"""A GPT of 21 MB between four nodes of an emulated cluster, recorded for a timeline.

Command, as root, with the extra `emulate`: `decentjax emulate --nodes 4 --rate
200mbit -- decentjax train timeline --distributed.enabled --run-dir runs/one-peer-ring`;
once more with `--method all_reduce --run-dir runs/all-reduce`; then `decentjax
report runs/all-reduce runs/one-peer-ring --figures configs`.
Hardware: 2 cores of an AMD EPYC, four processes, links of 200 Mbit/s.
Wall time: 79 s and 76 s, most of it compiling and scores (Python 3.11, jax 0.10.2).
Result: the median step takes 1.57 s, and 2.68 s with all-reduce, 12 steps each.
"""

from train.config import (
    BackgroundExchange,
    CheckpointConfig,
    Config,
    EvaluationConfig,
    LogConfig,
    OptimizerConfig,
    StepConfig,
    TopologyConfig,
    WorkersConfig,
)
from train.models.gpt import GPTConfig
from train.tasks.stdlib import StdlibTask

config = Config(
    name="timeline",
    num_steps=12,
    task=StdlibTask(
        model=GPTConfig(
            context=128, num_layers=3, num_heads=4, width=384, init_std=0.12
        ),
        num_eval_windows=8,
        sample_bytes=4,
    ),
    workers=WorkersConfig(num_workers=4, workers_per_node=1),
    topology=TopologyConfig(name="one_peer_ring"),
    step=StepConfig(
        batch_per_worker=8,
        # In a compiled step it sends for longer than it computes: two messages at a
        # time then leave each something to hide behind.
        xla_options=(
            "recommended",
            "xla_gpu_experimental_parallel_collective_overlap_limit=2",
        ),
    ),
    exchange=BackgroundExchange(),
    optimizer=OptimizerConfig(
        name="accum_adamw",
        learning_rate=5e-3,
        final_learning_rate=2.5e-4,
        warmup_steps=2,
        accum_steps=2,
        b2=0.99,
    ),
    evaluation=EvaluationConfig(every_steps=100),
    checkpoint=CheckpointConfig(every_steps=100),
    log=LogConfig(every_steps=4, consensus_every_steps=100, timeline=True),
)
