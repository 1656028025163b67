"""Own functions as options of a command line."""

import pytest

from tests import tiny
from train.cli.changes import with_fields


def test_a_function_of_a_file_takes_the_place_of_a_name(tmp_path, capsys):
    file = tmp_path / "own.py"
    file.write_text("def lamb(schedule):\n    return schedule\n")
    made = with_fields(tiny.config, {"optimizer.name": f"{file}:lamb"})
    assert made.optimizer.name(3) == 3
    assert with_fields(made, {"optimizer.name": "lion"}).optimizer.name == "lion"
    with pytest.raises(SystemExit):
        with_fields(made, {"optimizer.decay": f"{file}:lamp"})
    error = capsys.readouterr().err
    assert error == f"error: {file} has no function lamp: did you mean lamb?\n"
