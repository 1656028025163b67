"""The checkout, and the environment of processes that tests start in it."""

import os
from pathlib import Path

ROOT = Path(__file__).parent.parent
# As in a user's shell: the tests' own devices and threads are no matter of processes.
ENV = {k: v for k, v in os.environ.items() if k not in ("NPROC", "XLA_FLAGS")}
