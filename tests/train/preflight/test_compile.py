"""Runs that are compiled for clusters that are not there."""

import importlib.util
import json
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import Mesh
from rich.console import Console

from decentjax import AXIS, overlap, topology
from decentjax.overlap import Network
from tests import tiny
from tests.changes import changed
from tests.checkout import ROOT
from tests.gpus import compiled, shapes
from train.cli.load import load_config
from train.config import (
    AllReduceMethod,
    BackgroundExchange,
    InStepExchange,
    StepConfig,
    TopologyConfig,
)
from train.models.gpt import GPTConfig
from train.preflight.__main__ import main
from train.preflight.compile import Finding, Preflight, inspect, prepare
from train.preflight.preflight_report import advice, verdict
from train.preflight.xla_tuning import Tuning, busiest_step, profile
from train.targets import GPUS, TPUS, Gpu, find
from train.xla import ALL_REDUCE_THRESHOLD, COMPILE_ONLY, RECOMMENDED, read_options

# A compiler without a device reads no program from the cache of compiled programs.
pytestmark = pytest.mark.filterwarnings(
    "ignore:Error reading persistent compilation cache"
)

# Their siblings exchange the same bytes. Of the quickstart's 0.1 M parameters XLA sends
# half after the backward pass, where gradients of AdamW are clipped; of large models
# with the same optimizer nearly all are hidden.
SHIPPED = {"quickstart": 0.5, "timeline": 0.95, "gpt2_small": 0.95}
HIERARCHY = TopologyConfig(name="hierarchical", between="one_peer_ring")
QUIET = Console(quiet=True)

GPU_FILE = """
import dataclasses
from train.targets import H100

target = dataclasses.replace(H100, name="My GPU", memory_bytes=1_000)
"""


FOUND: dict[str, Finding] = {}  # By all that a program and its estimate depend on.


@pytest.fixture(autouse=True)
def compile_once(monkeypatch):
    """Compiles each program of these tests once, and its kernels without optimizing.

    The schedule is made before the kernels, so it is the same.
    """
    fast = {**COMPILE_ONLY, "xla_backend_optimization_level": "0"}
    monkeypatch.setattr("train.preflight.compile.COMPILE_ONLY", fast)
    find = Preflight.find

    def find_once(run, name, t, options):
        graph = run.method.graph.name
        depends_on = run.config, run.target, run.network, graph, t, options
        key = str(depends_on)
        if key not in FOUND:
            FOUND[key] = find(run, name, t, options)
        return changed(FOUND[key], name=name)

    monkeypatch.setattr(Preflight, "find", find_once)


def preflight(capsys, *options: str) -> tuple[int, str]:
    arguments = ["--nodes", "2", "--gpus-per-node", "2", "--no-tune"]
    code = main([str(ROOT / "tests" / "tiny.py"), *arguments, *options])
    return code, capsys.readouterr().out


def refused(capsys, *options: str) -> str:
    with pytest.raises(SystemExit) as error:
        main([str(ROOT / "tests" / "tiny.py"), *options])
    return f"{error.value} {capsys.readouterr().err}"


@pytest.mark.nightly
@pytest.mark.parametrize("name", SHIPPED)
@pytest.mark.parametrize("nodes", [16, 126])
def test_what_ships_hides_its_busiest_exchange(name, nodes):
    config = load_config(Path(name))
    in_step = InStepExchange()
    config = changed(config, exchange=in_step)
    if nodes == 126:  # No power of two, as its alternating ring would want.
        config = changed(config, topology=HIERARCHY)
    run = prepare(config, "h100", nodes, 8)
    assert run.options.items() >= RECOMMENDED.items()
    finding = run.find("", busiest_step(run.method.graph, 8), run.options)
    assert finding.schedule.num_devices == nodes * 8
    assert finding.schedule.covered(AXIS) >= SHIPPED[name]
    assert finding.warnings() == []
    assert finding.schedule.sent_bytes(AXIS) > 0
    assert finding.schedule.sent_bytes(AXIS) >= 0.999 * finding.needed_bytes


def test_the_busiest_step_is_the_first_that_crosses_nodes():
    assert busiest_step(topology.one_peer_ring(16), 8) == 1
    assert busiest_step(topology.one_peer_exponential(16), 8) == 3
    assert busiest_step(topology.complete(16), 8) == 0


@pytest.mark.nightly
def test_memory_holds_the_state_and_the_activations():
    step = StepConfig(batch_per_worker=512)
    run = prepare(changed(tiny.config, step=step), "h100", 2, 2)
    finding = run.find("", 0, {})
    leaves = jax.tree.leaves(run.state)
    state = sum(x.size * x.dtype.itemsize for x in leaves) / 4
    logits = 4 * 512 * 8 * 256
    assert state + logits < finding.memory_bytes < state + 5 * logits


CONDITIONAL = """HloModule a, is_scheduled=true, num_partitions=2

%branch (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  ROOT %c = f32[8]{0} collective-permute(%p), source_target_pairs={{0,1},{1,0}}
}

%other (q: f32[8]) -> f32[8] {
  ROOT %q = f32[8]{0} parameter(0)
}

ENTRY %main (x: f32[8], i: s32[]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  %i = s32[] parameter(1)
  %g = f32[16]{0} all-gather(%x), replica_groups={}, metadata={op_name="jit(f)/mean"}
  %s = (f32[8]{0}, u32[], token[]) send(%x, %i)
  ROOT %y = f32[8]{0} conditional(%i, %x, %x), branch_computations={%branch, %other}
}
"""

NOTHING_SENT = """

ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  ROOT %n = f32[8]{0} negate(%x)
}
"""


def test_unexpected_messages_are_warned_of():
    schedule = overlap.read(CONDITIONAL, {AXIS: 2})
    speeds = Network(1, 1.0, 1.0)
    estimate = overlap.estimate(schedule, GPUS["h100"].accelerator(), speeds)
    finding = Finding("step", schedule, estimate, 0, needed_bytes=16, compile_seconds=0)
    # Half of the gathered array, and the permute every other time.
    assert finding.warnings() == [
        "step: collective-permute c is in a conditional, which no compiler overlaps",
        f"step: {(32 + 16) / 1e6:.1f} MB leave a device, the exchange needs 0.0 MB; "
        "the largest is all-gather g (jit(f)/mean)",
        "step: s is a loop of unknown trip count, which counts once, or a message that "
        "is not analysed",
    ]
    exact = changed(finding, needed_bytes=32 + 16)
    assert len(exact.warnings()) == 2


def test_less_than_the_exchange_needs_is_never_covered():
    run = prepare(tiny.config, "h100", 1, 1)
    text = CONDITIONAL.split("\n\n")[0] + NOTHING_SENT
    start = "  %s = (f32[8]{0}, f32[8]{0}) collective-permute-start(%x), "
    start += "source_target_pairs={{0,1},{1,0}}\n  %d = f32[8]{0} dot(%x, %x), "
    start += "lhs_contracting_dims={0}, rhs_contracting_dims={0}\n"
    done = "  %e = f32[8]{0} collective-permute-done(%s)\n"
    for added, needed, words, passes in [
        ("", 0, [], True),
        (start + done, 32, [], True),
        (start + done, 40, ["needs 0.0 MB: part of the exchange was not found"], False),
        ("", 1, ["needs 0.0 MB: part of the exchange was not found"], False),
        (start, 32, ["the end of s was not found"], False),
    ]:
        schedule = overlap.read(text.replace("  ROOT", added + "  ROOT"), {AXIS: 2})
        speeds = GPUS["h100"].accelerator()
        estimate = overlap.estimate(schedule, speeds, Network(1, 1.0, 1.0))
        finding = Finding("step", schedule, estimate, 0, needed, 0)
        assert len(finding.warnings()) == len(words)
        assert all(map(str.__contains__, finding.warnings(), words))
        with (console := Console(width=200)).capture() as printed:
            assert verdict(run, [finding], 0.5, console) == passes
        assert ("50.0% of all bytes are required" in printed.get()) == (not passes)
        assert verdict(run, [finding], None, QUIET)
    # A worker alone needs nothing, and zero asks for nothing but to find it all.
    assert not verdict(run, [changed(finding, needed_bytes=99)], 0, QUIET)


def test_the_verdict_is_that_of_the_worst_exchange():
    run = prepare(tiny.config, "h100", 1, 1)
    speeds = GPUS["h100"].accelerator()
    found = []
    for text in (CONDITIONAL, CONDITIONAL.split("\n\n")[0] + NOTHING_SENT):
        schedule = overlap.read(text, {AXIS: 2})
        estimate = overlap.estimate(schedule, speeds, Network(1, 1.0, 1.0))
        found.append(Finding("step", schedule, estimate, 0, 0, 0))
    assert [finding.schedule.covered(AXIS) for finding in found] == [0, 1]
    for order in (found, found[::-1]):
        assert not verdict(run, order, 0.5, QUIET)
        assert verdict(run, order, None, QUIET)
    assert verdict(run, found[1:], 0.5, QUIET)
    large = changed(found[1], memory_bytes=10**12)
    for order in ([found[1], large], [large, found[1]]):
        assert not verdict(run, order, None, QUIET)


def tuned_to(config, monkeypatch, *candidates) -> tuple[Tuning, str]:
    monkeypatch.setattr("train.preflight.xla_tuning.CANDIDATES", list(candidates))
    with (console := Console(width=200)).capture() as printed:
        tuning = advice(prepare(config, "h100", 2, 2), console)
    return tuning, printed.get()


@pytest.mark.nightly
def test_options_that_do_not_help_are_not_kept(monkeypatch):
    """Of so small a model all messages are joined already."""
    tuning, text = tuned_to(tiny.config, monkeypatch, {"xla_gpu_autotune_level": "0"})
    assert tuning.options == RECOMMENDED
    assert "no options are better than those of the run" in text


@pytest.mark.nightly
def test_options_that_help_are_kept(monkeypatch):
    """Nine messages of 60 us each become one, though it hides behind nothing."""
    one, joined = ({ALL_REDUCE_THRESHOLD: size} for size in ("1", "100000000"))
    arguments = tuple(f"{name}={value}" for name, value in one.items())
    step = StepConfig(batch_per_worker=2, xla_options=arguments)
    config = changed(tiny.config, step=step, method=AllReduceMethod())
    monkeypatch.setattr("train.preflight.xla_tuning.WORTH_A_PROFILE", 0.99)
    tuning, text = tuned_to(config, monkeypatch, joined)
    assert tuning == ({}, False)  # XLA's own joins as many as the candidate.
    assert [line.split()[0] for line in text.splitlines() if "covered" in line] == [
        "as",
        "none",
        "combine_threshold_bytes",
        "as",
        "as",
    ]
    assert "  take --step.xla-options\n" in text


@pytest.mark.nightly
def test_a_profile_that_saves_enough_is_advised(monkeypatch):
    for least, is_worth_it in ((-1.0, True), (0.99, False)):
        monkeypatch.setattr("train.preflight.xla_tuning.WORTH_A_PROFILE", least)
        tuning, text = tuned_to(tiny.config, monkeypatch)
        assert tuning == (RECOMMENDED, is_worth_it)
        assert text.count("as configured, with a profile of its times") == 1
        assert ("JAX_ENABLE_PGLE=true" in text) == is_worth_it


@pytest.mark.nightly
def test_a_profile_of_times_starts_messages_in_time():
    """XLA guesses that a message takes as long as five matmuls; these take longer."""
    config = changed(
        tiny.config,
        task=dict(model=GPTConfig(context=256, num_layers=4, num_heads=4, width=512)),
        topology=dict(name="one_peer_ring"),
        step=StepConfig(batch_per_worker=16),
    )
    run = prepare(config, "h100", 4, 1, between="200gbit")
    plain = run.find("", 0, run.options)
    times = profile(plain.schedule, run.target.accelerator(), run.network)
    profiled = run.find("", 0, {**run.options, "fdo_profile": times})
    assert profiled.estimate.step < 0.9 * plain.estimate.step


@pytest.mark.nightly
def test_a_verdict_is_printed_written_and_drawn(capsys, tmp_path):
    out, figure = tmp_path / "out.json", tmp_path / "figure.svg"
    where = ("--out", str(out), "--figure", str(figure))
    code, text = preflight(
        capsys, "--target", "h100", "--require-overlap", "0.5", *where
    )
    assert code == 0
    assert "tiny on 4 x NVIDIA H100 80GB HBM3, 2 per node" in text
    assert "of the bytes of the worst exchange" in text
    assert "work [ms]" in text
    assert "options   xla_gpu_all_gather_combine_threshold_bytes=2500000" in text
    written = json.loads(out.read_text())
    assert written["xla_options"] == RECOMMENDED
    assert [step["name"] for step in written["steps"]] == [
        "awc 1/2",
        "awc 2/2",
        "all_reduce",
    ]
    first = written["steps"][0]
    assert first["covered"] == 1
    assert first["step_seconds"] >= first["limit_seconds"] > 0
    assert {"kind", "num_bytes", "flops_beside"} <= first["collectives"][0].keys()
    assert figure.read_text().count("<svg") == 1


def test_a_broken_file_is_no_target(tmp_path, capsys):
    path = tmp_path / "mine.py"
    path.write_text("target = Gpu(")
    options = ("--target", str(path), "--nodes", "2", "--gpus-per-node", "2")
    assert "mine.py, line 1: SyntaxError: '(' was never closed" in refused(
        capsys, *options
    )


@pytest.mark.nightly
def test_too_little_overlap_is_a_code(capsys):
    options = "--method atc --topology.name complete --require-overlap 0.95"
    code, text = preflight(capsys, "--target", "h100", *options.split())
    assert code == 1
    assert "0.0% of the bytes found are covered, 95.0% of all" in text


@pytest.mark.slow
def test_a_model_that_does_not_fit_is_a_code(capsys, tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(GPU_FILE)
    options = ("--target", str(path), "--method", "all_reduce")
    code, text = preflight(capsys, *options)
    assert code == 1
    assert "My GPU" in text
    assert "take a smaller batch_per_worker" in text


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ("--target h10", "no target 'h10': take t4, a40"),
        ("--nodes 0", "nodes must be at least 1"),
        ("--nodes 3", "alternating_exponential_ring needs num_workers"),
        ("--between 0gbit", "between must be positive, got '0gbit'"),
        ("--require-overlap 95", "require-overlap must be a share from 0 to 1, got 95"),
        ("--out no/where.json", "the folder no for where.json does not exist"),
        ("--figure tests", "tests is a folder, wanted a file"),
        ("--figure a.xyz", "a figure must be a file such as a.svg, of one of the"),
        ("--figure a", "such as a.svg"),
        ("--target none.py", "there is no target file none.py"),
        ("--exchange background", "take --exchange in_step"),
    ],
)
def test_what_cannot_be_gets_a_sentence(options, sentence, capsys):
    own = "--target h100 --nodes 2 --gpus-per-node 2"
    assert sentence in refused(capsys, *own.split(), *options.split())


LIBTPU = importlib.util.find_spec("libtpu") is not None
SLICE = "--target v5e:2x4 --nodes 2 --gpus-per-node 4"


@pytest.mark.skipif(LIBTPU, reason="libtpu is installed")
def test_without_libtpu_it_says_what_to_install(capsys):
    assert "no compiler for this target: pip install libtpu" in refused(
        capsys, *SLICE.split()
    )


@pytest.mark.skipif(not LIBTPU, reason="needs libtpu: pip install libtpu")
def test_a_slice_of_tpus_can_be_looked_at():
    ring = TopologyConfig(name="one_peer_ring")
    config = changed(tiny.config, topology=ring)
    found = inspect(prepare(config, "v5e:2x4", 2, 4), {}, QUIET)
    for finding in found:
        assert finding.warnings() == []
        assert finding.schedule.sent_bytes(AXIS) >= 0.999 * finding.needed_bytes
        assert all(c.start < c.end for c in finding.schedule.collectives)
        assert finding.estimate.exposed < 0.1 * finding.estimate.step


@pytest.mark.parametrize("name", GPUS)
def test_every_gpu_can_be_compiled_for(name):
    target = find(name)
    assert isinstance(target, Gpu)
    devices = topologies.get_topology_desc(
        platform="cuda", target_config=target.config(), topology="1 x 1 x 1"
    ).devices
    mesh = Mesh(np.array(devices), (AXIS,))
    x = shapes(mesh, jax.ShapeDtypeStruct((128, 128), np.float32))
    assert "is_scheduled=true" in (compiled(lambda x: x @ x, x).as_text() or "")


def test_speeds_are_of_a_known_order():
    for target in [*GPUS.values(), *TPUS.values()]:
        assert 1e13 < max(target.flops_per_second.values()) < 1e16
        assert 1e11 < target.memory_bytes_per_second < 1e13
        network = target.cluster(1, 8).overlap_network()
        assert 1e9 < network.between_bytes_per_second < 1e12
    assert find("v5e:2x4").name == "v5e:2x4"


def test_a_permute_of_tpus_has_one_link_and_a_mean_has_all():
    """Whole numbers of a v5e: 200 GB/s over 4 links, to whichever chip."""
    network = TPUS["v5e"].cluster(1, 4).overlap_network()
    head = "HloModule a, is_scheduled=true, num_partitions=2\n\n"
    entry = "ENTRY %main (x: u8[200]) -> u8[200] {{\n  %x = u8[200]{{0}} parameter(0)\n"
    for line, seconds in [
        ("collective-permute(%x), source_target_pairs={{0,1}}", 200 / 50e9),
        ("all-gather(%x), replica_groups={{0,1}}", 100 / 200e9),
    ]:
        text = f"{head}{entry}  ROOT %y = u8[200]{{0}} {line}\n}}\n".replace(
            "{{", "{", 2
        )
        (c,) = overlap.read(text).collectives
        assert network.seconds(c) == pytest.approx(1e-6 + seconds)


@pytest.mark.slow
def test_memory_beyond_the_share_of_xla_is_warned_of(capsys):
    run = prepare(tiny.config, "h100", 1, 1)
    finding = run.find("step", 0, {})
    have = GPUS["h100"].memory_bytes
    printed = []
    for share in (0.7, 0.85, 0.97):
        large = changed(finding, memory_bytes=int(share * have))
        fits = verdict(run, [large], None, Console(width=200, highlight=False))
        printed.append((fits, capsys.readouterr().out))
    assert [fits for fits, _ in printed] == [True, True, False]
    assert "warning" not in printed[0][1]
    assert "set XLA_CLIENT_MEM_FRACTION=0.90 in the environment" in printed[1][1]
    assert "take a smaller batch_per_worker" in printed[2][1]


@pytest.mark.nightly
def test_a_slower_network_exposes_more():
    config = changed(
        tiny.config, method=AllReduceMethod(), step=StepConfig(batch_per_worker=2)
    )
    exposed = []
    for rate in ("1gbit", "100gbit"):
        run = prepare(config, "h100", 2, 2, between=rate)
        (finding,) = inspect(run, {}, QUIET)
        exposed.append(finding.estimate.exposed)
    assert exposed[0] > 2 * exposed[1]


def test_background_is_refused_by_the_library_too():
    config = changed(tiny.config, exchange=BackgroundExchange())
    with pytest.raises(ValueError, match="in_step"):
        prepare(config, "h100", 2, 2)


@pytest.mark.nightly
def test_a_half_precision_message_needs_half_the_bytes():
    model = GPTConfig(context=8, num_layers=1, num_heads=2, width=16)
    needed = []
    for dtype in (None, "bfloat16"):
        config = changed(
            tiny.config,
            task=dict(model=model),
            topology=dict(name="one_peer_ring"),
            step=StepConfig(batch_per_worker=2, message_dtype=dtype),
        )
        run = prepare(config, "h100", 2, 2)
        finding = run.find("", 0, {})
        assert finding.warnings() == []
        sent = finding.schedule.sent_bytes()
        assert finding.needed_bytes == pytest.approx(sent, rel=0.01)
        needed.append(sent)
    assert needed[0] == 2 * needed[1]


@pytest.mark.parametrize(
    ("arguments", "platform", "options"),
    [
        (("recommended",), "gpu", RECOMMENDED),
        (("recommended",), "cpu", {}),
        ((), "gpu", {}),
        (("xla_gpu_a=1",), "gpu", {"xla_gpu_a": "1"}),
        (("xla_gpu_a=1", "xla_b=2"), "tpu", {"xla_b": "2"}),
        (("xla_tpu_a=1",), "tpu", {"xla_tpu_a": "1"}),
        (("recommended", "xla_gpu_a=1"), "gpu", {**RECOMMENDED, "xla_gpu_a": "1"}),
    ],
)
def test_options_of_xla_are_read(arguments, platform, options):
    assert read_options(arguments, platform) == options


def test_other_options_are_refused():
    with pytest.raises(ValueError, match="xla_NAME=VALUE, got 'fast'"):
        StepConfig(xla_options=("fast",))
