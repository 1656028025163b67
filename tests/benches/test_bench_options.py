"""What the benches of emulated clusters refuse before anything runs."""

import shlex

import pytest

pytest.importorskip("pyroute2", reason="needs the extra: pip install -e '.[emulate]'")

from benches.__main__ import main

WRONG = [
    ("race --clusters=4", "as 4x2, or 4x2x2 for workers of two processes, got '4'"),
    ("race --clusters 2x1 0x2", "for workers of two processes, got '0x2'"),
    ("race --clusters 2x1x2x2", "for workers of two processes, got '2x1x2x2'"),
    (
        "race --clusters 2x1 2x1x2",
        "devices = 1 of a worker must be a multiple of its 2",
    ),
    ("race --clusters 2x1 255x1", "nodes must be between 1 and 254, got 255"),
    ("race --rate=none", "a bench of clusters needs a rate, such as 200mbit"),
    ("race --rate=fast", "rate must be like 200mbit"),
    ("race --rounds=0", "rounds must be at least 1, got 0"),
    ("race --steps=0", "steps must be at least 1, got 0"),
    ("race --straggler=-1", "straggler must be at least 0, got -1"),
    ("race --work.width=0", "work.width must be at least 1, got 0"),
    ("race --only=(", "only must be a regular expression, got '('"),
    ("race --clusters 3x2 --only=alternating", "3x2, not defined for 3 nodes: exchan"),
    ("race --only=x9", "'x9' matches no contestant on 4x1; there are: compute a"),
    ("stragglers --clusters 4x1 4x2", "two nodes of one worker, such as 4x1, got '4"),
    ("stragglers --clusters 1x1", "two nodes of one worker, such as 4x1, got '1x1'"),
    (
        "stragglers --clusters=2x1x2",
        "two nodes of one worker, such as 4x1, got '2x1x2'",
    ),
    ("stragglers --clusters=4", "for workers of two processes, got '4'"),
    ("stragglers --rate=none", "a bench of clusters needs a rate, such as 200mbit"),
    ("stragglers --pause=-1", "pause must be at least 0, got -1"),
    ("stragglers --delay=-1", "delay must be at least 0, got -1"),
    ("stragglers --slow=0.5", "slow must be at least 1, got 0.5"),
    ("stragglers --steps=0", "steps must be at least 1, got 0"),
    ("quality --rates none", "a race needs rates, such as 200mbit: got 'none'"),
    ("quality --rates fast", "rate must be like 200mbit"),
    ("quality --rates", "rates and horizons need a value each"),
    ("quality --tune 1e-2", "needs a field and several different values to choose"),
    ("quality --tune 1e-2 fast", "optimizer.learning-rate cannot be fast"),
    ("quality --tune 1e-2 1e-3 --budget 0", "budget must be at least 1, got 0"),
    ("quality --horizons 2.0 1.0", "horizons must be positive and rise, got"),
    ("quality --horizons 0.0", "horizons must be positive and rise, got"),
    ("quality --only [", "only must be a regular expression, got '['"),
    ("quality --seeds 0", "seeds must be at least 1, got 0"),
    ("quality --real 'SGD at 1gbit'", "a real run is METHOD at NETWORK, got 'SGD at"),
    ("quality --real 'DAdamW at 2gbit'", "at 1gbit; 200mbit; 50mbit; 10"),
]


@pytest.mark.parametrize(("line", "sentence"), WRONG, ids=lambda text: text[:30])
def test_bad_input_gets_a_sentence(line, sentence, tmp_path, capsys, monkeypatch):
    # A box around the sentence would break it into lines.
    monkeypatch.setenv("COLUMNS", "300")
    with pytest.raises(SystemExit) as end:
        main([*shlex.split(line), "--out", str(tmp_path / "out")])
    said = "".join(capsys.readouterr()) + str(end.value.code)
    assert sentence in said
    assert not (tmp_path / "out").exists()
