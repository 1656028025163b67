"""Workers of two processes each in one job: what each computes, sends and refuses."""

import re
import sys

import pytest

from tests import two_processes_a_worker
from tests.jobs import LONG, started

LAUNCH = "-m", "decentjax", "launch", "-n", "4", two_processes_a_worker.__file__


def printed(*how):
    with started(sys.executable, *LAUNCH, *how) as job:
        output, _ = job.communicate(timeout=LONG)
    return job.returncode, output


@pytest.mark.slow
def test_both_processes_of_a_worker_train_and_send_their_part_of_it():
    code, output = printed()
    assert code == 0, output
    for name in ("in_step", "background"):
        rows = re.findall(rf"{name} (\d) (\S+) (\d+) (\w+)", output)
        assert sorted(number for number, *_ in rows) == list("0123"), output
        assert all(float(far) < 1e-6 for _, far, *_ in rows), output
        # Half of the matrix, and the vector from each of two devices.
        assert {sent for *_, sent, _ in rows} == {str(4 * (64 * 64 // 2 + 2 * 64))}
        bits = {int(number): bias for number, *_, bias in rows}
        # After the second thread's step the compiler may have cut the vector.
        assert name != "in_step" or bits[0] == bits[1] != bits[2] == bits[3]


@pytest.mark.slow
@pytest.mark.draw(2)
@pytest.mark.parametrize(("how", "workers"), [("others", "[0, 1]"), ("one", "[1]")])
def test_processes_of_a_worker_with_different_models_are_refused(how, workers):
    code, output = printed(how)
    assert code == 70
    words = "the processes of a worker must begin with the same model, but params['b'] "
    assert f"{words}of the workers {workers} differs inside them: make" in output
