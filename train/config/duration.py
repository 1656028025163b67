"""A duration of a config: seconds, on a command line also with a unit, as 500ms."""

from typing import Annotated

import tyro

from decentjax import units


def _read(texts: list[str]) -> float:
    (text,) = texts
    try:
        return float(text)
    except ValueError:
        return units.seconds("a duration", text)


Duration = Annotated[
    float,
    tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="500ms",
        instance_from_str=_read,
        is_instance=lambda x: isinstance(x, int | float),
        str_from_instance=lambda x: [str(x)],
    ),
]
