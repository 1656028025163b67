"""ImageNet-1K, ResNet-50: Adam, all-reduce of the gradients.

Data and command: as in imagenet_accumadam_aer.py.
Paper: 76.01 / 93.05 / 1.864 top-1 / top-5 / last epoch's training loss (Table 3).
Ours: not measured; neither the data nor GPUs were available.
"""

import dataclasses

from configs.imagenet_accumadam_aer import config as accumadam_aer

config = dataclasses.replace(
    accumadam_aer,
    name="imagenet_allreduce",
    step=dataclasses.replace(accumadam_aer.step, algorithm="all_reduce"),
    topology=dataclasses.replace(accumadam_aer.topology, name="complete"),
    optimizer=dataclasses.replace(
        accumadam_aer.optimizer,
        name="adam",
        learning_rate=1e-3,
        initial_learning_rate=1e-5,
    ),
)
