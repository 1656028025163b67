"""A second thread that calls queued functions in order; one per process."""

import abc
import collections
import contextlib
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp

CLOSING_SECONDS = 10.0
FAILING_SECONDS = 1.0  # After an error, so that peers notice soon.


class Closing(abc.ABC):
    """A context manager that closes after its work, or soon after an error."""

    @abc.abstractmethod
    def close(self, seconds: float = CLOSING_SECONDS) -> None:
        """Ends it after what is in flight, for which it waits at most this long."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.close(CLOSING_SECONDS if kind is None else FAILING_SECONDS)


class Engine(Closing):
    """A thread that calls queued functions in order; a context manager.

    An error in the thread is raised unchanged by the future of the failed call,
    by the futures of all later calls, and by the next `submit`.

    Examples:
      >>> from decentjax import gossip
      >>> with gossip.Engine() as engine:
      ...     future = engine.submit(sum, [1, 2, 3])
      ...     future.result()
      6
    """

    def __init__(self):
        self._tasks: queue.SimpleQueue = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._closed = False
        # `submit` must not queue a call after the None that ends the thread: its future
        # would never complete.
        self._lock = threading.Lock()
        # A daemon: otherwise Python waits at exit for a message that never arrives.
        self._thread = threading.Thread(
            target=self._run, name="decentjax.gossip", daemon=True
        )
        self._thread.start()

    def submit(self, function: Callable, *args: Any) -> Future:
        """Queues a call of the function.

        The call has the precision of the calling thread: `jax.enable_x64` as a context
        applies to one thread only.

        Returns:
          The future of its result. It cannot be cancelled: a peer may be waiting for
          it.

        Raises:
          RuntimeError: if the engine is closed.
        """
        enabled = jnp.result_type(float) == jnp.float64
        future: Future = Future()
        future.set_running_or_notify_cancel()  # A running future has no `cancel`.
        with self._lock:
            if self._error is not None:
                raise self._error
            if self._closed:
                raise RuntimeError("the engine is closed; make a new one")
            self._tasks.put((future, function, args, enabled))
        return future

    def settle(self) -> None:
        """Waits until all queued calls are done."""
        self.submit(int).result()

    @property
    def failed(self) -> bool:
        """Whether a call has raised, so that later calls do not run."""
        return self._error is not None

    def close(self, seconds: float = CLOSING_SECONDS) -> None:
        """Ends the thread after the queued calls; waits at most this long for them."""
        with self._lock:
            self._closed = True
            self._tasks.put(None)
        self._thread.join(seconds)

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            future, function, args, enabled = task
            # Peers still expect the failed message, so no later call may send: none may
            # run.
            if self._error is not None:
                future.set_exception(self._error)
                continue
            try:
                with jax.enable_x64(enabled):
                    future.set_result(function(*args))
            # KeyboardInterrupt too: an unresolved future would block its waiter.
            except BaseException as error:
                self._error = error
                future.set_exception(error)
            # Otherwise these variables keep the last model in memory while the thread
            # waits.
            del task, future, function, args


class SharedEngine(Closing):
    """The engine shared by all exchanges of this process; a context manager.

    Collectives of several processes are matched by the order in which they start.
    Processes that step two models in the same order also submit their exchanges in the
    same order, and a single thread preserves it. With one thread per model, a model
    could be averaged with the other one. The last user ends the thread. A failed engine
    gets no new users.
    """

    _lock: ClassVar = threading.Lock()
    _current: ClassVar[Engine | None] = None
    _users: ClassVar[collections.Counter[Engine]] = collections.Counter()

    def __init__(self):
        self._closed = False
        with self._lock:
            engine = SharedEngine._current
            if engine is None or engine.failed or not self._users[engine]:
                engine = SharedEngine._current = Engine()
            self._users[engine] += 1
        self._engine = engine

    def submit(self, function: Callable, *args: Any) -> Future:
        """Like `Engine.submit`, after the calls of all other users."""
        if self._closed:
            raise RuntimeError(
                "the step's thread is closed: call the step inside its `with`"
            )
        return self._engine.submit(function, *args)

    def settle(self) -> None:
        """Waits until all queued calls are done, including those of other users."""
        self.submit(int).result()

    def close(self, seconds: float = CLOSING_SECONDS) -> None:
        """Like `Engine.close`, but ends the thread only as its last user."""
        with self._lock:
            # Once per user, however often it closes.
            self._users[self._engine] -= not self._closed
            self._closed = True
            is_last = not self._users[self._engine]
            if is_last:
                del self._users[self._engine]
        # Outside the lock, so that a new user need not wait for this one to close.
        if is_last:
            self._engine.close(seconds)
        else:
            # Errors are raised by the futures of the failed calls.
            with contextlib.suppress(BaseException):
                self._engine.submit(int).result(seconds)
