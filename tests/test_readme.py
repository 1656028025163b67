"""README tells the truth: its code runs, its links lead somewhere."""

import re
from pathlib import Path

import jax.numpy as jnp
import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_there_are_code_blocks():
    assert len(BLOCKS) == 7


@pytest.mark.parametrize("block", BLOCKS)
def test_the_code_blocks_run(block, capsys):
    names: dict = {}
    exec(compile(block, "README.md", "exec"), names)
    solution = jnp.array([1.0, -2.0, 3.0])
    if "decentralize(" in block:
        assert jnp.allclose(names["params"], jnp.tile(solution, (8, 1)), atol=0.05)
    if "state = init_state" in block:
        models = names["state"].params
        assert jnp.allclose(jnp.asarray(models).mean(0), solution, atol=0.05)
    if "analysis.traffic" in block:
        printed = [line.split() for line in capsys.readouterr().out.splitlines()]
        assert len(printed) == 11
        assert all(f"| {' | '.join(cells)} |" in README for cells in printed)
    if "runtime.all_reduce" in block:
        printed = capsys.readouterr().out.splitlines()
        assert len(printed) == 5
        assert all(line in README for line in printed)


def test_the_files_that_it_names_exist():
    links = re.findall(r"\]\((?!http)([^)]+)\)", README)
    assert links
    missing = [link for link in links if not (ROOT / link).exists()]
    assert missing == []
