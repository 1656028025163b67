"""WMT14 English to French, Transformer big: DAdam, alternating exponential ring.

Data and command: as in wmt14_fr_accumadam_aer.py.
Paper: 45.60 ± 0.12 / 0.6664 BLEU / METEOR (Table 2, 16 workers).
Ours: not measured; neither the data nor GPUs were available.

The peak is that of the paper's code for the big model.
"""

import dataclasses

from configs.wmt14_fr_accumadam_aer import config as accumadam_aer

config = dataclasses.replace(
    accumadam_aer,
    name="wmt14_fr_dadam_aer",
    optimizer=dataclasses.replace(
        accumadam_aer.optimizer,
        name="adamw",
        learning_rate=2.5e-3,
        initial_learning_rate=2.5e-5,
        b1=0.974,
    ),
)
