import json

import pytest

from benches.deciding import DecidingBench, main, table


def test_a_row_is_one_process():
    row = {"processes": 2, "worker": 1, "process": 0, "questions": 3.0}
    row |= {"median": 0.25, "p90": 0.5, "step": 3.0}
    assert table([row]).splitlines()[-1] == "| 2 | 1 | 0 | 3 | 0.25 | 0.50 | 3.00 |"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"processes": ()}, "processes must be positive"),
        ({"processes": (0,)}, "processes must be positive"),
        ({"steps": 1}, "steps must be at least 2"),
    ],
)
def test_what_makes_no_sense_gets_a_sentence(options, words):
    with pytest.raises(ValueError, match=words):
        DecidingBench(**options)


@pytest.mark.slow
def test_each_process_is_asked_as_often(tmp_path):
    assert main(DecidingBench(processes=(2,), steps=10, pause=0.0, out=tmp_path)) == 0
    rows = json.loads((tmp_path / "deciding.json").read_text())["rows"]
    places = [(row["worker"], row["process"]) for row in rows]
    assert places == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert len({row["questions"] for row in rows}) == 1
    assert all(0 < row["median"] < row["step"] for row in rows)
