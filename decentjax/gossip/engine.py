"""A second thread that runs one function after the other; one that all may share."""

import collections
import contextlib
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, ClassVar

CLOSING_SECONDS = 10.0
FAILING_SECONDS = 1.0  # After an error: the peers are to learn of it soon.


class Engine:
    """A thread that runs one function after the other; a context that ends it.

    An error in the thread is raised, as itself, by the future of what failed, by the
    futures of all that was to follow, and by the next `submit`.
    """

    def __init__(self):
        self._tasks: queue.SimpleQueue = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._closed = False
        # Nothing may be put behind the end of the queue.
        self._lock = threading.Lock()
        # Daemonic: nobody waits at exit for a message that a lost peer does not send.
        self._thread = threading.Thread(
            target=self._run, name="decentjax.gossip", daemon=True
        )
        self._thread.start()

    def submit(self, function: Callable, *args: Any) -> Future:
        """Has the thread call the function, after all that was submitted before.

        Returns:
          The future of its result, which cannot be cancelled: a peer may wait for it.

        Raises:
          RuntimeError: if the engine is closed.
        """
        future: Future = Future()
        future.set_running_or_notify_cancel()
        with self._lock:
            if self._error is not None:
                raise self._error
            if self._closed:
                raise RuntimeError("the engine is closed; make a new one")
            self._tasks.put((future, function, args))
        return future

    def settle(self) -> None:
        """Waits until all that was submitted is done."""
        self.submit(int).result()

    def close(self) -> None:
        """Ends the thread after what was submitted.

        It waits 10 s at the most: what a lost peer will never send is left behind.
        """
        self._end(CLOSING_SECONDS)

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._end(CLOSING_SECONDS if kind is None else FAILING_SECONDS)

    @property
    def failed(self) -> bool:
        """Whether a function raised, so that none that follows will run."""
        return self._error is not None

    def _end(self, seconds: float) -> None:
        with self._lock:
            self._closed = True
            self._tasks.put(None)
        self._thread.join(seconds)

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            future, function, args = task
            if self._error is not None:
                future.set_exception(self._error)
                continue
            try:
                future.set_result(function(*args))
            except BaseException as error:
                self._error = error
                future.set_exception(error)
            # A model must not live on in the variables of a thread that waits.
            del task, future, function, args


class SharedEngine:
    """The engine that all exchanges of this process share; a context that leaves it.

    Collectives find their partners by the order in which they start. Processes that
    step two models in one order submit their exchanges in one order too, and one thread
    keeps it; with a thread each, a model could be averaged with the other one. The last
    to leave ends the thread. An engine that has failed is shared with no newcomer.
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
        """As `Engine.submit`, behind what all others have submitted."""
        if self._closed:
            raise RuntimeError("the engine is closed; make a new one")
        return self._engine.submit(function, *args)

    def settle(self) -> None:
        """Waits until all that was submitted, by the others too, is done."""
        self.submit(int).result()

    def close(self) -> None:
        """Leaves the engine after what was submitted, as `Engine.close`."""
        self._leave(CLOSING_SECONDS)

    def __enter__(self) -> "SharedEngine":
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._leave(CLOSING_SECONDS if kind is None else FAILING_SECONDS)

    def _leave(self, seconds: float) -> None:
        with self._lock:
            self._users[self._engine] -= not self._closed
            self._closed = True
            is_last = not self._users[self._engine]
            if is_last:
                del self._users[self._engine]
        if is_last:
            self._engine._end(seconds)
        else:
            # An error is that of a future, whose owner raises it.
            with contextlib.suppress(BaseException):
                self._engine.submit(int).result(seconds)
