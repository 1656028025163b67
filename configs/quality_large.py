"""The methods of the quality race with a GPT of ten million parameters, 43 MB.

Its width is three times that of configs/quality.py, so that each learning rate is a
third (Yang et al., 2021, Tensor Programs V); none was searched.

Command: `decentjax bench quality --configs configs/quality_large.py`
Results: time to the loss of all-reduce, in docs/results/quality.md, "More than a toy".
"""

import dataclasses

from configs import quality
from train.config import CheckpointConfig, Config, EvaluationConfig, LogConfig
from train.models.gpt import GPTConfig
from train.tasks.stdlib import StdlibTask

STEPS = 200


def larger(small: Config) -> Config:
    """A method's config with the larger model."""
    optimizer = dataclasses.replace(
        small.optimizer,
        learning_rate=small.optimizer.learning_rate / 3,
        final_learning_rate=small.optimizer.final_learning_rate / 3,
        warmup_steps=20,
    )
    return dataclasses.replace(
        small,
        num_steps=STEPS,
        task=StdlibTask(
            model=GPTConfig(
                context=64, num_layers=6, num_heads=6, width=384, init_std=0.046
            ),
            num_eval_windows=64,
        ),
        optimizer=optimizer,
        evaluation=EvaluationConfig(every_steps=20),
        checkpoint=CheckpointConfig(every_steps=STEPS),
        log=LogConfig(every_steps=10, consensus_every_steps=STEPS),
    )


# Under the names of the smaller ones, as `bench quality` looks for them.
methods = {x: one for x, one in vars(quality).items() if isinstance(one, Config)}
globals().update({name: larger(one) for name, one in methods.items()})
