"""Tables and facts: what readers of Markdown and of JSON get."""

import dataclasses
import json
from pathlib import Path
from typing import NamedTuple

from train.cli.tables import counted, machine, markdown, to_json, write_json


class Point(NamedTuple):
    x: int
    y: float


@dataclasses.dataclass(frozen=True)
class Setting:
    out: Path
    points: tuple[Point, ...]


def test_a_table_has_its_cells_in_order():
    rows = [["ring", 1], ["complete", 2]]
    assert markdown(["", "s"], rows).split("\n") == [
        "|  | s |",
        "|---|---|",
        "| ring | 1 |",
        "| complete | 2 |",
    ]


def test_facts_become_plain_json(tmp_path):
    setting = Setting(Path("runs/a"), (Point(1, 2.5), Point(2, float("inf"))))
    write_json(tmp_path / "new" / "facts.json", {"setting": setting, "dtype": int})
    facts = json.loads((tmp_path / "new" / "facts.json").read_text())
    assert facts["dtype"] == "<class 'int'>"
    assert facts["setting"] == {
        "out": "runs/a",
        "points": [{"x": 1, "y": 2.5}, {"x": 2, "y": None}],
    }
    assert to_json(facts).endswith("}\n")


def test_the_machine_is_described_with_versions():
    assert "cores" in machine()
    assert "jax " in machine("jax")


def test_one_thing_is_no_plural():
    said = [counted(number, "node") for number in (0, 1, 2, 1024)]
    assert said == ["0 nodes", "1 node", "2 nodes", "1,024 nodes"]
