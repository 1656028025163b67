"""The exchange bench: its options, its table, and a run on an emulated cluster."""

import json

import pytest

pytest.importorskip("pyroute2", reason="needs the extra: pip install -e '.[emulate]'")

from benches.swaps import COPY, NARROW, ONE, TWO, ExchangeBench, main, table
from tests.machines import needs_root


def row(way, seconds, num_bytes, rate="200mbit"):
    return {
        "rate": rate,
        "megabytes": 4.0,
        "way": way,
        "bytes": num_bytes,
        "seconds": seconds,
        "processor": 2 * seconds,
    }


def test_the_table_compares_with_the_link_and_with_a_copy():
    rows = [row(COPY, 0.001, 0), row(TWO, 0.2, 4e6)]
    rows += [row(COPY, 0.002, 0, "none"), row(ONE, 0.1, 4e6, "none")]
    lines = table(rows).splitlines()
    assert lines[2] == f"| 200mbit | 4 | {COPY} | 1.00 |  | 2.00 | 1 |"
    # 25 MB/s: 4 MB take 0.16 s.
    assert lines[3] == f"| 200mbit | 4 | {TWO} | 200.00 | 1.25 | 400.00 | 200 |"
    assert lines[5] == f"| none | 4 | {ONE} | 100.00 |  | 200.00 | 50 |"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nodes": 1}, "nodes must be at least 2"),
        ({"nodes": 3}, "nodes must be even, as they swap, got 3"),
        ({"steps": 1}, "steps must be at least 2"),
        ({"rates": ()}, "rates and megabytes need a value each"),
        ({"rates": ("fast",)}, "rate must be like 200mbit"),
        ({"megabytes": (float("nan"),)}, "megabytes must be at least 0.01"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        ExchangeBench(**options)


@needs_root
@pytest.mark.slow
def test_nodes_swap_in_each_way(tmp_path, capsys):
    options = {"rates": ("none",), "megabytes": (0.1,), "rounds": 1, "steps": 2}
    assert main(ExchangeBench(nodes=2, out=tmp_path, **options)) == 0
    rows = {
        x["way"]: x
        for x in json.loads((tmp_path / "exchange.json").read_text())["rows"]
    }
    assert rows[TWO]["bytes"] == 1e5
    assert rows[NARROW]["bytes"] == 5e4
    assert all(x["seconds"] > 0 and x["processor"] > 0 for x in rows.values())
    assert f"| none | 0.1 | {TWO} |" in capsys.readouterr().out
