"""Digits, 64 workers: a ring, and one mean of all models at the last step.

Command: `python -m train configs/dbench_ada_merged.py`
"""

import dataclasses

from configs.wagma_digits_dpsgd import config as ring
from train.config import PolicyConfig

config = dataclasses.replace(
    ring,
    name="dbench_ada_merged",
    policy=PolicyConfig(name="merged"),
)
