"""WMT14 English to German, Transformer base: AccumAdam, alternating exponential ring.

Data: `decentjax prepare wmt14 --pair de-en --vocabulary 37120 --out
data/wmt14_de-en`
Command: `srun decentjax train configs/wmt14_de_accumadam_aer.py
--distributed.enabled`, then `decentjax evaluate runs/wmt14_de_accumadam_aer`.
Hardware: 16 GPUs, 4 nodes of 4.
Paper: 27.71 ± 0.09 / 0.5481 BLEU / METEOR (Table 2, 16 workers).
Ours: not measured; neither the data nor GPUs were available.

Per step: 16 workers * 1,562 tokens of each side = 25,000; 130,000 steps, 24 passes.
The warm-up is that of the released code, the dropout that of its older configs; the
code's average of all models after each pass is not made here.
With 8 workers the paper's code has `--workers.num-workers 8 --step.batch-per-worker
3125 --optimizer.learning-rate 8e-4 --optimizer.accum-steps 4`; for 32, with N/2:
`--workers.num-workers 32 --step.batch-per-worker 781 --optimizer.accum-steps 16`.
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
from train.models.transformer import TransformerConfig
from train.tasks.corpus import TranslationTask

config = Config(
    name="wmt14_de_accumadam_aer",
    num_steps=130_000,
    task=TranslationTask(
        data="data/wmt14_de-en",
        model=TransformerConfig(
            vocabulary=37120,
            context=256,
            num_layers=6,
            num_heads=8,
            width=512,
            hidden=2048,
            dropout=0.1,
            compute_dtype="bfloat16",
        ),
    ),
    workers=WorkersConfig(num_workers=16, workers_per_node=4),
    topology=TopologyConfig(name="alternating_exponential_ring"),
    step=StepConfig(algorithm="awc", batch_per_worker=1562),
    optimizer=OptimizerConfig(
        name="accum_adamw",
        learning_rate=7e-4,
        initial_learning_rate=7e-6,
        warmup_steps=4000,
        decay="inverse_sqrt",
        accum_steps=8,
        b1=0.9,
        b2=0.999,
        eps=1e-9,
        weight_decay=0.0,
        clip_norm=None,
    ),
    evaluation=EvaluationConfig(every_steps=5000),
    checkpoint=CheckpointConfig(every_steps=5000),
)
