"""Digits, 64 workers: Ada, a ring lattice that loses four neighbours per epoch.

Command: `python -m train configs/dbench_ada.py`
"""

import dataclasses

from configs.wagma_digits_dpsgd import config as ring
from train.config import PolicyConfig

config = dataclasses.replace(
    ring,
    name="dbench_ada",
    policy=PolicyConfig(name="thinning", degree=16, per_epoch=4.0, epoch_steps=90),
)
