"""WMT14 English to German, Transformer base: DAdam, complete graph.

Data and command: as in wmt14_de_accumadam_aer.py.
Paper: 27.60 ± 0.18 / 0.5445 BLEU / METEOR (Table 2, 16 workers).
Ours: not measured; neither the data nor GPUs were available.

The paper's peaks for 8, 16 and 32 workers, 2.0e-3, 2.8e-3 and 3.8e-3, are taken to be
DAdam's; older code has 4.0e-3 for 16.
"""

import dataclasses

from configs.wmt14_de_accumadam_aer import config as accumadam_aer

config = dataclasses.replace(
    accumadam_aer,
    name="wmt14_de_dadam_complete",
    topology=dataclasses.replace(accumadam_aer.topology, name="complete"),
    optimizer=dataclasses.replace(
        accumadam_aer.optimizer,
        name="adamw",
        learning_rate=2.8e-3,
        initial_learning_rate=2.8e-5,
        b1=0.974,
    ),
)
