"""How results are shown and written: tables, and facts as JSON."""

import csv
import dataclasses
import io
import json
import math
import platform
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from decentjax.process.threads import allowed_cores
from train.plain_files import write_whole


def markdown(header: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    """Returns a table in Markdown, without a newline at its end."""
    lines = [f"| {' | '.join(map(str, cells))} |" for cells in (header, *rows)]
    lines.insert(1, "|---" * len(header) + "|")
    return "\n".join(lines)


def to_csv(rows: Iterable[Iterable[Any]]) -> str:
    """Returns rows as CSV."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def aligned(
    heads: Sequence[str],
    rows: Iterable[Sequence[str]],
    num_left: int = 1,
    bold: str | None = None,
    title: str | None = None,
) -> RenderableType:
    """Returns a table for the terminal: text on the left, numbers aligned right.

    Args:
      heads: heads of the columns.
      rows: cells of each row.
      num_left: number of columns of text; those after them are numbers.
      bold: first cell of the row that is printed in bold, if any.
      title: title of the table, if any.
    """
    table = Table(box=None, pad_edge=False)
    for column, head in enumerate(heads):
        # A cut name would select nothing when it is copied to a command line.
        is_text = column < num_left
        table.add_column(head, justify="left" if is_text else "right", no_wrap=is_text)
    for row in rows:
        table.add_row(*row, style="bold" if row[0] == bold else None)
    # As a table's own title it would be broken to the table's width.
    return table if title is None else Group(Text(title, "italic"), table)


def say_workers(workers: Iterable[int]) -> str:
    """Returns "worker 3", or "workers 3, 4", with the first eight of many."""
    numbers = sorted(workers)
    some = ", ".join(map(str, numbers[:8])) + (", ..." if len(numbers) > 8 else "")
    return f"worker{'s' * (len(numbers) > 1)} {some}"


def to_json(facts: Any) -> str:
    """Returns facts as JSON text, with a newline at its end.

    Args:
      facts: nested dicts, dataclasses, named tuples, sequences and plain values. Paths
        and types become strings; a number that is not finite becomes null.
    """
    return json.dumps(plain(facts), indent=2, default=str) + "\n"


def plain(value: Any) -> Any:
    """Returns a value as JSON has it: dataclasses and named tuples as dicts.

    A number that is not finite becomes None, null in JSON, which has no NaN.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        # Not `asdict`, which would leave named tuples inside as they are.
        fields = dataclasses.fields(value)
        return {field.name: plain(getattr(value, field.name)) for field in fields}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return {name: plain(x) for name, x in zip(value._fields, value, strict=True)}  # type: ignore[attr-defined]
    if isinstance(value, Mapping):
        return {name: plain(x) for name, x in value.items()}
    if isinstance(value, list | tuple):
        return [plain(x) for x in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def measured(value: Any) -> Any:
    """Returns what JSON has of measured numbers, with NaN for null, see `plain`."""
    if isinstance(value, dict):
        return {name: measured(x) for name, x in value.items()}
    if isinstance(value, list):
        return [measured(x) for x in value]
    return math.nan if value is None else value


def write_json(path: Path, facts: Any) -> None:
    """Writes facts as JSON, see `to_json`, and makes the folder where it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, to_json(facts))


def words(name: str) -> str:
    """A field's name as a label: "consensus_distance" as "consensus distance"."""
    return name.replace("_", " ")


def label(name: str, units: Mapping[str, str]) -> str:
    """A score as a label with its unit: "training_loss" as "training loss, nats".

    Args:
      name: name of the score; the training loss has the unit of the loss.
      units: unit of each score, by name.
    """
    unit = units.get("loss" if name == "training_loss" else name, "")
    return f"{words(name)}, {unit}" if unit else words(name)


def quantity(value: float, unit: str = "", digits: int = 3) -> str:
    """Returns a score: "2.345 nats", of a "share" "97.2 %", without a unit "0.001234".

    Args:
      value: the score.
      unit: its unit, if it has any.
      digits: decimals of one with a unit; others may be of any size.
    """
    if unit == "share":
        return f"{100 * value:.1f} %"
    return f"{value:.{digits}f} {unit}" if unit else f"{value:.4g}"


def counted(number: int, noun: str) -> str:
    """Returns a number of things: "1 node", "1,024 nodes"."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def size(num_bytes: float) -> str:
    """Returns a number of bytes: "0 kB", "21.3 MB", "1.20 TB"."""
    units = {"TB": 1e12, "GB": 1e9, "MB": 1e6, "kB": 1e3}
    unit = next((x for x in units if num_bytes >= units[x]), "kB")
    return f"{num_bytes / units[unit]:.3g} {unit}"


def machine(*packages: str) -> str:
    """Returns this machine's cores and architecture, and the versions of packages."""
    versions = [f"{name} {version(name)}" for name in packages]
    cores = counted(allowed_cores(), "core")
    python = f"Python {platform.python_version()}"
    return ", ".join([cores, platform.machine(), python, *versions])


def file_name(text: str) -> str:
    """The text as a part of a file's name."""
    return "".join(c if c.isalnum() or c == "-" else "_" for c in text)
