"""Models that outgrow a device: a worker is a node of 8, with FSDP inside.

To look at before they are run; their text is the Python standard library's, as bytes,
which is too little for them.
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


def of(name: str, model: GPTConfig, batch_per_worker: int) -> Config:
    """Returns the config of a model on nodes of 8 GPUs, each a worker."""
    return Config(
        name=name,
        num_steps=10_000,
        task=StdlibTask(model=model),
        workers=WorkersConfig(num_workers=2, devices_per_worker=8, where="mesh"),
        topology=TopologyConfig(name="one_peer_ring"),
        step=StepConfig(algorithm="awc", batch_per_worker=batch_per_worker),
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


# GPT-2 XL's sizes, with 24 heads in place of 25.
gpt_1_5b = of(
    "gpt_1_5b",
    GPTConfig(
        vocabulary=50304,
        context=1024,
        num_layers=48,
        num_heads=24,
        width=1536,
        hidden=6400,
        compute_dtype="bfloat16",
        remat=True,
    ),
    batch_per_worker=64,
)
# Mistral 7B's sizes, and Llama's parts.
gpt_7b = of(
    "gpt_7b",
    GPTConfig(
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
    ),
    batch_per_worker=16,
)
