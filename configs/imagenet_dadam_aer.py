"""ImageNet-1K, ResNet-50: DAdam, alternating exponential ring.

Data and command: as in imagenet_accumadam_aer.py.
Paper: 75.31 / 92.54 / 1.998 top-1 / top-5 / last epoch's training loss (Table 3).
Ours: not measured; neither the data nor GPUs were available.

The paper does not say DAdam's learning rate here; this is AccumAdam's.
"""

import dataclasses

from configs.imagenet_accumadam_aer import config as accumadam_aer

config = dataclasses.replace(
    accumadam_aer,
    name="imagenet_dadam_aer",
    optimizer=dataclasses.replace(accumadam_aer.optimizer, name="adam"),
)
