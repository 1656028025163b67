"""Configs with other values."""

import dataclasses
from pathlib import Path
from typing import Any


def changed(config: Any, **fields: Any) -> Any:
    """A config with other fields; a dict changes those of a section.

    changed(config, num_steps=3, workers=dict(num_workers=8))
    """
    for name, value in fields.items():
        section = getattr(config, name)
        if isinstance(value, dict) and dataclasses.is_dataclass(section):
            fields[name] = changed(section, **value)
    return dataclasses.replace(config, **fields)


def config_file(path: Path, changes: str, of: str = "job_line") -> Path:
    """A config file, of a config of these tests with changes, as code."""
    path.write_text(
        "from tests.changes import changed\n"
        f"from tests.{of} import config\n"
        "from train.config import *\n"
        f"config = changed(config, {changes})\n"
    )
    return path
