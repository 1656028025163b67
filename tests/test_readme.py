"""README tells the truth: its code runs, its links lead somewhere."""

import re
from pathlib import Path

import jax.numpy as jnp
import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_there_are_code_blocks():
    assert len(BLOCKS) == 4


@pytest.mark.parametrize("block", BLOCKS)
def test_the_code_blocks_run(block, capsys):
    names: dict = {}
    exec(compile(block, "README.md", "exec"), names)
    if "decentralize" in block:
        expected = jnp.tile(jnp.array([1.0, -2.0, 3.0]), (8, 1))
        assert jnp.allclose(names["params"], expected, atol=0.05)
    if "accum_adamw" in block:
        mean = names["mean_model"](names["state"].params)
        assert jnp.allclose(mean, jnp.array([1.0, -2.0, 3.0]), atol=0.05)
    if "analysis.traffic" in block:
        printed = [line.split() for line in capsys.readouterr().out.splitlines()]
        assert len(printed) == 11
        assert all(f"| {' | '.join(cells)} |" in README for cells in printed)


def test_the_files_that_it_names_exist():
    links = re.findall(r"\]\((?!http)([^)]+)\)", README)
    assert links
    missing = [link for link in links if not (ROOT / link).exists()]
    assert missing == []
