"""The program: configs in, runs out. `decentjax train configs/NAME.py`."""

import sys

from train.cli.command import end_imports_in_order
from train.cli.plugins import hide_cuda_plugin

hide_cuda_plugin()  # Before the first import of jax.
if (
    sys.argv[0] == "-m"
):  # Until `python -m train.NAME` is resolved.
    end_imports_in_order()
