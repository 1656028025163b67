"""WMT14 English to German, Transformer base: Adam, all-reduce of the gradients.

Data and command: as in wmt14_de_accumadam_aer.py.
Paper: 27.79 ± 0.16 / 0.5465 BLEU / METEOR (Table 2, 16 workers).
Ours: not measured; neither the data nor GPUs were available.
"""

import dataclasses

from configs.wmt14_de_accumadam_aer import config as accumadam_aer

config = dataclasses.replace(
    accumadam_aer,
    name="wmt14_de_allreduce",
    step=dataclasses.replace(accumadam_aer.step, algorithm="all_reduce"),
    topology=dataclasses.replace(accumadam_aer.topology, name="complete"),
    optimizer=dataclasses.replace(accumadam_aer.optimizer, name="adamw", b2=0.98),
)
