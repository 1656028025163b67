"""The program: configs in, runs out. `python -m train configs/NAME.py`."""

import sys
from importlib.util import find_spec

from train.cli.command import end_interrupted_imports
from train.cli.plugins import hide_cuda_plugin

hide_cuda_plugin()  # Before the first import of jax.
if not all(map(find_spec, ("flax", "grain", "orbax", "rich", "tyro"))):
    raise SystemExit("error: the program needs its extra: pip install -e '.[train]'")
if sys.argv[0] == "-m":  # As Python has it until it has found `python -m train.NAME`.
    end_interrupted_imports()
