"""OpenWebText, GPT-2 small, 16 workers.

Each method on the alternating exponential ring (aer) and on the complete graph.

Data: nanoGPT's `train.bin` and `val.bin` in data/openwebtext, or from text files
`decentjax prepare text FILE ... --vocabulary 50257 --out data/openwebtext`
Command: `srun decentjax train openwebtext_accumadamw_aer --distributed.enabled`, and so
on.
Hardware: 16 GPUs, 4 nodes of 4.
Paper: held-out loss 2.841 with accumadamw_aer, 2.846 with allreduce, as far as it can
be told which is which; none of the others.
Ours: not measured; neither the data nor GPUs were available.

Per step: 16 workers * 30 windows * 1,024 tokens = 491,520. The paper does not say
DAdamW's hyperparameters here; these are AccumAdamW's. All else is that of the released
script but for bfloat16 in place of float16, clipping of the whole gradient in place of
each bucket of 100 MB, and windows without repetition in a pass; docs/hyperparameters.md
has all rows. As in Decent-DP of that time, all models are averaged every 1,000 steps;
later versions' `global_avg()` is for the evaluation alone, and discarded by the next
step.
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
from train.tasks.text import TextTask

openwebtext_accumadamw_aer = Config(
    name="openwebtext_accumadamw_aer",
    num_steps=600_000,
    task=TextTask(
        data="data/openwebtext",
        model=GPTConfig(
            vocabulary=50304,
            context=1024,
            num_layers=12,
            num_heads=12,
            width=768,
            norm_epsilon=1e-5,
            mlp="exact_gelu",
            compute_dtype="bfloat16",
        ),
    ),
    workers=WorkersConfig(num_workers=16, workers_per_node=4),
    topology=TopologyConfig(name="alternating_exponential_ring", mean_every=1000),
    step=StepConfig(batch_per_worker=30, num_micro_batches=2),
    optimizer=OptimizerConfig(
        name="accum_adamw",
        learning_rate=6e-4,
        initial_learning_rate=3e-7,
        warmup_steps=2000,
        decay="cosine",
        final_learning_rate=6e-5,
        accum_steps=8,
        b1=0.9,
        b2=0.98,
        weight_decay=0.1,
        clip_norm=1.0,
    ),
    evaluation=EvaluationConfig(every_steps=1000),
    checkpoint=CheckpointConfig(every_steps=2000),
)
complete_graph = TopologyConfig(name="complete")
openwebtext_accumadamw_complete = dataclasses.replace(
    openwebtext_accumadamw_aer,
    name="openwebtext_accumadamw_complete",
    topology=complete_graph,
)
openwebtext_dadamw_aer = dataclasses.replace(
    openwebtext_accumadamw_aer,
    name="openwebtext_dadamw_aer",
    optimizer=dataclasses.replace(openwebtext_accumadamw_aer.optimizer, name="adamw"),
)
openwebtext_dadamw_complete = dataclasses.replace(
    openwebtext_dadamw_aer, name="openwebtext_dadamw_complete", topology=complete_graph
)
openwebtext_allreduce = dataclasses.replace(
    openwebtext_dadamw_complete,
    name="openwebtext_allreduce",
    method=AllReduceMethod(),
    optimizer=dataclasses.replace(openwebtext_dadamw_complete.optimizer, b2=0.95),
)
