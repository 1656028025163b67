"""Configs with other values."""

import dataclasses
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
