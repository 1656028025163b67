"""How signals, and an output that is closed, end a run."""

import os
import signal

import jax
from jax.experimental import multihost_utils

from train.job.processes import STOP_SIGNALS


class Stop:
    """A context in which the first stop signal ends the loop, with all saved.

    The second one ends the process at once, by the kernel's default. In a job of
    several processes jax receives SIGTERM, and all processes agree on the last step.
    """

    def __init__(self):
        self._asked = self._stopped = False
        self._in_job = jax.process_count() > 1
        own = set(STOP_SIGNALS) - ({signal.SIGTERM} if self._in_job else set())
        # Signals that are ignored, as SIGHUP under nohup, stay ignored.
        self._signals = [s for s in own if signal.getsignal(s) != signal.SIG_IGN]
        self._polls = 0

    def __enter__(self) -> "Stop":
        self._before = {s: signal.signal(s, self._receive) for s in self._signals}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @property
    def stopped(self) -> bool:
        """Whether the last `poll` found that the run is to end."""
        return self._stopped

    def poll(self) -> bool:
        """Whether the run is to end now; all processes call it equally often."""
        if self._stopped or not self._in_job:
            self._stopped = self._asked or self._stopped
        else:
            # jax counts from 0 in each job, also where the run resumes at a later step.
            self._polls += 1
            self._stopped = multihost_utils.reached_preemption_sync_point(self._polls)
        return self._stopped

    def ask(self) -> None:
        """Ends the loop as the first signal does."""
        if self._asked:
            return
        self._asked = True
        if self._in_job:
            os.kill(os.getpid(), signal.SIGTERM)

    def _receive(self, number: int, frame: object) -> None:
        del number, frame
        for own in self._signals:
            signal.signal(own, signal.SIG_DFL)
        self.ask()
