"""GPT-2 small (nanoGPT's: vocabulary 50304, no bias), to look at before it is run.

Its text is the Python standard library's, as bytes, which is too little for it.
Command: `decentjax preflight configs/gpt2_small.py --target h100 --nodes 126
--gpus-per-node 8 --topology.name hierarchical --topology.between one_peer_ring --figure
configs/gpt2_small.svg`; the tuned all-reduce with `--method all_reduce
--topology.name complete --step.xla-options
xla_gpu_all_reduce_combine_threshold_bytes=100000000
xla_gpu_experimental_parallel_collective_overlap_limit=4`; the slower network with
`--between 100gbit` after either, where the row "as configured, with a profile of its
times" is among the options tried.
Hardware: none of it; compiled on 2 cores of an AMD EPYC.
Wall time: 269 s, 11 s for each program (Python 3.11, jax 0.10.2).
Result: as compiled, 96.6 % of the exchanged bytes travel beside matmuls, and of a step
of 43.3 ms 0.43 ms wait for messages, by estimate; with all-reduce 68.9 %, and 3.9 of
47.0 ms. Never run on a GPU.
"""

from train.config import (
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

config = Config(
    name="gpt2_small",
    num_steps=10_000,
    task=StdlibTask(
        model=GPTConfig(
            vocabulary=50304,
            context=1024,
            num_layers=12,
            num_heads=12,
            width=768,
            compute_dtype="bfloat16",
        ),
    ),
    workers=WorkersConfig(num_workers=8, workers_per_node=8),
    topology=TopologyConfig(name="alternating_exponential_ring"),
    step=StepConfig(batch_per_worker=12),
    optimizer=OptimizerConfig(
        name="accum_adamw",
        learning_rate=6e-4,
        final_learning_rate=6e-5,
        warmup_steps=200,
        accum_steps=4,
        b2=0.95,
    ),
    evaluation=EvaluationConfig(every_steps=1000),
    checkpoint=CheckpointConfig(every_steps=1000),
)
