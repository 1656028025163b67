"""GPTs that outgrow a device, to look at before they are run: a worker is a node of 8.

Each worker shards its model over its devices (FSDP), and models are averaged between
nodes. Their text is the Python standard library's, as bytes, which is too little.
Command: `decentjax preflight gpt_7b --target h100 --nodes 4 --gpus-per-node 8
--no-tune`
Hardware: none of it; compiled on 2 cores of an AMD EPYC, beside other work.
Wall time: 166 to 191 s for each of three programs (Python 3.11, jax 0.10.2).
Result: by estimate a step takes 0.440 s, 1.005 of FSDP alone (0.438 s, `--nodes 1`),
and with all-reduce between nodes 0.481 s; 97.5 % of the exchange is covered. Of 7.24 B
parameters each GPU sends 3,622 MB to other nodes, 4 / 8 bytes of each, and nothing else
leaves a node; 31.9 GB of memory, where FSDP alone takes 21.9. See
docs/results/preflight.md. Never run on a GPU.
"""

import dataclasses

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

# The sizes of GPT-2 XL, with 24 heads in place of 25, so that 8 devices share a matrix.
gpt_1_5b = Config(
    name="gpt_1_5b",
    num_steps=10_000,
    task=StdlibTask(
        model=GPTConfig(
            vocabulary=50304,
            context=1024,
            num_layers=48,
            num_heads=24,
            width=1536,
            hidden=6400,
            compute_dtype="bfloat16",
            remat=True,
        )
    ),
    workers=WorkersConfig(num_workers=2, devices_per_worker=8, where="mesh"),
    topology=TopologyConfig(name="one_peer_ring"),
    step=StepConfig(batch_per_worker=64),
    optimizer=OptimizerConfig(
        name="adamw",
        learning_rate=3e-4,
        final_learning_rate=3e-5,
        warmup_steps=200,
        b2=0.95,
    ),
    evaluation=EvaluationConfig(every_steps=1000),
    checkpoint=CheckpointConfig(every_steps=1000),
)
# The sizes of Mistral 7B, and the parts of Llama.
gpt_7b = dataclasses.replace(
    gpt_1_5b,
    name="gpt_7b",
    task=StdlibTask(
        model=GPTConfig(
            vocabulary=32000,
            context=2048,
            num_layers=32,
            num_heads=32,
            num_kv_heads=8,
            width=4096,
            hidden=14336,
            norm="rms",
            positions="rotary",
            mlp="swiglu",
            tied=False,
            compute_dtype="bfloat16",
            remat=True,
        )
    ),
    step=StepConfig(batch_per_worker=16),
)
