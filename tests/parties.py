"""Parties of tests: workers of this process, each on a device of its own."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from decentjax import gossip, worker_mesh


def party_of(
    book: gossip.Book | Path | str,
    workers: Sequence[int],
    devices: Sequence[Any] | None = None,
    **options: Any,
) -> gossip.Party:
    """A party over a book or its folder; by default on the devices of its workers."""
    if isinstance(book, Path | str):
        book = gossip.Folder(book)
    if devices is None:
        devices = [jax.devices()[worker] for worker in workers]
    mesh = worker_mesh(len(workers), devices)
    return gossip.Party(book, workers, mesh, **options)
