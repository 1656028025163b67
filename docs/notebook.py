"""Runs the cells of a notebook in order, and stores what they print and draw.

`python docs/notebook.py docs/tutorial.ipynb`, with the extra `train`, after each change
of a cell: the site and the tests take the outputs from the file. Jupyter runs it too.
"""

import base64
import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.pyplot as plt


def run(notebook: dict[str, Any]) -> dict[str, Any]:
    """Returns the notebook with the outputs of all its cells of code."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec("".join(cell["source"]), namespace)
            text = printed.getvalue().splitlines(keepends=True)
            stream = {"output_type": "stream", "name": "stdout", "text": text}
            cell["outputs"] = [*([stream] if text else []), *_figures()]
    return notebook


def _figures() -> list[dict[str, Any]]:
    """The figures that are open, which it closes; Jupyter shows them likewise."""
    found = []
    for number in plt.get_fignums():
        drawn = io.BytesIO()
        plt.figure(number).savefig(drawn, format="png", dpi=100, bbox_inches="tight")
        data = {"image/png": base64.b64encode(drawn.getvalue()).decode()}
        found.append({"output_type": "display_data", "data": data, "metadata": {}})
    plt.close("all")
    return found


if __name__ == "__main__":
    matplotlib.use("agg")
    path = Path(sys.argv[1])
    done = run(json.loads(path.read_text()))
    path.write_text(json.dumps(done, indent=1, ensure_ascii=False) + "\n")
