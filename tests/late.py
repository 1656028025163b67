"""Hooks that delay processes: `--on-step tests/late.py:fixed`, with LATE="2 0.1"."""

import os
import time

import jax


def fixed(step, state, metrics):
    """The process that LATE names sleeps after each step."""
    number, seconds = os.environ["LATE"].split()
    if os.environ["DECENTJAX_PROCESS_ID"] == number:
        time.sleep(float(seconds))


def rotating(step, state, metrics):
    """Process t mod P of a job sleeps before step t."""
    if step % jax.process_count() == jax.process_index():
        time.sleep(float(os.environ["LATE"]))
