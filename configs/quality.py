"""A byte-level GPT of a million parameters, four nodes of one worker: DAdamW.

The models are averaged in pairs on the alternating exponential ring. The others are the
methods of `decentjax bench quality`, at the learning rates of their own.

Command: `decentjax train quality`, and for all methods `decentjax bench quality`
Results: docs/results/quality.md.
"""

import dataclasses

from train.config import (
    AllReduceMethod,
    CheckpointConfig,
    Config,
    EvaluationConfig,
    GroupExchange,
    LogConfig,
    OptimizerConfig,
    PeerExchange,
    RoundsMethod,
    StepConfig,
    TopologyConfig,
    WorkersConfig,
)
from train.models.gpt import GPTConfig
from train.tasks.stdlib import StdlibTask

config = Config(
    name="quality",
    num_steps=600,
    task=StdlibTask(
        model=GPTConfig(
            context=64, num_layers=5, num_heads=4, width=128, init_std=0.08
        ),
        num_eval_windows=256,
    ),
    workers=WorkersConfig(num_workers=4),
    topology=TopologyConfig(name="alternating_exponential_ring"),
    step=StepConfig(batch_per_worker=4),
    optimizer=OptimizerConfig(
        name="adamw",
        learning_rate=5e-3,
        final_learning_rate=1e-4,
        warmup_steps=50,
        b2=0.99,
    ),
    evaluation=EvaluationConfig(every_steps=30),
    checkpoint=CheckpointConfig(every_steps=600),
    log=LogConfig(every_steps=10, consensus_every_steps=600),
)
slower = dataclasses.replace(config.optimizer, learning_rate=2.5e-3)

# AdamW, the mean of all gradients.
quality_allreduce = dataclasses.replace(
    config,
    name="quality_allreduce",
    topology=TopologyConfig(name="complete"),
    method=AllReduceMethod(),
    optimizer=slower,
)
# AccumAdamW, s = 2.
quality_accum = dataclasses.replace(
    config,
    name="quality_accum",
    optimizer=dataclasses.replace(slower, name="accum_adamw", accum_steps=2),
)
# Workers who exchange nothing.
quality_alone = dataclasses.replace(
    config, name="quality_alone", topology=TopologyConfig(name="alone")
)
# DAdamW, pairs on a ring; the same in bfloat16, and in 8 bits, where what a message
# drops is sent later.
quality_ring = dataclasses.replace(
    config, name="quality_ring", topology=TopologyConfig(name="one_peer_ring")
)
quality_bf16 = dataclasses.replace(
    quality_ring,
    name="quality_bf16",
    step=dataclasses.replace(config.step, message_dtype="bfloat16"),
)
quality_ring8 = dataclasses.replace(
    quality_ring,
    name="quality_ring8",
    method=RoundsMethod(every_steps=1, delay=1, merge="shift", codec="int8"),
)
# Rounds of two steps in 8 bits, and of four: pairs average what they sent as many steps
# before, and keep what they have learned since.
quality_int8 = dataclasses.replace(
    config,
    name="quality_int8",
    topology=TopologyConfig(name="one_peer_exponential"),
    method=RoundsMethod(every_steps=2, delay=2, merge="shift", codec="int8"),
    optimizer=slower,
)
quality_int8_rare = dataclasses.replace(
    quality_int8,
    name="quality_int8_rare",
    method=dataclasses.replace(quality_int8.method, every_steps=4, delay=4),
)
# DiLoCo, H = 20.
quality_diloco = dataclasses.replace(
    config,
    name="quality_diloco",
    topology=TopologyConfig(name="complete"),
    method=RoundsMethod(every_steps=20, outer="nesterov", momentum=0.5),
    optimizer=slower,
)
# NoLoCo, H = 20.
quality_noloco = dataclasses.replace(
    quality_diloco,
    name="quality_noloco",
    topology=TopologyConfig(name="random_matching"),
    method=RoundsMethod(every_steps=20, outer="heavy_ball", momentum=0.5),
)
# SparseLoCo, H = 5. Of a hundred numbers three are sent, in 2 bits each; the outer step
# has no momentum, as what was dropped and is sent later takes its place.
quality_sparse = dataclasses.replace(
    quality_diloco,
    name="quality_sparse",
    method=dataclasses.replace(
        quality_diloco.method,
        every_steps=5,
        learning_rate=2.0,
        momentum=0.0,
        codec="top_k",
        sent_share=0.03,
        sent_bits=2,
        error_kept=0.95,
    ),
)
# Peers who wait up to 5 s.
quality_peers = dataclasses.replace(
    config,
    name="quality_peers",
    exchange=PeerExchange(patience=5.0),
)
# WAGMA-SGD by peers, in pairs, and a mean of all models every ten steps; no worker
# waits for one that is late.
quality_wagma = dataclasses.replace(
    config,
    name="quality_wagma",
    topology=TopologyConfig(name="butterfly_groups", group_size=2, mean_every=10),
    exchange=GroupExchange(),
)
