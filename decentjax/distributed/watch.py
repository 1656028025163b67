"""Watches the deadline of each step, and ends a job that waits for one process.

No collective and no device takes part: a thread of each process compares what its main
thread is doing with the deadline, and another one exchanges reports through the
key-value store of the job's coordinator.
"""

import atexit
import contextlib
import functools
import json
import math
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import jax

from decentjax.distributed.alarm import Alarm
from decentjax.distributed.deadline import (
    ENDED,
    LATE,
    PhaseReport,
    code_of_main,
    late_processes,
    limit_of,
    names,
    sentence,
)
from decentjax.distributed.failure import ENDING, end_process, say
from decentjax.process import phases

TICK_SECONDS = 0.5  # Where the time is nearly over; before it is twice as long.
PROCESSES_PER_SECOND = 256  # For which the coordinator has time.
# Without a new report, of a part of its time, within these bounds.
SILENT_SHARE, SILENT_TICKS, SILENT_SECONDS = 0.1, 8, 60.0
NAMED_AT = 0.25  # Of its time, after which a process is named that others wait for.
FOLDER = "decentjax/watch"
_watches: list["StepWatch"] = []


class Post(threading.Thread):
    """A thread that exchanges reports through the coordinator, which may never answer.

    Args:
      client: client of the coordinator.
      number: number of this process.
      count: number of processes.

    Attributes:
      count: number of processes.
      reports: newest reports of all processes that have one, by number.
      verdict: the sentence with which the job ends; empty while there is none.
      unanswered: number of reports sent since the coordinator has answered.
    """

    def __init__(self, client: Any, number: int, count: int):
        super().__init__(name="decentjax.watch.post", daemon=True)
        self.count, self.reports = count, dict[int, PhaseReport]()
        self.verdict, self.unanswered = "", 0
        self._client, self._number = client, number
        self._same = dict.fromkeys(range(count), 0)
        self._letters = queue.SimpleQueue[tuple[PhaseReport, bool, str]]()
        self.start()

    def send(self, report: PhaseReport, asks: bool, verdict: str = "") -> None:
        """Sends a report, in place of one that waits to be sent.

        Args:
          report: what this process says of itself.
          asks: whether to read the reports of all.
          verdict: sentence with which the job ends, if there is no earlier one.
        """
        self.unanswered += 1
        self._letters.put((report, asks, verdict))

    def silent(self, ticks: int) -> set[int]:
        """Returns the other processes that have sent nothing new for so long."""
        return {
            number
            for number, same in self._same.items()
            if same >= ticks and number != self._number
        }

    def run(self) -> None:
        phase = ""
        while phase != ENDED:
            report, asks, verdict = self._letters.get()
            phase = report.phase
            if not self._letters.empty():
                continue  # For a newer one.
            with contextlib.suppress(jax.errors.JaxRuntimeError):  # It is gone.
                self._exchange(report, asks, verdict)
                self.unanswered = 0

    def _exchange(self, report: PhaseReport, asks: bool, verdict: str) -> None:
        # What all read each time: the verdict, and the report of process 0, without
        # which nobody could read it.
        client, common, folder = self._client, f"{FOLDER}/common/", f"{FOLDER}/reports/"
        key = f"{common if self._number == 0 else folder}{self._number}"
        client.key_value_set(key, json.dumps(report), allow_overwrite=True)
        if verdict:
            with contextlib.suppress(jax.errors.JaxRuntimeError):  # There is one.
                client.key_value_set(f"{common}verdict", verdict)
        texts = _read(client, common)
        self.verdict = texts.pop("verdict", "")
        before = self.reports
        texts |= _read(client, folder) if asks else {}
        new = {int(key): PhaseReport(*json.loads(text)) for key, text in texts.items()}
        self.reports = before | new
        if not asks:
            return
        for i, ticks in self._same.items():
            one = self.reports.get(i)
            is_new = one != before.get(i) or (one is not None and one.phase == ENDED)
            self._same[i] = 0 if is_new else ticks + 1


def _read(client: Any, folder: str) -> dict[str, str]:
    found = client.key_value_dir_get(folder)
    return {key.rpartition("/")[2]: text for key, text in found}


class StepWatch:
    """Ends this process, and its job, once a phase of a step takes too long.

    Each process reports its phase twice a second. One whose time is over looks who is
    behind it: while that process is within its own limit, it waits. Otherwise the
    process that gives no sign, or is furthest behind, is named to all, who print the
    same line and end with exit code 72.

    Time passes in ticks: what a machine sleeps, or a process is stopped, is not
    counted. In code that holds Python's lock an alarm ends the process, and its job
    names it by its silence.

    Args:
      deadline: longest time of a phase, seconds; inf for none, None to learn it.
      post: exchange of the reports; None for a process on its own.
      number: number of this process.
      tick: seconds between two reports where its time is nearly over.
      is_over: whether the job has ended, and with it the watch.
      end: function that ends the process, of a message, an exit code and its number.
    """

    def __init__(
        self,
        deadline: float | None,
        post: Post | None = None,
        number: int = 0,
        tick: float = TICK_SECONDS,
        is_over: Callable[[], bool] = lambda: False,
        end: Callable[[str, int, int], Any] = end_process,
    ):
        self._deadline, self._post, self._number = deadline, post, number
        self._tick, self._is_over, self._end = tick, is_over, end
        self._beat, self._named = 0, list[Any]()
        self._closing, self._alarm = threading.Event(), Alarm()
        self._thread = threading.Thread(
            target=self._run, name="decentjax.watch", daemon=True
        )
        self._thread.start()
        atexit.register(self.close)

    def close(self) -> None:
        """Ends the watch: this process has done its part."""
        atexit.unregister(self.close)
        if self._closing.is_set():
            return
        self._closing.set()
        self._thread.join(SILENT_TICKS * self._tick)
        if self._post is not None:
            _, step, _, turn = phases.now()
            last = PhaseReport(self._beat + 1, ENDED, step, turn, 0.0, 0.0)
            self._post.send(last, asks=False)
            # Python's exit would crash a thread that is in a call.
            self._post.join(SILENT_TICKS * self._tick)

    def _run(self) -> None:
        spent: dict[str, tuple[float, float]] = {}  # Beginning and seconds of phases.
        tick, at = self._tick, time.monotonic()
        self._set_alarm(self._report(phases.now(), 0.0))
        while not self._closing.wait(tick) and not self._is_over():
            now, current = time.monotonic(), phases.now()
            passed = min(now - at, 2 * tick)
            since, before = spent.get(current.phase, (current.since, 0.0))
            begun = before if since == current.since else 0.0
            seconds = min(begun + passed, now - current.since)
            spent[current.phase], at = (current.since, seconds), now
            own = self._report(current, seconds)
            self._set_alarm(own)
            tick = self._tick if self._is_near(own) else 2 * self._tick
            if self._post is not None:
                self._look(own, self._post)
            elif late := late_processes({self._number: own}):
                self._end(sentence(late, {self._number: own}), LATE, self._number)
        self._alarm.close()

    def _report(self, current: phases.Now, seconds: float) -> PhaseReport:
        self._beat += 1
        limit = limit_of(current.phase, self._deadline, phases.median_seconds())
        at, is_own = code_of_main() if seconds > self._tick else ("", False)
        phase, step, _, turn = current
        seconds = round(seconds, 1)
        return PhaseReport(self._beat, phase, step, turn, seconds, limit, at, is_own)

    def _set_alarm(self, own: PhaseReport) -> None:
        """Ends the process where this thread gets no turn for the rest of its time."""
        left = max(own.limit - own.seconds, 0.0)
        if own.phase == phases.STARTING:  # Perhaps a script without phases.
            left = math.inf
        self._alarm.set(left + self._silent_ticks(own) * self._tick)

    def _look(self, own: PhaseReport, post: Post) -> None:
        """Exchanges reports, and ends the process if there is a verdict."""
        is_unanswered = post.unanswered >= self._silent_ticks(own)
        reports = {**post.reports, self._number: own}
        is_late = own.seconds >= own.limit
        verdict = self._verdict(reports, post) if is_late else ""
        post.send(own, self._is_near(own) or self._number == 0, verdict)
        if post.verdict or (verdict and is_unanswered):
            with ENDING:
                # All read the same verdict before the first end breaks connections.
                self._closing.wait(3 * self._tick)
                self._end(post.verdict or verdict, LATE, self._number)
        if self._number == 0 and own.step >= 0 and not is_late:
            self._name_late(reports)

    def _is_near(self, own: PhaseReport) -> bool:
        """Whether its time is over before the others' silence could be counted."""
        return own.limit - own.seconds < (self._silent_ticks(own) + 2) * self._tick

    def _silent_ticks(self, own: PhaseReport) -> int:
        seconds = min(SILENT_SHARE * own.limit, SILENT_SECONDS)
        return max(SILENT_TICKS, math.ceil(seconds / self._tick))

    def _verdict(self, reports: dict[int, PhaseReport], post: Post) -> str:
        """The verdict where the time of this process is over; empty while it waits."""
        ticks = self._silent_ticks(reports[self._number])
        # Process 0 has the coordinator.
        silent = {0} if post.unanswered >= ticks else post.silent(ticks)
        if not silent and len(reports) < post.count:
            return ""
        late = late_processes(reports, silent)
        return sentence(late, reports, silent) if late else ""

    def _name_late(self, reports: dict[int, PhaseReport]) -> None:
        """Names, early, a process for which others wait."""
        early = {i: x._replace(limit=NAMED_AT * x.limit) for i, x in reports.items()}
        late = late_processes(early)
        named = [(i, reports[i].phase, reports[i].step) for i in late]
        if late and len(late) < len(reports) and named != self._named:
            self._named = named
            say(f"warning: others wait: {names(late, reports)}")


def watch(
    deadline: float | None,
    number: int = 0,
    count: int = 1,
    client: Any = None,
    is_over: Callable[[], bool] = lambda: False,
) -> None:
    """Watches this process until it ends, or `close_watch`.

    Args:
      deadline: as of `StepWatch`.
      number: number of this process.
      count: number of processes of the job.
      client: client of its coordinator; None for a process on its own.
      is_over: whether the job has ended.
    """
    _note_compiling()
    phases.note(phases.PREPARING)
    tick = max(TICK_SECONDS, count / PROCESSES_PER_SECOND)
    post = None if client is None else Post(client, number, count)
    _watches.append(StepWatch(deadline, post, number, tick, is_over))


def close_watch() -> None:
    """Ends the watch of this process, if it has one: no process waits for it now."""
    while _watches:
        _watches.pop().close()


@functools.cache
def _note_compiling() -> None:
    """From now on notes as a phase where jax compiles, in whichever program."""
    before, noted = phases.now(), None  # Around a compilation, and within.

    def heard(event: str, duration_secs: float, **_: Any) -> None:
        nonlocal before, noted
        del duration_secs
        if threading.current_thread() is not threading.main_thread():
            return
        if event.endswith("jaxpr_to_mlir_module_duration"):  # Then it compiles.
            before = before if phases.now() == noted else phases.now()
            phases.note(phases.COMPILING)
            noted = phases.now()
        elif event.endswith("backend_compile_duration") and phases.now() == noted:
            phases.note_again(before)
            noted = None

    jax.monitoring.register_event_duration_secs_listener(heard)
