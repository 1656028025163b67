"""Numbers with units, as people type and read them: 25gbit, 65ms, 65M."""

import re
from collections.abc import Mapping

RATES = {f"{prefix}bit": 1e3**n / 8 for n, prefix in enumerate(("", *"kmgt"))}
TIMES = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}
COUNTS = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}


def rate(name: str, text: str) -> float:
    """Returns bytes per second, of a rate such as 25gbit."""
    bytes_per_second = _parse(name, text, RATES, "25gbit")
    if bytes_per_second == 0:
        raise ValueError(f"{name} must be positive, got {text!r}")
    return bytes_per_second


def seconds(name: str, text: str) -> float:
    """Returns seconds, of a time such as 65ms."""
    return _parse(name, text, TIMES, "65ms")


def count(name: str, text: str) -> float:
    """Returns the number that a text such as 65M says."""
    return _parse(name, text, COUNTS, "65M")


def duration(seconds: float) -> str:
    """Returns a time as people read it."""
    if seconds >= 1:
        return f"{seconds:.3g} s"
    return f"{1e3 * seconds:.3g} ms"


def _parse(name: str, text: str, units: Mapping[str, float], example: str) -> float:
    """The number in the base unit.

    Raises:
      ValueError: with the option's name, if it is none.
    """
    match = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)\s*([A-Za-z]*)", text.strip())
    if match is None or match[2] not in units:
        known = ", ".join(filter(None, units))
        raise ValueError(
            f"{name} must be a number with one of the units {known}, such as "
            f"{example}, got {text!r}"
        )
    return float(match[1]) * units[match[2]]
