"""Handwritten digits, 64 workers: WAGMA-SGD whose groups wait for no late worker.

`wagma_digits.py` from peer to peer: of a late worker a group takes an older model.

Command: `decentjax launch --processes 4 configs/peers_wagma.py`, 16 workers in
each of four processes. Simulated, with two late workers in each step as in the second
paper:
`decentjax compare configs/peers_wagma.py --clock.compute 390ms
--clock.late-workers 2 --clock.late-by 320ms`
"""

import dataclasses

from configs.wagma_digits import config as wagma
from train.config import ExchangeConfig

config = dataclasses.replace(
    wagma,
    name="peers_wagma",
    exchange=ExchangeConfig(where="peers", way="wagma"),
)
