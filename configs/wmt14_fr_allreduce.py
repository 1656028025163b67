"""WMT14 English to French, Transformer big: Adam, all-reduce of the gradients.

Data and command: as in wmt14_fr_accumadam_aer.py.
Paper: 45.70 ± 0.30 / 0.6676 BLEU / METEOR (Table 2, 16 workers).
Ours: not measured; neither the data nor GPUs were available.
"""

import dataclasses

from configs.wmt14_fr_accumadam_aer import config as accumadam_aer

config = dataclasses.replace(
    accumadam_aer,
    name="wmt14_fr_allreduce",
    step=dataclasses.replace(accumadam_aer.step, algorithm="all_reduce"),
    topology=dataclasses.replace(accumadam_aer.topology, name="complete"),
    optimizer=dataclasses.replace(accumadam_aer.optimizer, name="adamw", b2=0.98),
)
