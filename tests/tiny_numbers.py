"""Translation of numbers, in seconds: `decentjax train tests/tiny_numbers.py`.

Its batches come in several shapes.
"""

from tests.changes import changed
from tests.tiny import config as tiny
from train.models.transformer import TransformerConfig
from train.tasks.numbers import NumbersTask
from train.tasks.translation import DecodingConfig

config = changed(
    tiny,
    name="tiny_numbers",
    task=NumbersTask(
        model=TransformerConfig(
            vocabulary=300,
            context=256,
            num_layers=1,
            num_heads=2,
            width=8,
            hidden=16,
            dropout=0.0,  # Half of what there is to compile.
        ),
        num_train=200,
        decoding=DecodingConfig(beams=2, rows=128),
        num_shapes=2,
    ),
    step=dict(batch_per_worker=96),
)
