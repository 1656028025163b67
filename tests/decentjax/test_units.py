"""Numbers with units, and what takes them."""

import re

import numpy as np
import pytest

from decentjax import overlap, runtime
from decentjax.units import count, rate, seconds


@pytest.mark.parametrize(
    ("parse", "wanted"),
    [
        (rate, {"25gbit": 25e9 / 8, "8bit": 1.0, "10 kbit": 1250.0, "1.6tbit": 2e11}),
        (
            seconds,
            {
                "65ms": 0.065,
                "20us": 20e-6,
                "3ns": 3e-9,
                " .5s ": 0.5,
                "2min": 120.0,
                "0s": 0.0,
            },
        ),
        (count, {"65M": 65e6, "1.5B": 1.5e9, "2.K": 2000.0, "1T": 1e12, "1234": 1234}),
    ],
)
def test_a_number_is_read_in_its_unit(parse, wanted):
    assert {text: parse("size", text) for text in wanted} == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("parse", "texts", "units"),
    [
        (
            rate,
            ["25", "25 Gbit", "gbit", "-1gbit"],
            "bit, kbit, mbit, gbit, tbit, such as 25gbit (3.1 GB/s)",
        ),
        (
            seconds,
            ["65", "-65ms", "1.2.3s", "1s and more", ""],
            "ns, us, ms, s, min, h, such as 65ms",
        ),
        (count, ["65m", "nan"], "K, M, B, T, such as 65M"),
    ],
)
def test_a_number_without_its_unit_is_refused(parse, texts, units):
    for text in texts:
        sentence = f"size must be a number with one of the units {units}, got {text!r}"
        with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
            parse("size", text)


@pytest.mark.parametrize("kind", [runtime.Cluster, overlap.Network])
def test_rates_and_latencies_are_numbers_or_texts(kind):
    size = {"num_nodes" if kind is runtime.Cluster else "devices_per_node": 2}
    named = kind(
        **size,
        between_bytes_per_second="8gbit",
        inside_bytes_per_second=np.float32(5),
        between_latency="20us",
    )
    assert named.between_bytes_per_second == 1e9
    assert named.inside_bytes_per_second == 5
    assert named.between_latency == pytest.approx(2e-5)
    with pytest.raises(ValueError, match="inside_latency must be a number with one of"):
        kind(
            **size,
            between_bytes_per_second=1e9,
            inside_bytes_per_second=1e9,
            inside_latency=None,
        )


@pytest.mark.parametrize("compute", [0.065, "65ms"])
def test_a_job_takes_a_compute_time(compute):
    job = runtime.Job(model_bytes=1e6, compute=compute)
    assert job.draw(0, 2, 0) == pytest.approx([0.065, 0.065])
