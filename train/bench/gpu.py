"""What a step costs on one GPU: beside plain optax, and against what the GPU can do.

Contestants take turns in one process; before that several processes share the GPU, and
exchange their models over the host's memory while it computes.
"""

import dataclasses
import json
import os
import platform
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Literal, NamedTuple

from rich.console import Console

from train.launch import check_port
from train.processes import Process, run_job

PLAIN = "AdamW, plain optax"
OURS = "AdamW, decentralized step"
ACCUM = "AccumAdamW, decentralized step"
UPDATE, COPY = "AccumAdamW's update alone", "copy"
# Of several processes.
SHARED = COMPUTE, EXCHANGE, BOTH = (
    "computing alone",
    "exchanging alone over the host",
    "both at once",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GpuBench:
    """Measures a train step on one GPU, without and with the library around it.

    Args:
      config: whose model, batch and accum_steps are used.
      batch: examples in a step; by default the config's.
      processes: that share the GPU in the second part, a worker each; 0 leaves it out.
      rounds: turns of each contestant.
      steps: measured in a turn.
      device: "cpu" only shows that it runs.
      out: folder for gpu.json and gpu.md.
    """

    config: Path = Path("configs/gpt2_small.py")
    batch: int | None = None
    processes: int = 2
    rounds: int = 5
    steps: int = 10
    device: Literal["gpu", "cpu"] = "gpu"
    out: Path = Path("runs/gpu")

    def __post_init__(self):
        least = {"rounds": 1, "steps": 1, "processes": 0, "batch": 1}
        for name, value in least.items():
            given = getattr(self, name)
            if given is not None and given < value:
                raise ValueError(f"{name} must be at least {value}, got {given}")
        if self.processes == 1:
            raise ValueError(
                "a process alone exchanges nothing: take 2 processes or more, or 0"
            )
        if not self.config.is_file():
            raise ValueError(f"there is no config file {self.config}")


class Result(NamedTuple):
    """What was measured in one process.

    Args:
      device: as the driver says it.
      tokens: in a step.
      flops: of the matmuls in a step.
      peak: FLOP/s of the device in bfloat16; None where the device is not known.
      copied_bytes: that the copy reads and writes.
      update_bytes: that AccumAdamW's update must move, in the mean.
      seconds: median of each contestant's rounds.
    """

    device: str
    tokens: int
    flops: float
    peak: float | None
    copied_bytes: float
    update_bytes: float
    seconds: dict[str, float]


def main(bench: GpuBench) -> int:
    # It imports jax, whose threads the race's fork would lose.
    from train.bench.gpu_steps import check_device, measure

    # Else this process would take memory that those which share the device need.
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    check_device(bench.device)
    console = Console(soft_wrap=True, markup=False, highlight=False)
    bench.out.mkdir(parents=True, exist_ok=True)
    # First, as memory that was once taken is not given back.
    shared = _shared(bench, console) if bench.processes else {}
    result = measure(bench, console)
    text = table(bench, result, shared)
    _write_json(bench, result, shared)
    (bench.out / "gpu.md").write_text(text + "\n")
    console.print(text)
    console.print(f"\n{bench.out / 'gpu.json'}  gpu.md")
    return 0


def table(bench: GpuBench, result: Result, shared: dict[str, float]) -> str:
    """Returns Markdown: the steps, the update, and the processes that share."""
    seconds = result.seconds
    head = f"{result.device}, {bench.config.stem}"
    lines = [
        f"| {head} | ms/step | tokens/s | share of peak FLOP/s | / plain optax |",
        "|---" * 5 + "|",
    ]
    for name in (PLAIN, OURS, ACCUM):
        per_second = 1 / seconds[name]
        cells = [
            name,
            f"{1e3 * seconds[name]:.2f}",
            f"{result.tokens * per_second:.4g}",
            f"{result.flops * per_second / result.peak:.1%}" if result.peak else "",
            f"{seconds[name] / seconds[PLAIN]:.3f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    bandwidth = result.copied_bytes / seconds[COPY]
    share = result.update_bytes / bandwidth / seconds[UPDATE]
    lines += [
        "",
        f"{UPDATE} takes {1e3 * seconds[UPDATE]:.3g} ms. It must move "
        f"{result.update_bytes / 1e9:.3g} GB, and a copy moves {bandwidth / 1e9:.4g} "
        f"GB/s: {share:.1%} of that limit.",
    ]
    if shared:
        lines += ["", shared_sentence(bench.processes, shared)]
    return "\n".join(lines)


def shared_sentence(processes: int, seconds: dict[str, float]) -> str:
    """What the processes on one device say of the exchange over the host."""
    compute, exchange, both = (seconds[name] for name in SHARED)
    hidden = (compute + exchange - both) / exchange
    most = min(compute / exchange, 1)
    return (
        f"{processes} processes on it: {COMPUTE} takes {1e3 * compute:.3g} ms, "
        f"{EXCHANGE} {1e3 * exchange:.3g} ms, {BOTH} {1e3 * both:.3g} ms: {hidden:.0%} "
        f"of the exchange is hidden, where {most:.0%} could be."
    )


def _shared(bench: GpuBench, console: Console) -> dict[str, float]:
    """Runs the processes that share the device."""
    path = bench.out / "shared.json"
    threads = max(2, (os.cpu_count() or 1) // bench.processes)
    env = {"JAX_LOCAL_DEVICE_IDS": "0", "NPROC": str(threads)}
    if bench.device == "cpu":
        env["JAX_PLATFORMS"] = "cpu"
    options = json.dumps(dataclasses.asdict(bench), default=str)
    port = str(check_port(0))
    argv = [sys.executable, "-m", "train.bench.gpu_worker", options, port, str(path)]
    with console.status(f"{bench.processes} processes on one device"):
        code = run_job(
            [Process(str(i), [*argv, str(i)], env) for i in range(bench.processes)]
        )
    if code:
        raise SystemExit(code)
    seconds = json.loads(path.read_text())
    path.unlink()
    return seconds


def _write_json(bench: GpuBench, result: Result, shared: dict[str, float]) -> None:
    facts = {
        "bench": json.loads(json.dumps(dataclasses.asdict(bench), default=str)),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, "
        f"Python {platform.python_version()}, jax {version('jax')}",
        **result._asdict(),
        "shared": shared,
    }
    (bench.out / "gpu.json").write_text(json.dumps(facts, indent=1) + "\n")
