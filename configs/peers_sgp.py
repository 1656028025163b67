"""Handwritten digits, 64 workers: SGP where nobody keeps step, by push-sum.

`wagma_digits_sgp2.py` from peer to peer: a message that is late counts when it comes.

Command: `decentjax launch --processes 4 configs/peers_sgp.py`
"""

import dataclasses

from configs.wagma_digits_sgp2 import config as sgp
from train.config import ExchangeConfig

config = dataclasses.replace(
    sgp,
    name="peers_sgp",
    step=dataclasses.replace(sgp.step, algorithm="awc"),
    exchange=ExchangeConfig(where="peers", way="push_sum"),
)
