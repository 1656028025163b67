"""Numbers with units: 25gbit, 65ms, 65M."""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

Quantity = Any
"""A number, or a text of one with its unit, such as "25gbit"; once read, a number."""

# As tc writes them: bit is 1/8 byte per second, and each prefix a factor of 1000.
RATES = {f"{prefix}bit": 1e3**n / 8 for n, prefix in enumerate(("", *"kmgt"))}
TIMES = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
COUNTS = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}


def rate(name: str, value: Quantity) -> float:
    """Returns bytes per second, of a rate such as 25gbit.

    Raises:
      ValueError: with the name, if a text is no number with a unit, or is 0.

    Examples:
      >>> from decentjax import units
      >>> units.rate("between", "8gbit"), units.seconds("compute", "65ms")
      (1000000000.0, 0.065)
    """
    bytes_per_second = _read(name, value, RATES, "25gbit (3.1 GB/s)")
    if isinstance(value, str) and bytes_per_second == 0:
        raise ValueError(f"{name} must be positive, got {value!r}")
    return bytes_per_second


def seconds(name: str, value: Quantity) -> float:
    """Returns seconds, of a time such as 65ms; raises as `rate` does."""
    return _read(name, value, TIMES, "65ms")


def count(name: str, value: Quantity) -> float:
    """Returns a number such as 65M; raises as `rate` does."""
    return _read(name, value, COUNTS, "65M")


def read_speeds(links: Any) -> None:
    """Reads the rates and latencies of a frozen dataclass; raises as `rate` does."""
    for field in dataclasses.fields(links):
        for ending, read in ("_bytes_per_second", rate), ("_latency", seconds):
            if field.name.endswith(ending):
                value = read(field.name, getattr(links, field.name))
                object.__setattr__(links, field.name, value)


def _read(name: str, value: Quantity, units: Mapping[str, float], like: str) -> float:
    if hasattr(value, "__float__"):
        return value
    match = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)\s*([A-Za-z]*)", str(value).strip())
    if match is None or match[2] not in units:
        known = ", ".join(filter(None, units))
        raise ValueError(
            f"{name} must be a number with one of the units {known}, such as {like}, "
            f"got {value!r}"
        )
    return float(match[1]) * units[match[2]]
