"""What a step costs on one GPU: beside plain optax, and against the GPU's limits.

One process measures all steps in turns; then several processes share the GPU, and
exchange their models over the host while it computes. This process starts them, and
writes the results.
"""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

from benches.results import check_at_least, write_results
from decentjax.process.threads import allowed_cores
from train.cli.load import find_config
from train.cli.tables import markdown, to_json
from train.job.processes import Process, run_job
from train.launch import check_port

PLAIN = "AdamW, plain optax"
OURS = "AdamW, decentralized step"
ACCUM = "AccumAdamW, decentralized step"
UPDATE, COPY = "AccumAdamW's update alone", "copy"
# Measured in several processes.
SHARED = COMPUTE, EXCHANGE, BOTH = ("computing", "exchanging", "both at once")

StepSeconds = dict[str, float]


@dataclasses.dataclass(frozen=True, kw_only=True)
class GpuBench:
    """Measures a train step on one GPU, without and with the library around it.

    Example: `decentjax bench gpu --rounds 3`.

    Args:
      config: config whose model, batch, accum_steps and options of XLA are used; its
        batch is computed as one.
      batch: examples in a step; by default the config's.
      processes: number of processes that share the GPU in the second part, a worker
        each; they share the batch. 0 leaves the second part out.
      rounds: number of turns of each step.
      steps: steps measured in a turn.
      device: "cpu" only shows that it runs.
      out: folder for gpu.json and gpu.md.
    """

    config: Path = Path("gpt2_small")
    batch: int | None = None
    processes: int = 2
    rounds: int = 5
    steps: int = 10
    device: Literal["gpu", "cpu"] = "gpu"
    out: Path = Path("runs/gpu")

    def __post_init__(self):
        check_at_least(self, rounds=1, steps=1, processes=0, batch=1)
        if self.processes == 1:
            raise ValueError(
                "one process has no peer to exchange with: processes must be 0, or 2 "
                "or more, got 1"
            )
        if self.processes and sys.platform != "linux":
            raise ValueError("several processes as one job need Linux: --processes 0")
        if not find_config(self.config)[0].is_file():
            raise ValueError(f"there is no config file {self.config}")

    @classmethod
    def from_json(cls, text: str) -> "GpuBench":
        """Returns the options that `to_json` has written."""
        given = json.loads(text)
        paths = {name: Path(given[name]) for name in ("config", "out")}
        return cls(**{**given, **paths})


@dataclasses.dataclass(frozen=True)
class GpuTiming:
    """The measurements of one process.

    Args:
      device: name of the device, from its driver.
      tokens: tokens in a step.
      flops: FLOPs of the matmuls in a step.
      peak: FLOP/s of the device in bfloat16; None for an unknown device.
      copied_bytes: bytes that the copy reads and writes.
      update_bytes: bytes that AccumAdamW's update must move, mean over the steps.
      compiled_bytes: bytes that the compiled update moves.
      seconds: seconds per step by name, median of the rounds.
    """

    device: str
    tokens: int
    flops: float
    peak: float | None
    copied_bytes: float
    update_bytes: float
    compiled_bytes: float
    seconds: StepSeconds


def main(bench: GpuBench) -> int:
    bench.out.mkdir(parents=True, exist_ok=True)
    if bench.device == "cpu":
        os.environ["JAX_PLATFORMS"] = "cpu"  # For the processes started below.
    # jax never starts in this process, as it would take the device's memory.
    argv = [
        sys.executable,
        "-m",
        "decentjax",
        "benches.gpu.gpu_alone",
        to_json(bench),
    ]
    if code := subprocess.run(argv).returncode:
        return code
    result = GpuTiming(**_take_json(bench.out / "alone.json"))
    # Written before the second part, which needs more memory and may fail.
    text = _write(bench, result, {})
    if bench.processes:
        text = _write(bench, result, _shared(bench))
    print(text)
    return 0


def table(bench: GpuBench, result: GpuTiming, shared: StepSeconds) -> str:
    """Returns Markdown: the steps, the update, and the processes that share the GPU."""
    seconds = result.seconds
    head = [
        f"{result.device}, {bench.config.name}",
        "ms/step",
        "tokens/s",
        "share of peak FLOP/s",
        "/ plain optax",
    ]
    rows = [
        [
            name,
            f"{1e3 * seconds[name]:.2f}",
            f"{result.tokens / seconds[name]:.4g}",
            f"{result.flops / seconds[name] / result.peak:.1%}" if result.peak else "",
            f"{seconds[name] / seconds[PLAIN]:.3f}",
        ]
        for name in (PLAIN, OURS, ACCUM)
    ]
    # The update does a few FLOPs for each byte, so the memory limits it. A copy shows
    # the rate that the device reaches, which is less than its data sheet's.
    bandwidth = result.copied_bytes / seconds[COPY]
    share = result.update_bytes / bandwidth / seconds[UPDATE]
    most = result.update_bytes / result.compiled_bytes
    update = (
        f"{UPDATE} takes {1e3 * seconds[UPDATE]:.3g} ms. It must move "
        f"{result.update_bytes / 1e9:.3g} GB, and a copy moves {bandwidth / 1e9:.4g} "
        f"GB/s: {share:.1%} of that limit, of at most {most:.0%} as compiled."
    )
    last = ["", shared_sentence(bench.processes, shared)] if shared else []
    return "\n".join([markdown(head, rows), "", update, *last])


def shared_sentence(processes: int, seconds: StepSeconds) -> str:
    """Returns how much of the exchange over the host the processes hide."""
    compute, exchange, both = (seconds[name] for name in SHARED)
    # 30 ms and 40 ms alone, 50 ms together: 20 of the 40 ms are hidden, of at most 30.
    hidden = (compute + exchange - both) / exchange
    most = min(compute / exchange, 1)
    return (
        f"{processes} processes on it: {COMPUTE} takes {1e3 * compute:.3g} ms a step, "
        f"{EXCHANGE} over the host {1e3 * exchange:.3g} ms, {BOTH} {1e3 * both:.3g} ms,"
        f" {both / max(compute, exchange):.2f} of the longer: {hidden:.0%} of the "
        f"exchange is hidden, of at most {most:.0%}."
    )


def slowest(each: list[StepSeconds]) -> StepSeconds:
    """Returns the longest seconds of all processes, by name."""
    return {name: max(seconds[name] for seconds in each) for name in SHARED}


def _shared(bench: GpuBench) -> StepSeconds:
    """Runs the processes that share the device, and returns the slowest.

    Raises:
      SystemExit: if one fails.
    """
    env = {
        "JAX_LOCAL_DEVICE_IDS": "0",
        # At least one thread to compute and one to exchange.
        "NPROC": str(max(2, allowed_cores() // bench.processes)),
        # Else the first process takes most of the device's memory.
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    }
    module = [sys.executable, "-m", "decentjax", "benches.gpu.gpu_shared"]
    given = [*module, to_json(bench), str(check_port(0))]
    ranks = [str(rank) for rank in range(bench.processes)]
    processes = [Process(rank, [*given, rank], env) for rank in ranks]
    if code := run_job(lambda: processes).code:
        raise SystemExit(code)
    return slowest([_take_json(bench.out / f"shared.{rank}.json") for rank in ranks])


def _take_json(path: Path) -> Any:
    """The value of a file, which is removed."""
    value = json.loads(path.read_text())
    path.unlink()
    return value


def _write(bench: GpuBench, result: GpuTiming, shared: StepSeconds) -> str:
    facts = {"bench": bench, **dataclasses.asdict(result), "shared": shared}
    return write_results(bench.out, "gpu", facts, table(bench, result, shared))
