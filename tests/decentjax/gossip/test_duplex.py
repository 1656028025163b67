"""In two threads, one for each direction of a link, the same numbers come."""

import contextlib
import socket
import subprocess
import sys
import threading

import pytest

from decentjax import worker_mesh
from decentjax.gossip import duplex
from decentjax.gossip.duplex import is_duplex
from tests.checkout import ENV, ROOT


@pytest.mark.slow
@pytest.mark.draw(3)
@pytest.mark.parametrize(("num_workers", "count"), [(2, 9), (3, 11), (4, 17)])
def test_in_two_threads_the_numbers_of_one_program_come(num_workers, count):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    argv = [sys.executable, ROOT / "tests/duplex_worker.py", address, str(num_workers)]
    with contextlib.ExitStack() as stack:
        processes = [
            stack.enter_context(
                subprocess.Popen(
                    [*argv, str(number)],
                    env=ENV | {"PYTHONPATH": str(ROOT)},
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
            for number in range(num_workers)
        ]
        for process in processes:
            stack.callback(process.kill)
        outputs = [process.communicate(timeout=240)[0] for process in processes]
    # gloo prints too.
    assert [x.splitlines()[-1] for x in outputs] == [f"same {count}"] * num_workers


def test_devices_of_one_process_share_a_thread():
    assert not is_duplex(worker_mesh(8))
    assert not is_duplex(worker_mesh(1))


def test_after_a_failed_exchange_another_thread_sends():
    """The one that failed may wait for a message that never comes."""
    first, never = duplex._second_thread(), threading.Event()
    waits = first.submit(never.wait)
    duplex._leave(first)
    second = duplex._second_thread()
    assert second is not first
    assert second.submit(sum, [1, 2]).result(10) == 3
    never.set()
    assert waits.result(10)
