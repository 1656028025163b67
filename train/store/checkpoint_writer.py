"""Writes the checkpoints of a run in the background; removes the oldest."""

import contextlib
import errno
import functools
import json
import logging
import os
import queue
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from decentjax import WorkerState
from decentjax.distributed.failure import lost_peer
from decentjax.distributed.join import WAIT_SECONDS, client
from train.cli.command import SaveError
from train.cli.config_json import to_json
from train.config import Config
from train.job.provenance import Provenance
from train.store.checkpoints import UNFINISHED, find_checkpoints
from train.store.folder import MADE_AGAIN, writing
from train.store.log import warn
from train.store.manifest import sync, write_manifest

# Its dataclasses hide their fields from type checkers.
_args: Any = ocp.args

BARRIER_SECONDS = 2.0  # For a barrier to say that its time is over.
TOLD_SECONDS = 0.5  # Between looks at whether a process has told the others.
FAILING_SECONDS = 1.0  # After an error in a job, so that the peers learn of it soon.
# Errors of a file system that explain why nothing can be written.
REASONS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EIO)


class Checkpoints:
    """Writes the checkpoints of a run in the background; a context that waits for them.

    Args:
      run_dir: folder of the run.
      num_kept: number of newest checkpoints that stay on disk.
      renew: function that makes the run's folder again after it was removed.
      provenance: the run's provenance, which each checkpoint has.
    """

    def __init__(
        self,
        run_dir: Path,
        num_kept: int,
        renew: Callable[[], None] = lambda: None,
        provenance: Provenance | None = None,
    ):
        # Of the start: what is edited while a run trains is not what it trains by.
        known = None if provenance is None else provenance._asdict()
        self._made_by = {"provenance": known}
        self._folder, self._renew = (run_dir / "checkpoints").absolute(), renew
        self._num_kept = num_kept
        options = ocp.options.AsyncOptions(
            post_finalization_callback=self._sign,
            # Else a folder that cannot be made is waited for, where the disk is full.
            create_directories_asynchronously=False,
        )
        if jax.process_count() > 1:
            options.timeout_secs = WAIT_SECONDS
            barrier = ocp.multihost.get_barrier_sync_fn()
            options.barrier_sync_fn = _bounded(barrier, self._is_told)
        self._writer = ocp.AsyncCheckpointer(
            ocp.CompositeCheckpointHandler(), async_options=options
        )
        self._step = -1  # Step of the newest save, for its error.
        self._is_lost = False  # Whether the files of that save were removed.
        self._num_saves = 0
        _hide_closed_loops()
        for name in ("absl", "asyncio"):
            logging.getLogger(name).addFilter(_is_not_of_orbax)
        if jax.process_index() == 0:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._drop_unfinished()

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            if self.wait():
                raise SaveError(f"{self._folder} was removed as the run ended")
            return
        # A lost peer never writes its part, so in a job the wait is short. The thread
        # is a daemon: Python would wait for any other at its exit.
        seconds = FAILING_SECONDS if jax.process_count() > 1 else None
        waiting = threading.Thread(target=self._try_to_wait, daemon=True)
        waiting.start()
        waiting.join(seconds)

    def _try_to_wait(self) -> None:
        with contextlib.suppress(SaveError):  # The error that ended the run is shown.
            self.wait()

    def save(self, step: int, state: WorkerState, config: Config) -> None:
        """Starts to save the state after `step` steps, and returns before it is saved.

        Raises:
          SaveError: if this checkpoint cannot be written, or the last one was not.
        """
        self.wait()
        if jax.process_index() == 0:
            self._make_anew(step)
        self._step, self._is_lost = step, False
        self._num_saves += 1
        run = {"step": step, "config": json.loads(to_json(config))}
        # Orbax copies the state to the host before `save` returns: the next step
        # donates, and so overwrites, these arrays.
        with self._explained():
            self._writer.save(
                self._folder / str(step),
                args=_args.Composite(
                    state=_args.StandardSave(state),
                    run=_args.JsonSave(run | self._made_by),
                ),
            )

    def _sign(self) -> None:
        """Writes the manifest, before orbax renames the finished folder.

        Orbax calls it in its thread, in process 0, once all processes have written.
        """
        for path in self._folder.glob(f"{self._step}{UNFINISHED[1:]}"):
            return write_manifest(path)
        raise FileNotFoundError(f"the unfinished step {self._step} is gone")

    def _make_anew(self, step: int) -> None:
        """Makes the folder for a step again, where it was removed meanwhile."""
        self._renew()
        if self._is_lost or not self._folder.exists():
            warn(f"{self._folder} {MADE_AGAIN}")
        with writing(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
        stray = self._folder / str(step)  # Of one that was removed in part.
        if stray.exists() and step not in self._saved():
            shutil.rmtree(stray, ignore_errors=True)

    def check(self) -> bool:
        """Whether to save again at once, as the newest checkpoint was removed.

        A job does at its next save, of which all processes know.

        Raises:
          SaveError: if it could not be written.
        """
        with self._explained():
            self._writer.check_for_errors()
        return self._is_lost and jax.process_count() == 1

    def wait(self) -> bool:
        """Waits until all is on disk, and removes the oldest checkpoints.

        Returns:
          Whether the newest was removed meanwhile.

        Raises:
          SaveError: if the newest checkpoint could not be written.
        """
        with self._explained():
            self._writer.wait_until_finished()
            if self._folder.exists():
                sync(self._folder)  # A power cut may undo orbax's rename until then.
        # Only once the newest is complete: until then the oldest may be the only one.
        if jax.process_index() == 0:
            saved = list(self._saved())
            for old in saved[: -self._num_kept]:
                self._remove(old)
            return self._is_lost or (self._step >= 0 and self._step not in saved)
        return self._is_lost

    def _remove(self, step: int) -> None:
        path = self._folder / str(step)
        unfinished = path.with_name(path.name + UNFINISHED.strip("*"))
        try:
            path.rename(unfinished)  # No reader finds it half removed.
            shutil.rmtree(unfinished)
        except OSError as error:  # Such as a file that another machine still reads.
            warn(f"{path} could not be removed: {error.strerror}")

    def has(self, step: int) -> bool:
        """Whether a step is saved, or is being saved."""
        return step == self._step or step in self._saved()

    def _saved(self) -> dict[int, Path]:
        return find_checkpoints(self._folder.parent).steps

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Turns any error in writing into a SaveError of one sentence."""
        try:
            yield
        except Exception as error:
            is_gone = not [*self._folder.glob(f"{self._step}{UNFINISHED[1:]}")]
            self._drop_unfinished()
            # Tensorstore may wait in a folder that is gone until its time is over.
            ended = isinstance(error, TimeoutError) and (is_gone or self._hears())
            if _is_removed(error) or ended:
                self._step, self._is_lost = -1, True
                self._tell()
                return
            raise SaveError(
                f"the checkpoint of step {self._step} could not be written to "
                f"{self._folder}: {_reason(error)}; on disk are steps "
                f"{list(self._saved())}"
            ) from error

    def _tell(self) -> None:
        """Tells the other processes of a job, who wait for this one in a barrier."""
        if jax.process_count() > 1:
            key = f"{self._key()}{jax.process_index()}"
            tell = functools.partial(client().key_value_set, key, "removed")
            threading.Thread(target=tell, daemon=True).start()

    def _is_told(self) -> bool:
        return bool(client().key_value_dir_get(self._key()))

    def _hears(self) -> bool:
        """Whether another process has told; not where the coordinator is silent."""
        if jax.process_count() == 1:
            return False
        answers: queue.SimpleQueue[bool] = queue.SimpleQueue()
        ask = lambda: answers.put(self._is_told())  # noqa: E731
        threading.Thread(target=ask, daemon=True).start()
        with contextlib.suppress(queue.Empty):
            return answers.get(timeout=BARRIER_SECONDS)
        return False

    def _key(self) -> str:
        return f"checkpoints/{self._num_saves}/"

    def _drop_unfinished(self) -> None:
        """Removes incomplete checkpoints of an earlier process, or of a failure."""
        for _ in range(20):  # After a failure orbax's other threads still write.
            unfinished = list(self._folder.glob(UNFINISHED))
            for path in unfinished:
                shutil.rmtree(path, ignore_errors=True)
            if not unfinished:
                return
            time.sleep(0.05)


def _bounded(
    barrier: Callable[..., None], is_told: Callable[[], bool] = lambda: False
) -> Callable[..., None]:
    """A barrier that ends where the coordinator, who counts its time, is out of reach.

    jax's call to a coordinator behind a link that is down does not return. It ends too
    where a process has told the others that the files were removed.
    """

    def wait(*, key: str, timeout_ms: int) -> None:
        ends: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()
        has_ended = threading.Event()

        def call() -> None:
            try:
                barrier(key=key, timeout_ms=timeout_ms)
            except Exception as error:
                ends.put(error)
            else:
                ends.put(None)

        def watch() -> None:
            while not has_ended.wait(TOLD_SECONDS):
                if is_told():
                    return ends.put(FileNotFoundError("a peer's files were removed"))

        for one in (call, watch):
            threading.Thread(target=one, daemon=True).start()
        try:
            error = ends.get(timeout=timeout_ms / 1000 + BARRIER_SECONDS)
        except queue.Empty:
            error = TimeoutError(f"no answer at {key}")
        has_ended.set()
        if error is not None:
            raise error

    return wait


@functools.cache
def _hide_closed_loops() -> None:
    """Hides an error of tensorstore's threads, one for each part of a failed save.

    They call event loops that orbax has closed by then.
    """
    shown = sys.unraisablehook

    def show(failed: Any) -> None:
        if str(failed.exc_value) != "Event loop is closed":
            shown(failed)

    sys.unraisablehook = show


def _is_not_of_orbax(record: logging.LogRecord) -> bool:
    """A filter of orbax's threads, which log a traceback for what is a SaveError."""
    return "orbax" not in record.pathname + record.getMessage()


def _is_removed(error: Exception) -> bool:
    """Whether a save failed as someone has removed its files."""
    # Of the system, tensorstore and orbax.
    words = os.strerror(errno.ENOENT), "NOT_FOUND", "does not exist"
    return isinstance(error, FileNotFoundError) or any(x in str(error) for x in words)


def _reason(error: Exception) -> str:
    """The file system's reason in a few words, if there is one."""
    if isinstance(error, TimeoutError):
        return "lost a peer: not all processes have written their parts in time"
    lost = lost_peer(error)  # What is saved comes from an exchange that has failed.
    if lost is not None:
        return lost
    # Errors of tensorstore are ValueErrors that quote the system's message.
    text = str(error)
    for reason in map(os.strerror, REASONS):
        if reason in text:
            return reason.lower()
    return text.splitlines()[0] if text else type(error).__name__
