"""The notebook of the documentation runs, and prints and draws what it holds."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.checkout import ENV, ROOT


def printed_and_drawn(path: Path) -> list[list[str]]:
    """What each cell of code has printed, and the kinds of figures after it."""
    cells = json.loads(path.read_text())["cells"]
    return [
        ["".join(output.get("text", output.get("data"))) for output in cell["outputs"]]
        for cell in cells
        if cell["cell_type"] == "code"
    ]


@pytest.mark.nightly
def test_the_notebook_prints_and_draws_what_it_holds(tmp_path):
    notebook = ROOT / "docs" / "tutorial.ipynb"
    copy = Path(shutil.copy(notebook, tmp_path))
    done = subprocess.run(
        [sys.executable, ROOT / "docs" / "notebook.py", copy],
        cwd=tmp_path,
        env=ENV,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found = printed_and_drawn(copy)
    assert found == printed_and_drawn(notebook)
    assert sum(outputs.count("image/png") for outputs in found) == 4
