"""ImageNet-1K, ResNet-50: AccumAdam, complete graph.

Data and command: as in imagenet_accumadam_aer.py.
Paper: 76.34 / 93.15 / 1.835 top-1 / top-5 / last epoch's training loss (Table 3).
Ours: not measured; neither the data nor GPUs were available.
"""

import dataclasses

from configs.imagenet_accumadam_aer import config as accumadam_aer

config = dataclasses.replace(
    accumadam_aer,
    name="imagenet_accumadam_complete",
    topology=dataclasses.replace(accumadam_aer.topology, name="complete"),
)
