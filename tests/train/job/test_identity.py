"""Which process is meant: this one, one in a container, or one that has ended."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time

import pytest

from tests.jobs import lives, wait_until
from train.job import identity
from train.job.identity import own_identity

# It says who it is once it can be asked, and waits for its end.
TELLS = (
    "import json, sys; from train.job.identity import own_identity; "
    "print(json.dumps(own_identity()), flush=True); sys.stdin.read()"
)


@contextlib.contextmanager
def telling(*before):
    """A process, and its identity as it says."""
    command, pipe = [*before, sys.executable, "-c", TELLS], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        try:
            said = process.stdout.readline()
            if not said:
                pytest.skip("needs root, for a namespace of process ids")
            yield process, identity.Identity(*json.loads(said))
        finally:
            process.kill()


@pytest.fixture
def other():
    with telling() as found:
        yield found


def test_a_process_is_found_while_it_lives(other):
    process, who = other
    assert (who.pid, who.find(), who.is_in_sight) == (process.pid, process.pid, True)
    process.send_signal(signal.SIGSTOP)
    wait_until(lambda: who.state(process.pid) in identity.FROZEN)
    assert who.find() == process.pid
    process.kill()
    wait_until(lambda: not lives(process.pid))  # A zombie: it has its number still.
    assert (who.find(), who.state(process.pid)) == (None, "")


@pytest.mark.parametrize("field", ["started", "boot", "namespace"])
def test_another_process_of_the_same_number_is_not_killed(other, field):
    """As after a restart of the machine, or on another one, or in a container."""
    process, who = other
    assert not who._replace(**{field: "7"}).kill()
    assert process.poll() is None
    assert who.kill()
    assert process.wait(0) == -signal.SIGKILL  # It has ended by then.
    assert not who.kill()


def test_who_starts_later_is_another():
    time.sleep(0.02)  # Two ticks.
    with telling() as (_, first):
        time.sleep(0.02)
        with telling() as (_, second):
            assert first.started != second.started
    assert own_identity() == own_identity()
    assert own_identity().find() == os.getpid()


def test_a_process_in_a_container_is_found_from_outside():
    """It has number 1 or 2 there, which is another process here."""
    with telling("unshare", "--pid", "--fork") as (process, who):
        sees_all = own_identity().namespace == identity.OF_MACHINE
        assert (who.pid, who.is_in_sight) == (1, sees_all)
        found = who.find()
        assert found not in (None, 1, process.pid)
        assert who.kill()
        assert process.wait(10) != 0
    assert who.find() is None
