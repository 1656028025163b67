"""What a step costs on one GPU: beside plain optax, and against what the GPU can do.

One process has all contestants take turns; then several share the GPU, and exchange
their models over the host while it computes. This one starts them, and sums up.
"""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

from train.bench.work import machine
from train.job.processes import Process, run_job
from train.launch import check_port

PLAIN = "AdamW, plain optax"
OURS = "AdamW, decentralized step"
ACCUM = "AccumAdamW, decentralized step"
UPDATE, COPY = "AccumAdamW's update alone", "copy"
# Of several processes.
SHARED = COMPUTE, EXCHANGE, BOTH = ("computing", "exchanging", "both at once")

Seconds = dict[str, float]


@dataclasses.dataclass(frozen=True, kw_only=True)
class GpuBench:
    """Measures a train step on one GPU, without and with the library around it.

    Args:
      config: whose model, batch, accum_steps and options of XLA are used; its batch is
        computed as one.
      batch: examples in a step; by default the config's.
      processes: that share the GPU in the second part, a worker each, with so many
        parts of the batch; 0 leaves it out.
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
        if self.processes and sys.platform != "linux":
            raise ValueError("several processes as one job need Linux: --processes 0")
        if not self.config.is_file():
            raise ValueError(f"there is no config file {self.config}")

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), default=str)

    @classmethod
    def from_json(cls, text: str) -> "GpuBench":
        given = json.loads(text)
        return cls(
            **{**given, "config": Path(given["config"]), "out": Path(given["out"])}
        )


@dataclasses.dataclass(frozen=True)
class Result:
    """What was measured in one process.

    Args:
      device: as the driver says it.
      tokens: in a step.
      flops: of the matmuls in a step.
      peak: FLOP/s of the device in bfloat16; None where the device is not known.
      copied_bytes: that the copy reads and writes.
      update_bytes: that AccumAdamW's update must move, in the mean.
      compiled_bytes: that it moves as compiled.
      seconds: median of each contestant's rounds.
    """

    device: str
    tokens: int
    flops: float
    peak: float | None
    copied_bytes: float
    update_bytes: float
    compiled_bytes: float
    seconds: Seconds


def main(bench: GpuBench) -> int:
    bench.out.mkdir(parents=True, exist_ok=True)
    # Here jax never starts: the device's memory is theirs.
    argv = [sys.executable, "-m", "train.bench.gpu.gpu_alone", bench.to_json()]
    code = subprocess.run(argv, env={**os.environ, **_platform(bench)}).returncode
    if code:
        return code
    path = bench.out / "alone.json"
    result = Result(**json.loads(path.read_text()))
    path.unlink()
    _write(bench, result, {})
    if bench.processes:
        code, shared = _shared(bench)
        if code:
            return code
        _write(bench, result, shared)
    print((bench.out / "gpu.md").read_text())
    print(f"{bench.out / 'gpu.json'}  gpu.md")
    return 0


def table(bench: GpuBench, result: Result, shared: Seconds) -> str:
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
    most = result.update_bytes / result.compiled_bytes
    lines += [
        "",
        f"{UPDATE} takes {1e3 * seconds[UPDATE]:.3g} ms. It must move "
        f"{result.update_bytes / 1e9:.3g} GB, and a copy moves {bandwidth / 1e9:.4g} "
        f"GB/s: {share:.1%} of that limit, of at most {most:.0%} as it is compiled.",
    ]
    if shared:
        lines += ["", shared_sentence(bench.processes, shared)]
    return "\n".join(lines)


def shared_sentence(processes: int, seconds: Seconds) -> str:
    """What the processes on one device say of the exchange over the host."""
    compute, exchange, both = (seconds[name] for name in SHARED)
    hidden = (compute + exchange - both) / exchange
    most = min(compute / exchange, 1)
    return (
        f"{processes} processes on it: {COMPUTE} takes {1e3 * compute:.3g} ms a step, "
        f"{EXCHANGE} over the host {1e3 * exchange:.3g} ms, {BOTH} {1e3 * both:.3g} ms,"
        f" {both / max(compute, exchange):.2f} of the longer: {hidden:.0%} of the "
        f"exchange is hidden, of at most {most:.0%}."
    )


def _shared(bench: GpuBench) -> tuple[int, Seconds]:
    """Runs the processes that share the device; returns their code and the slowest."""
    threads = max(2, (os.cpu_count() or 1) // bench.processes)
    env = {
        **_platform(bench),
        "JAX_LOCAL_DEVICE_IDS": "0",
        "NPROC": str(threads),
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    }
    module = [sys.executable, "-m", "train.bench.gpu.gpu_shared"]
    given = [*module, bench.to_json(), str(check_port(0))]
    ranks = [str(rank) for rank in range(bench.processes)]
    code = run_job([Process(rank, [*given, rank], env) for rank in ranks])
    if code:
        return code, {}
    paths = [bench.out / f"shared.{rank}.json" for rank in ranks]
    each = [json.loads(path.read_text()) for path in paths]
    for path in paths:
        path.unlink()
    return 0, slowest(each)


def slowest(each: list[Seconds]) -> Seconds:
    """The longest that any process took, by name."""
    return {name: max(seconds[name] for seconds in each) for name in SHARED}


def _platform(bench: GpuBench) -> dict[str, str]:
    return {"JAX_PLATFORMS": "cpu"} if bench.device == "cpu" else {}


def _write(bench: GpuBench, result: Result, shared: Seconds) -> None:
    facts: dict[str, Any] = {
        "bench": json.loads(bench.to_json()),
        "machine": machine("jax"),
        **dataclasses.asdict(result),
        "shared": shared,
    }
    (bench.out / "gpu.json").write_text(json.dumps(facts, indent=1) + "\n")
    (bench.out / "gpu.md").write_text(table(bench, result, shared) + "\n")
