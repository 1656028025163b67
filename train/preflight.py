"""Compiles a run for a cluster that need not be there, and says what would happen.

`python -m train.preflight CONFIG.py --target h100 --nodes 16 --gpus-per-node 8`
"""

# XLA keeps a quarter of a GPU's memory for others, unless it is told otherwise.
MEMORY_SHARE = 0.75
