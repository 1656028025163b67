"""WMT14 English to German, Transformer base: WAGMA-SGD, the mean of all every 8 steps.

Data: `decentjax prepare wmt14 --pair de-en --vocabulary 37120 --out
data/wmt14_de-en`
Command: `srun decentjax train configs/wagma_wmt14.py --distributed.enabled`, then
`decentjax evaluate runs/wagma_wmt14`.
Hardware: 16 GPUs, one on each node.
Paper, on WMT17 and therefore no target here: uncased BLEU 26.12 in 706 minutes. There
SGP with two peers has 26.01, local SGD (mean at each step) 25.98, SGP with one peer
25.75, all-reduce 25.72, D-PSGD 25.69; groups that never change 24.79.
Ours: not measured; neither the data nor GPUs were available.

Per step: 16 workers * 8,192 tokens of each side = 131,072; 10 passes of 1,033 steps.
The paper has up to 8,192 tokens per worker, bucketed by length. We did not find its
optimizer and learning rate: they are those of wmt14_de_allreduce.py, the warm-up one
pass. Steps are synchronous, so that no model is stale.
Baselines: docs/guides/wagma.md has the options, `--topology.name ring` for example.
"""

import dataclasses

from configs.wmt14_de_allreduce import config as allreduce
from train.config import StepConfig, TopologyConfig, WorkersConfig

config = dataclasses.replace(
    allreduce,
    name="wagma_wmt14",
    num_steps=10 * 1033,
    workers=WorkersConfig(num_workers=16),
    topology=TopologyConfig(name="butterfly_groups", group_size=4, mean_every=8),
    step=StepConfig(algorithm="atc", batch_per_worker=8192),
    optimizer=dataclasses.replace(allreduce.optimizer, warmup_steps=1033),
    evaluation=dataclasses.replace(allreduce.evaluation, every_steps=1033),
    checkpoint=dataclasses.replace(allreduce.checkpoint, every_steps=1033),
)
