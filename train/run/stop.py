"""How signals, and an output that is closed, end a run."""

import os
import signal

import jax
from jax.experimental import multihost_utils

from decentjax.distributed.join import client
from train.job.distributed import gather
from train.job.signals import handled, stop_signals

# By which jax 0.10.2 and 0.12.0 tell all processes of a job that one got SIGTERM.
NOTICE = "RECEIVED_PREEMPTION_NOTICE"


class Stop:
    """A context in which the first stop signal ends the loop, with all saved.

    One that comes a second later or more ends the process at once, by the kernel's
    default; before that it is taken for the same. In a job of several processes jax
    receives SIGTERM, and all processes agree on the last step.
    """

    def __init__(self):
        self.stopped = False  # What the last `poll` returned.
        self._asked = False
        self._in_job = jax.process_count() > 1
        own = stop_signals() - ({signal.SIGTERM} if self._in_job else set())
        self._signals = own
        self._polls = 0

    def __enter__(self) -> "Stop":
        self._handled = handled(self._signals, self._receive)
        self._handled.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._handled.__exit__(None, None, None)

    def poll(self) -> bool:
        """Whether the run is to end now; all processes call it equally often."""
        if not self._in_job:
            self.stopped = self._asked
        elif not self.stopped:
            # jax counts from 0 in each job, also where the run resumes at a later step.
            # Its service picks a step that no process has passed, and all get True at
            # that one: a process that ended alone would leave its peers in an exchange.
            self._polls += 1
            self.stopped = multihost_utils.reached_preemption_sync_point(self._polls)
        return self.stopped

    def is_asked(self) -> bool:
        """Whether this process knows of a signal; asked of any, and as often as wanted.

        For a wait, after which all processes call `agree`.
        """
        if not self._in_job:
            return self._asked
        try:
            return bool(client().key_value_try_get(NOTICE))
        except jax.errors.JaxRuntimeError:  # Not found.
            return False

    def agree(self) -> None:
        """Ends the run here if a process knows of a signal; all processes call it."""
        self.stopped |= any(gather("stop", self.is_asked()))

    def ask(self) -> None:
        """Ends the loop as the first signal does."""
        if self._asked:
            return
        self._asked = True
        if self._in_job:
            # jax's own handler of SIGTERM, in C++, tells the coordinator.
            os.kill(os.getpid(), signal.SIGTERM)

    def _receive(self, number: int, frame: object) -> None:
        del number, frame
        self.ask()
