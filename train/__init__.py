"""The program: configs in, runs out. `python -m train configs/NAME.py`."""

from importlib.util import find_spec

if not all(map(find_spec, ("flax", "grain", "orbax", "rich", "tyro"))):
    raise SystemExit("error: the program needs its extra: pip install -e '.[train]'")
