"""Navigation between rooms, 8 workers: WAGMA-SGD whose groups wait for no late worker.

`navigate_wagma.py` from peer to peer. Command and hardware: as there.
Result: held-out SPL 0.917 ± 0.029 (two standard deviations of three seeds) after 600
steps by the clock. The learning rate is the best of five, see docs/results/navigate.md.
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
