"""Reports on the compiled steps of a run: tables, a verdict, JSON, a figure."""

import dataclasses
from pathlib import Path

from matplotlib.backend_bases import FigureCanvasBase
from matplotlib.figure import Figure
from rich.console import Console, RenderableType

from decentjax import AXIS
from decentjax.overlap import Collective
from train.cli.plain_console import PlainConsole
from train.cli.tables import aligned, write_json
from train.figures.schedule_figure import draw_schedules
from train.network import MaybeRate
from train.preflight.compile import Finding, Preflight, inspect, with_all_reduce
from train.preflight.xla_tuning import Tuning, tuned
from train.targets import Gpu
from train.xla import as_arguments

MEMORY_SHARE = 0.75  # XLA's default share of a GPU's memory.
MOST_MEMORY = 0.95  # The driver needs the rest.


@dataclasses.dataclass(frozen=True, kw_only=True)
class PreflightFlags:
    """A cluster, and what is reported of a run on it.

    Args:
      target: t4, a40, a100_40, a100_80, h100, h200, b200, a TPU slice such as
        v5e:4x4, or a file NAME.py that defines `target`.
      nodes: number of nodes; their GPUs are the workers.
      gpus_per_node: number of GPUs per node.
      between: rate of a node to other nodes, over one link, such as 100gbit; by
        default that of the vendor's own servers.
      tune: search for options of XLA that make the step shorter; --no-tune skips it.
      require_overlap: exit with code 1 if a smaller share of the exchanged bytes is
        covered, or not all bytes are found in the program, as if the memory does not
        suffice.
      out: file for all results as JSON.
      figure: file for the schedule as a figure, such as NAME.svg.

    Raises:
      ValueError: if `require_overlap` is no share, or a file cannot be written.
    """

    target: str
    nodes: int
    gpus_per_node: int
    between: MaybeRate = None
    tune: bool = True
    require_overlap: float | None = None
    out: Path | None = None
    figure: Path | None = None

    def __post_init__(self):
        # Compiling takes minutes, after which a wrong name of a file would be late.
        share, figure = self.require_overlap, self.figure
        if share is not None and not 0 <= share <= 1:
            raise ValueError(
                f"require-overlap must be a share from 0 to 1, got {share}"
            )
        for path in (self.out, figure):
            if path is not None and not path.parent.is_dir():
                raise ValueError(
                    f"the folder {path.parent} for {path.name} does not exist"
                )
            if path is not None and path.is_dir():
                raise ValueError(f"{path} is a folder, wanted a file")
        kinds = FigureCanvasBase.get_supported_filetypes()
        if figure is not None and figure.suffix[1:] not in kinds:
            raise ValueError(
                f"a figure must be a file such as {figure.stem}.svg, of one of the "
                f"formats {', '.join(kinds)}, got {figure.name}"
            )


def report(preflight: Preflight, flags: PreflightFlags) -> int:
    """Compiles, prints, writes and draws; returns the exit code.

    Table and verdict are those of the run as configured; better options of XLA follow.

    Args:
      preflight: run on its cluster.
      flags: what to search for, to require and to write.
    """
    out, figure = flags.out, flags.figure
    console = PlainConsole(width=120, soft_wrap=True, highlight=False)
    workers = preflight.config.workers
    console.print(f"{_title(preflight)}, {workers.workers_per_node} per node")
    runs = [preflight]
    if not preflight.method.sends_gradients:
        runs.append(with_all_reduce(preflight))
    found, *others = (inspect(run, run.options, console) for run in runs)
    rows = sum(others, found)
    console.print(_steps(rows), _collectives(found), "", sep="\n")
    passed = verdict(preflight, found, flags.require_overlap, console)
    tunings: dict[str, Tuning] = {}
    # The candidates are options for GPUs, and one worker sends nothing.
    if flags.tune and isinstance(preflight.target, Gpu) and workers.num_workers > 1:
        tunings = {run.method.name: advice(run, console) for run in runs}
    if out is not None:
        facts = {
            "config": preflight.config,
            "target": preflight.target.name,
            "memory_bytes": preflight.target.memory_bytes,
            "xla_options": preflight.options,
            "tuning": tunings,
            "steps": [row.as_dict() for row in rows],
        }
        write_json(out, facts)
        console.print(f"json      {out}")
    if figure is not None:
        draw(rows, preflight).savefig(figure, bbox_inches="tight")
        console.print(f"figure    {figure}")
    return 0 if passed else 1


def draw(rows: list[Finding], preflight: Preflight) -> Figure:
    """Draws all-reduce above the longest exchange, each as work above messages."""
    decentralized = [row for row in rows if row.name != "all_reduce"]
    shown = [row for row in rows if row.name == "all_reduce"]
    if decentralized:
        shown.append(max(decentralized, key=lambda row: row.estimate.step))
    steps = {}
    for row in shown:
        spans, estimate = row.estimate.spans, row.estimate
        heading = (
            f"{row.name}: {row.schedule.covered(AXIS):.0%} covered, "
            f"{1e3 * estimate.exposed:.2g} of {1e3 * estimate.step:.3g} ms exposed"
        )
        steps[heading] = {
            "messages": [(s.start, s.end) for s in spans if s.is_message],
            "work": [(s.start, s.end) for s in spans if not s.is_message],
        }
    return draw_schedules(steps, f"{_title(preflight)}, as compiled")


def verdict(
    preflight: Preflight,
    found: list[Finding],
    require_overlap: float | None,
    console: Console,
) -> bool:
    """Prints options, memory, overlap and warnings; returns whether the run passes."""
    problems = [sentence for finding in found for sentence in finding.warnings()]
    needed = max(finding.memory_bytes for finding in found)
    have = preflight.target.memory_bytes
    share = MEMORY_SHARE if isinstance(preflight.target, Gpu) else 1.0
    fits = needed <= MOST_MEMORY * have
    if not fits:
        problems.append(
            f"the step needs {needed / 1e9:.1f} GB, the device has {have / 1e9:.1f} GB:"
            " take a smaller batch_per_worker or more num_micro_batches"
        )
    elif needed > share * have:
        problems.append(
            f"the step needs more than the {share:.0%} that XLA takes by default: set "
            "XLA_CLIENT_MEM_FRACTION="
            f"{min(MOST_MEMORY, needed / have + 0.05):.2f} in the environment"
        )
    # The worst exchange: it delays every period of the topology.
    covered = min(finding.schedule.covered(AXIS) for finding in found)
    # Bytes that were not found may be exposed.
    is_covered = all(finding.sends_all for finding in found)
    is_covered = is_covered and covered >= (require_overlap or 0)
    if require_overlap is not None and not is_covered:
        problems.append(
            f"{covered:.1%} of the bytes found are covered, {require_overlap:.1%} of "
            "all bytes are required"
        )
    console.print(f"options   {as_arguments(preflight.options) or 'none'}")
    console.print(f"memory    {needed / 1e9:.1f} GB of {have / 1e9:.1f} GB")
    console.print(f"covered   {covered:.1%} of the bytes of the worst exchange")
    for problem in problems:
        console.print(f"warning   {problem}", style="bold")
    return fits and (require_overlap is None or is_covered)


def advice(preflight: Preflight, console: Console) -> Tuning:
    """Searches for options of XLA that make the step shorter, and prints them."""
    console.print(f"options of XLA, tried on {preflight.method.name}")
    tuning = tuned(preflight, console)
    if tuning.options == preflight.options:
        console.print("  no options are better than those of the run")
    else:
        arguments = as_arguments(tuning.options)
        console.print(f"  take --step.xla-options {arguments}".rstrip())
    if tuning.needs_profile:
        console.print(
            "  and JAX_ENABLE_PGLE=true in the environment: XLA then measures the "
            "first steps, and starts messages early enough for these times"
        )
    return tuning


def _title(preflight: Preflight) -> str:
    num_workers = preflight.config.workers.num_workers
    return f"{preflight.config.name} on {num_workers} x {preflight.target.name}"


def _steps(rows: list[Finding]) -> RenderableType:
    """Returns the table of the compiled steps."""
    heads = ["step", "sent [MB]", "covered", "work [ms]", "messages [ms]", "step [ms]"]
    heads += ["exposed [ms]", "step / limit", "memory [GB]"]
    cells = [
        [
            row.name,
            f"{row.schedule.sent_bytes() / 1e6:.1f}",
            f"{row.schedule.covered(AXIS):.1%}",
            f"{1e3 * row.estimate.compute:.3g}",
            f"{1e3 * row.estimate.communication:.3g}",
            f"{1e3 * row.estimate.step:.3g}",
            f"{1e3 * row.estimate.exposed:.3g}",
            f"{row.estimate.step / row.estimate.limit:.3f}",
            f"{row.memory_bytes / 1e9:.1f}",
        ]
        for row in rows
    ]
    return aligned(heads, cells)


def _collectives(found: list[Finding]) -> RenderableType:
    """Returns the table of the collectives by kind and mesh axes."""
    groups: dict[tuple[str, str], list[Collective]] = {}
    for finding in found:
        for c in finding.schedule.collectives:
            groups.setdefault((c.kind, ", ".join(c.axes)), []).append(c)
    cells = [
        [
            *names,
            str(len(collectives)),
            str(sum(c.is_covered for c in collectives)),
            f"{sum(c.num_bytes for c in collectives) / 1e6:.1f}",
        ]
        for names, collectives in sorted(groups.items())
    ]
    heads = ["collectives", "along", "number", "covered", "arrays [MB]"]
    return aligned(heads, cells, num_left=2)
