"""Navigation between rooms, 8 workers: WAGMA-SGD whose groups wait for no late worker.

`navigate_wagma.py` from peer to peer. Command, hardware and results: as there.
`decentjax launch --processes 4 configs/navigate_peers.py` runs it in four processes.
"""

import dataclasses

from configs.navigate_wagma import config as wagma
from train.config import ExchangeConfig

config = dataclasses.replace(
    wagma,
    name="navigate_peers",
    optimizer=dataclasses.replace(wagma.optimizer, learning_rate=6.4e-2),
    exchange=ExchangeConfig(where="peers", way="wagma"),
)
