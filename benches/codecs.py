"""How fast codecs encode and decode, beside a copy of the same array."""

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benches.results import check_at_least, write_results
from decentjax.codec import int2, int4, int8, num_bytes, top_k
from train.cli.plain_console import PlainConsole
from train.cli.tables import markdown

COPY = "a copy"
CODECS = {
    "int8": int8(),
    "int4": int4(),
    "int2": int2(),
    "top 1 %": top_k(0.01),
    "top 1 %, int2": top_k(0.01, values=int2()),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class CodecBench:
    """Measures each codec on one float32 leaf, in turns. Pin it to measure one core.

    Example: `taskset -c 0 decentjax bench codec`.

    Args:
      size: numbers in the leaf.
      rounds: number of turns, of which the median counts.
      out: folder for codec.json and codec.md.
    """

    size: int = 25_000_000
    rounds: int = 5
    out: Path = Path("runs/codec")

    def __post_init__(self):
        check_at_least(self, size=1, rounds=1)


def main(bench: CodecBench) -> int:
    console = PlainConsole()
    x = jax.random.normal(jax.random.key(0), (bench.size,))
    programs: dict[str, tuple[Callable, tuple[Any, ...]]] = {}
    # Two buffers, as for an encoding: without the sum XLA copies nothing.
    programs[COPY] = jax.jit(lambda x: x + 1), (x,)
    for name, codec in CODECS.items():
        encode = jax.jit(codec.encode)
        message = encode(x, jax.random.key(1))
        decode = jax.jit(lambda message, codec=codec: codec.decode(message, x.shape))
        programs[f"{name}, encode"] = encode, (x, jax.random.key(2))
        programs[f"{name}, decode"] = decode, (message,)
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    for turn in range(bench.rounds + 1):
        console.print(f"turn {turn} of {bench.rounds}" if turn else "compiling")
        for name, (function, arguments) in programs.items():
            start = time.perf_counter()
            jax.block_until_ready(function(*arguments))
            if turn:
                seconds[name].append(time.perf_counter() - start)
    facts = {"bench": bench, "seconds": seconds}
    print(write_results(bench.out, "codec", facts, table(seconds, bench.size)))
    return 0


def table(seconds: dict[str, list[float]], size: int) -> str:
    """Returns Markdown: GB of float32 in a second, and the size of a message."""

    def rate(name: str) -> str:
        low, middle, high = 4e-9 * size / np.quantile(seconds[name], (1, 0.5, 0))
        return f"{middle:.2f} ({low:.2f} to {high:.2f})"

    rows = [[COPY, rate(COPY), "", "1"]]
    for name, codec in CODECS.items():
        part = num_bytes(codec, (size,)) / (4 * size)
        both = (rate(f"{name}, {way}") for way in ("encode", "decode"))
        rows.append([name, *both, f"{part:.4f}"])
    return markdown(["", "encode, GB/s", "decode, GB/s", "bytes"], rows)
