"""A run as recorded in its folder, without its models."""

import dataclasses
from pathlib import Path
from typing import Any

from decentjax.topology import Topology
from train.cli.config_json import read_fields
from train.config import TopologyConfig, WorkersConfig
from train.run.log import METRICS, read_metrics
from train.run.timeline import Span, read_timelines


@dataclasses.dataclass(frozen=True)
class History:
    """The config and everything that a run has logged.

    Args:
      folder: folder of the run.
      config: fields of config.json; those of another version are kept.
      rows: rows of metrics.jsonl.
      spans: spans of timeline.*.jsonl, of the processes that recorded any.
    """

    folder: Path
    config: dict[str, Any]
    rows: list[dict[str, Any]]
    spans: list[Span]

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    def curve(self, field: str, against: str) -> tuple[list[float], list[float]]:
        """A field of the training rows, against "step" or "seconds"."""
        rows = [row for row in self.rows if field in row]
        return [row[against] for row in rows], [row[field] for row in rows]

    def evaluations(self) -> list[dict[str, Any]]:
        return [row for row in self.rows if "mean_model" in row]

    def topology(self) -> Topology:
        # Not `from_fields`, which would refuse other fields of an older version.
        try:
            topology = TopologyConfig(**self.config["topology"])
            return topology.build(WorkersConfig(**self.config["workers"]))
        except (KeyError, TypeError) as error:
            raise ValueError(
                f"{self.folder} has the config of another version: {error}"
            ) from error


def read_history(run_dir: Path) -> History:
    """Reads the folder of a run.

    Raises:
      ValueError: if the folder holds no run.
    """
    config = run_dir / "config.json"
    if not config.exists():
        raise ValueError(f"{run_dir} holds no run: it has no config.json")
    rows = read_metrics(run_dir)
    if not rows:
        raise ValueError(f"{run_dir} has no rows in {METRICS} yet")
    return History(run_dir, read_fields(config), rows, read_timelines(run_dir))
