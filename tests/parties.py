"""Parties of tests: workers of this process, each on a device of its own."""

import concurrent.futures
import contextlib
import itertools
import threading
from collections.abc import Iterator, Sequence
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


@contextlib.contextmanager
def training(peers: gossip.Peers, state: Any, batch: Any) -> Iterator[dict[int, Any]]:
    """A peer that trains in a thread meanwhile.

    Yields its states by step, each as it was before, without the random key; complete
    once the context has ended.
    """
    ended, seen = threading.Event(), dict[int, Any]()

    def work(state: Any) -> None:
        with peers:
            for step in itertools.count():
                if ended.is_set():
                    return
                seen[step] = jax.device_get(state._replace(key=()))
                state, _ = peers(state, batch, step)

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        working = pool.submit(work, state)
        try:
            yield seen
        finally:
            ended.set()
        working.result()
