"""A run's newest row for Prometheus: a file of the node exporter, or a port of its own.

The sink `--log.sinks prometheus`, and the labels and names by which its numbers are
found: run, id and process, and of an evaluation the model.
"""

import contextlib
import os
import re
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from decentjax.process.address import split_address
from train.run.run_info import read_facts
from train.store.log import Write

PLACE = "DECENTJAX_PROMETHEUS"  # A folder, or HOST:PORT.
LABELS = "run", "id", "process"
EVALUATION = "evaluation/"


@contextlib.contextmanager
def prometheus(config: dict[str, Any], run_dir: Path, start: int) -> Iterator[Write]:
    """Shows the newest numbers until the run ends."""
    from prometheus_client import CollectorRegistry, Gauge, write_to_textfile

    del start
    registry, gauges, names = CollectorRegistry(), dict[str, Gauge](), set[str]()
    process = run_dir.name.partition("process-")[2] or "0"
    identity = read_facts(run_dir)["id"]
    own = config["name"], identity, process

    def put(key: str, value: float, *model: str) -> None:
        if key not in gauges:
            labels = (*LABELS, "model") if model else LABELS
            name = _name(key, names)
            names.add(name)
            gauges[key] = Gauge(name, key, labels, registry=registry)
        gauges[key].labels(*own, *model).set(value)

    def show(step: int, values: dict[str, float]) -> None:
        put("step", step)
        put("row_time_seconds", time.time())
        for key, value in values.items():
            if key.startswith(EVALUATION):
                _, model, score = key.split("/", 2)
                put(EVALUATION + score, value, model)
            else:
                put(key, value)

    place = os.environ.get(PLACE) or str(run_dir / "prometheus")
    if re.fullmatch(r"[^/]*:\d+", place):
        with _served(place, int(process), registry):
            yield show
        return
    path = Path(place, f"decentjax-{identity}-{process}.prom")

    def write(step: int, values: dict[str, float]) -> None:
        show(step, values)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_to_textfile(str(path), registry)

    try:
        yield write
    finally:  # Else the node exporter would show the last row forever.
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def _served(place: str, process: int, registry: Any) -> Iterator[None]:
    """Answers at HOST:PORT, of process K at the K-th port after it."""
    from prometheus_client import start_http_server

    host, port = split_address(f"127.0.0.1{place}" if place[0] == ":" else place)
    server, thread = start_http_server(port + process, host, registry)
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _name(key: str, taken: Collection[str]) -> str:
    """The name of a metric, of the letters that all versions of Prometheus take."""
    name = "decentjax_" + re.sub(r"\W", "_", key, flags=re.ASCII)
    while name in taken:
        name += "_"
    return name
