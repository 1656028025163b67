"""Reading schedules: texts with known answers, and steps compiled for GPUs."""

import functools
import itertools
import random
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

from decentjax import (
    AXIS,
    init_state,
    local_update,
    methods,
    mix,
    on_mesh,
    over_workers,
    overlap,
    topology,
)
from decentjax.overlap import Accelerator, Collective, Network
from decentjax.overlap.flops import Work
from tests import hlo
from tests.checkout import ROOT
from tests.gpus import compiled, gpu_mesh, shapes
from tests.plans import atc
from train.xla import COMPILE_ONLY

# A compiler without a device reads no program from the cache of compiled programs.
pytestmark = pytest.mark.filterwarnings(
    "ignore:Error reading persistent compilation cache"
)

HEAD = "HloModule jit_step, is_scheduled=true, num_partitions=4\n\n"
PAIRS = "source_target_pairs={{0,1},{1,0},{2,3},{3,2}}"
DOT = "lhs_contracting_dims={1}, rhs_contracting_dims={0}"
START = (
    "%start = (f32[8,4]{1,0}, f32[8,4]{1,0}) collective-permute-start(%x), channel_id=1"
)

DOTTED = f"%y = f32[8,4] dot(%x, %w), {DOT}"


def function(head: str, *lines: str) -> str:
    """A computation with its head, such as `%f (p: s32[]) -> s32[]`."""
    params = re.findall(r"([\w.]+): (\w+\[[\d,]*\])", head)
    made = [f"%{name} = {kind} parameter({n})" for n, (name, kind) in enumerate(params)]
    return "\n  ".join([f"{head} {{", *made, *lines]) + "\n}\n\n"


def program(*lines: str, before: str = "") -> str:
    """A program of four devices, with x: f32[8,4] and w: f32[4,4]."""
    head = "ENTRY %main (x: f32[8,4], w: f32[4,4]) -> f32[8,4]"
    return HEAD + before + function(head, *lines)


def permuted(*between: str) -> str:
    return program(
        f'{START}, {PAIRS}, metadata={{op_name="jit(step)/mix/ppermute"}}',
        *between,
        "ROOT %done = f32[8,4] collective-permute-done(%start)",
    )


def test_a_matmul_between_start_and_end_covers_a_permute():
    text = permuted(DOTTED)
    schedule = overlap.read(text)
    (c,) = schedule.collectives
    assert (c.kind, c.axes, c.groups) == (
        "collective-permute",
        ("devices",),
        ((0, 1), (1, 0), (2, 3), (3, 2)),
    )
    assert (c.num_bytes, c.calls, c.start, c.end) == (8 * 4 * 4, 1, 0, 2)
    assert c.beside.flops == {"f32": 2 * 8 * 4 * 4}
    assert c.beside.num_bytes == 4 * (8 * 4 + 4 * 4 + 8 * 4)
    assert (c.in_conditional, c.in_loop) == (False, False)
    assert c.op_name == "jit(step)/mix/ppermute"
    assert schedule.covered() == 1
    assert schedule.sent_bytes() == 128


def test_a_schedule_of_a_tpu_is_read():
    """A step of five matmuls of 4096 x 1024 x 1024 on v5e:2x4, with one permute.

    As libtpu 0.0.52 compiled it for jax 0.10.2, without metadata of files. On a TPU
    matmuls are convolutions inside fusions, in bfloat16 or float32.
    """
    text = (ROOT / "tests" / "v5e_step.txt").read_text()
    schedule = overlap.read(text, {"workers": 8})
    (c,) = schedule.collectives
    assert (c.kind, c.axes, c.num_bytes) == ("collective-permute", ("workers",), 2**22)
    assert {frozenset(pair) for pair in c.groups} == {
        frozenset({i, i + 1}) for i in range(0, 8, 2)
    }
    matmul = 2 * 4096 * 1024 * 1024
    assert schedule.work.flops == {"bf16": 2 * matmul, "f32": 3 * matmul}
    assert c.beside.flops == schedule.work.flops
    assert schedule.covered("workers") == 1
    assert schedule.sent_bytes("workers") == 2**22


def test_in_a_real_schedule_ends_are_followed_or_missing():
    text = (ROOT / "tests" / "v5e_step.txt").read_text()
    (start,) = hlo.collective_names(text)
    (line,) = [
        x for x in text.splitlines() if f"collective-permute-done(%{start})" in x
    ]
    chain = [
        f"  %a1 = (f32[1], f32[2]) tuple(%{start}, %{start})",
        "  %a2 = (f32[1], f32[2]) opt-barrier(%a1)",
        "  %a3 = f32[2] get-tuple-element(%a2), index=1",
        line.replace(f"-done(%{start})", "-done(%a3)"),
    ]
    whole = overlap.read(text)
    followed = overlap.read(text.replace(line, "\n".join(chain)))
    assert followed == whole
    entry = text[text.index("ENTRY") :]
    other = entry.split("= ")[0].split("%")[-1].strip()
    lost = overlap.read(text.replace(line, line.replace(f"%{start})", f"%{other})")))
    assert lost.sent_bytes() == whole.sent_bytes()
    assert (lost.covered(), lost.unpaired) == (0, (start,))


@pytest.mark.parametrize(
    "text",
    [
        permuted("%y = f32[8,4] add(%x, %x)"),
        permuted(DOTTED).replace("id=1", 'id=1, backend_config={"is_sync":true}'),
        program(DOTTED, f"ROOT %z = f32[8,4] collective-permute(%x), {PAIRS}"),
        program(DOTTED, "ROOT %z = f32[8,4] all-reduce(%x), replica_groups={{0,1}}"),
    ],
    ids=["additions", "synchronous", "permute", "all-reduce"],
)
def test_what_is_not_asynchronous_or_beside_a_matmul_is_not_covered(text):
    schedule = overlap.read(text)
    assert schedule.covered() == 0
    assert schedule.sent_bytes() > 0


def test_a_wrapped_collective_is_one_of_its_kind():
    wrapped = function(
        "%wrapped (p: f32[8,4]) -> f32[2,4]",
        "ROOT %r = f32[2,4] reduce-scatter(%p), replica_groups={}, dimensions={0}",
    )
    text = program(
        "%s = ((f32[8,4]), f32[2,4]) async-start(%x), calls=%wrapped",
        DOTTED,
        "%u = ((f32[8,4]), f32[2,4]) async-update(%s)",
        "ROOT %d = f32[2,4] async-done(%u)",
        before=wrapped,
    )
    (c,) = overlap.read(text).collectives
    assert (c.kind, c.num_bytes, c.is_covered) == ("reduce-scatter", 128, True)
    assert overlap.read(text).sent_bytes() == 128 * 3 / 4


PAIR = "(f32[8,4], f32[8,4])"
DONE = "%done = f32[8,4] collective-permute-done"


@pytest.mark.parametrize(
    "chain",
    [
        [f"%a = {PAIR} copy(%start)", f"{DONE}(%a)"],
        [f"%a = {PAIR} bitcast(%start)", f"{DONE}(%a)"],
        ["%a = f32[8,4] get-tuple-element(%start), index=1", f"{DONE}(%a)"],
        [f"%a = ({PAIR}, f32[8,4]) tuple(%start, %y)", f"{DONE}(%b)"],
        [f"%a = (f32[8,4], {PAIR}) tuple(%y, %start)", f"{DONE}(%b)"],
        [
            "%c = f32[8,4] get-tuple-element(%start), index=0",
            "%b = f32[8,4] get-tuple-element(%start), index=1",
            f"%a = {PAIR} tuple(%c, %b)",
            f"{DONE}(%a)",
        ],
        [
            f"%a = (f32[8,4], {PAIR}) tuple(%y, %start)",
            f"%c = (f32[8,4], {PAIR}) opt-barrier(%a)",
            f"%b = {PAIR} get-tuple-element(%c), index=1",
            f"{DONE}(%b)",
        ],
    ],
    ids=lambda chain: " ".join(line.split(" ")[-2][:12] for line in chain[:-1]),
)
def test_an_end_is_followed_to_its_start(chain):
    if len(chain) == 2 and "%b" in chain[1]:
        index = 0 if "tuple(%start" in chain[0] else 1
        chain[1:1] = [f"%b = {PAIR} get-tuple-element(%a), index={index}"]
    schedule = overlap.read(program(f"{START}, {PAIRS}", DOTTED, *chain))
    assert (schedule.sent_bytes(), schedule.covered()) == (128, 1)
    assert schedule.unpaired == ()


def test_of_a_tuple_of_starts_each_end_has_its_own():
    second = START.replace("%start", "%second").replace("(%x)", "(%y)")
    schedule = overlap.read(
        program(
            f"{START}, {PAIRS}",
            DOTTED,
            f"{second}, {PAIRS}",
            f"%both = ({PAIR}, {PAIR}) tuple(%second, %start)",
            f"%a = {PAIR} get-tuple-element(%both), index=0",
            f"%b = {PAIR} get-tuple-element(%both), index=1",
            f"{DONE}(%b)",
            f"{DONE.replace('done ', 'other ')}(%a)",
        )
    )
    covered = {c.name: c.is_covered for c in schedule.collectives}
    assert covered == {"start": True, "second": False}
    assert schedule.unpaired == ()


CALLED = function(
    f"%called (p: f32[8,4]) -> {PAIR}",
    f"ROOT %start = {PAIR} collective-permute-start(%p), {PAIRS}",
)


@pytest.mark.parametrize(
    ("before", "lines"),
    [
        ("", [f"{START}, {PAIRS}", DOTTED]),  # Without an end.
        ("", [f"{START}, {PAIRS}", DOTTED, f"%a = {PAIR} while()", f"{DONE}(%a)"]),
        (CALLED, [f"%a = {PAIR} call(%x), to_apply=%called", DOTTED, f"{DONE}(%a)"]),
        (CALLED, [f"%a = {PAIR} fusion(%x), calls=%called", DOTTED, f"{DONE}(%a)"]),
        (CALLED, [f"%a = {PAIR} sort(%x), unknown=%called", DOTTED, f"{DONE}(%a)"]),
    ],
)
def test_what_has_no_end_is_sent_and_not_covered(before, lines):
    schedule = overlap.read(program(*lines, before=before))
    assert [c.name for c in schedule.collectives] == ["start"]
    assert (schedule.sent_bytes(), schedule.covered()) == (128, 0)
    assert schedule.unpaired == ("start",)
    found = overlap.estimate(schedule, SLOW, LINE)
    assert found.step == found.compute + 128


def test_of_starts_made_together_each_is_sent():
    wrapped = function(
        "%wrapped (p: f32[8,4], q: f32[8,4]) -> (f32[2,4], f32[8,4])",
        "%r = f32[2,4] reduce-scatter(%p), replica_groups={{0,1,2,3}}, to_apply=%add",
        f"%c = f32[8,4] collective-permute(%q), {PAIRS}",
        "ROOT %t = (f32[2,4], f32[8,4]) tuple(%r, %c)",
    )
    text = program(
        "%s = ((f32[8,4], f32[8,4]), (f32[2,4], f32[8,4])) async-start(%x, %x), "
        "calls=%wrapped",
        DOTTED,
        "ROOT %d = (f32[2,4], f32[8,4]) async-done(%s)",
        before=wrapped,
    )
    schedule = overlap.read(text)
    assert [c.name for c in schedule.collectives] == ["r", "c"]
    assert schedule.sent_bytes() == 128 * 3 / 4 + 128
    assert (schedule.covered(), schedule.unpaired) == (1, ())
    found = overlap.estimate(schedule, SLOW, LINE)
    assert found.communication == 128 * 3 / 4 + 128
    assert found.step == max(found.compute, found.communication)


@pytest.mark.parametrize(
    ("kind", "made", "num_bytes"),
    [
        ("collective-permute", "(f32[8,4], f32[8,4], u32[], u32[])", 128),
        ("collective-permute", "((f32[8,4]), f32[8,4])", 128),
        ("all-gather", "(f32[8,4], f32[32,4])", 512),
        ("reduce-scatter", "((f32[8,4]), f32[2,4])", 128),
        ("all-reduce", "f32[8,4]", 128),
        ("all-reduce", "((f32[8,4]), f32[8,4])", 128),
    ],
)
def test_the_bytes_of_a_start_are_those_of_its_larger_side(kind, made, num_bytes):
    """As jax 0.10 and 0.12 write them; there need not be an end that says it."""
    groups = PAIRS if kind == "collective-permute" else "replica_groups={}"
    schedule = overlap.read(program(f"%s = {made} {kind}-start(%x), {groups}"))
    assert schedule.collectives[0].num_bytes == num_bytes


def test_a_line_that_is_no_instruction_is_named():
    with pytest.raises(ValueError, match=r"wanted an instruction .* got '%x: a word'"):
        overlap.read(program("%x: a word"))


PLACES = {
    "call": "call(%{p}), to_apply=%{body}",
    "fusion": "fusion(%{p}), calls=%{body}",
    "unknown": "negate(%{p}), unknown=%{body}",
    "while": "while(%{p}), condition=%always, body=%{body}, "
    'backend_config={{"known_trip_count":{{"n":"5"}}}}',
}


class Drawn:
    """A random program of permutes in all places, and whether each has an end.

    `has_end` is of a collective by its name; one that is synchronous needs none.
    """

    def __init__(self, seed: int):
        self._draw = random.Random(seed)
        self._names = map("n{}".format, itertools.count())
        self._computations = [
            function(
                "%always (q: f32[8,4]) -> pred[]", "ROOT %true = pred[] constant(1)"
            )
        ]
        self.has_end: dict[str, bool] = {}
        lines = self._lines("x", "entry", 3)
        self.text = program(*lines, before="".join(self._computations))

    def _lines(self, p: str, place: str, depth: int) -> list[str]:
        lines, started = [], []
        for _ in range(self._draw.randrange(1, 6)):
            name, body, inner = (next(self._names) for _ in range(3))
            kinds = ["sync", "start", "start", "wrapped", *PLACES]
            kind = self._draw.choice(kinds[: None if depth else 3])
            permute = f"(%{p}), {PAIRS}"
            if kind == "sync":
                lines.append(f"%{name} = f32[8,4] collective-permute{permute}")
                self.has_end[name] = place != "unknown"
            elif kind == "start":
                lines.append(f"%{name} = f32[8,4] collective-permute-start{permute}")
                started.append((name, name, "collective-permute"))
            elif kind == "wrapped":
                inside = f"%{inner} = f32[8,4] collective-permute(%p{body}), {PAIRS}"
                self._add(body, [inside])
                lines.append(f"%{name} = f32[8,4] async-start(%{p}), calls=%{body}")
                started.append((inner, name, "async"))
            else:
                below = place if place in ("unknown", "fusion") else kind
                below = kind if kind == "unknown" else below
                self._add(body, self._lines(f"p{body}", below, depth - 1))
                how = PLACES[kind].format(p=p, body=body)
                lines.append(f"%{name} = f32[8,4] {how}")
        self._draw.shuffle(started)
        for collective, start, kind in started:
            end = self._draw.choice(["direct", "chain", "none", "elsewhere"])
            is_found = end in ("direct", "chain")
            self.has_end[collective] = is_found and place not in ("unknown", "fusion")
            if end == "chain":
                lines.append(f"%t{start} = (f32[8,4], f32[8,4]) tuple(%{p}, %{start})")
                lines.append(
                    f"%b{start} = f32[8,4] get-tuple-element(%t{start}), index=1"
                )
            of = {"direct": start, "chain": f"b{start}", "elsewhere": p}.get(end)
            lines += [f"%d{start} = f32[8,4] {kind}-done(%{of})"] if of else []
        return lines

    def _add(self, body: str, lines: list[str]) -> None:
        head = f"%{body} (p{body}: f32[8,4]) -> f32[8,4]"
        root = f"ROOT %r{body} = f32[8,4] negate(%p{body})"
        self._computations.append(function(head, *lines, root))


@pytest.mark.parametrize("seed", range(40))
def test_no_collective_is_lost_wherever_it_stands(seed):
    drawn = Drawn(seed)
    schedule = overlap.read(drawn.text)
    names = [c.name for c in schedule.collectives]
    assert sorted(names) == sorted(hlo.collective_names(drawn.text))
    assert sorted(names) == sorted(drawn.has_end)
    assert {name for name, has in drawn.has_end.items() if not has} == set(
        schedule.unpaired
    )
    is_asynchronous = {c.name for c in schedule.collectives if c.end != c.start}
    assert is_asynchronous.isdisjoint(schedule.unpaired)
    assert schedule.sent_bytes() == 128 * sum(c.calls for c in schedule.collectives)
    # Each is played at its start and at its end.
    found = overlap.estimate(schedule, SLOW, LINE)
    assert found.communication == schedule.sent_bytes()
    assert found.step >= found.limit


LOOP = function(
    "%body (p: f32[8,4]) -> f32[8,4]",
    f"ROOT %inner = f32[8,4] collective-permute(%p), {PAIRS}",
) + function("%condition (p.1: f32[8,4]) -> pred[]", "ROOT %t = pred[] constant(true)")


@pytest.mark.parametrize("trips", [5, None])
def test_a_loop_sends_as_often_as_it_turns(trips):
    known = f', backend_config={{"known_trip_count":{{"n":"{trips}"}}}}'
    text = program(
        "ROOT %l = f32[8,4] while(%x), condition=%condition, body=%body"
        + (known if trips else ""),
        before=LOOP,
    )
    schedule = overlap.read(text)
    (c,) = schedule.collectives
    assert (c.in_loop, c.calls) == (True, trips or 1)
    assert schedule.sent_bytes() == 128 * (trips or 1)
    assert schedule.uncounted == (() if trips else ("l",))


def test_branches_of_a_conditional_count_equally():
    branches = LOOP + LOOP.replace("%body", "%other").replace(
        "%inner", "%second"
    ).replace("%condition", "%unused")
    text = program(
        "%i = s32[] constant(0)",
        "ROOT %c = f32[8,4] conditional(%i, %x, %x), "
        "branch_computations={%body, %other}",
        before=branches,
    )
    schedule = overlap.read(text)
    assert [(c.calls, c.in_conditional) for c in schedule.collectives] == [
        (0.5, True),
        (0.5, True),
    ]
    assert schedule.sent_bytes() == 128


@pytest.mark.parametrize(
    ("groups", "axes"),
    [
        ("{{0,1},{2,3}}", ("model",)),
        ("{{0,2},{1,3}}", ("workers",)),
        ("{}", ("workers", "model")),
        ("[2,2]<=[4]", ("model",)),
        ("[2,2]<=[2,2]T(1,0)", ("workers",)),
        ("mesh['a'=2,'b'=2] {'b'}", ("model",)),
        ("mesh['a'=2,'b'=2] {'a'}", ("workers",)),
        ("mesh['data-parallel'=2,'b'=2] {'data-parallel','b'}", ("workers", "model")),
    ],
)
def test_groups_run_along_axes_where_members_differ(groups, axes):
    text = program(
        f"ROOT %y = f32[8,4] all-reduce(%x), replica_groups={groups}, to_apply=%add"
    )
    (c,) = overlap.read(text, {"workers": 2, "model": 2}).collectives
    assert c.axes == axes
    assert overlap.read(text, {"workers": 2, "model": 2}).sent_bytes("workers") == (
        0 if axes == ("model",) else 128 * 2 * (1 - 1 / len(c.groups[0]))
    )


@pytest.mark.parametrize(
    "groups",
    ["mesh['a'=2,'b'=2], device_ids=([3,2,1,0]) {'b'}", "mesh['a'=4] {'a':(1)2}"],
)
def test_groups_of_another_form_are_refused(groups):
    text = program(
        f"ROOT %y = f32[8,4] all-reduce(%x), replica_groups={groups}, to_apply=%add"
    )
    with pytest.raises(ValueError, match="groups of a form that is not known: mesh"):
        overlap.read(text)


def test_a_permute_of_nobody_sends_nothing():
    line = "ROOT %y = f32[8,4] collective-permute(%x), source_target_pairs={}"
    schedule = overlap.read(program(line))
    assert schedule.collectives[0].axes == ()
    assert schedule.sent_bytes() == 0
    assert overlap.estimate(schedule, SLOW, LINE).step == 0


def test_what_a_loop_asks_before_each_trip_is_sent_too():
    before = LOOP.replace("%t = pred[]", "%t.1 = pred[]").replace(
        "  ROOT %t.1",
        "  %all = f32[8,4] all-reduce(%p.1), replica_groups={}, to_apply=%a\n"
        "  ROOT %t.1",
    )
    loop = "ROOT %l = f32[8,4] while(%x), condition=%condition, body=%body"
    kinds = {c.kind for c in overlap.read(program(loop, before=before)).collectives}
    assert kinds == {"collective-permute", "all-reduce"}


def test_operands_may_be_written_with_their_types_and_tiles():
    dot = f"dot(f32[8,4]{{1,0:T(8,128)}} %x, f32[4,4]{{1,0}} %w), {DOT}"
    schedule = overlap.read(program(f"ROOT %y = f32[8,4] {dot}"))
    assert schedule.work == Work({"f32": 2 * 8 * 4 * 4}, 4 * 80)


@pytest.mark.parametrize(
    ("line", "num_bytes", "sent"),
    [
        ("%y = f32[32,4] all-gather(%x), dimensions={0}", 512, 3 / 4 * 512),
        ("%y = f32[2,4] reduce-scatter(%x), to_apply=%add", 128, 3 / 4 * 128),
        ("%y = f8e4m3fn[8]{0} all-reduce(%narrow), to_apply=%add", 8, 3 / 2 * 8),
        ("%y = f32[8,4] ragged-all-to-all(%x, %x, %n, %n, %n, %n)", 128, 3 / 4 * 128),
    ],
)
def test_bytes_are_those_of_the_whole_array(line, num_bytes, sent):
    """Before a scatter, after a gather; not those of what says where pieces go."""
    text = program(
        "%narrow = f8e4m3fn[8]{0} constant(0)",
        "%n = s64[4]{0} constant(0)",
        f"ROOT {line}, replica_groups={{}}",
    )
    schedule = overlap.read(text)
    assert schedule.collectives[0].num_bytes == num_bytes
    assert schedule.sent_bytes() == sent


@pytest.mark.parametrize(
    ("line", "num_bytes"),
    [
        # A slice is read and written, whatever it is taken from or put into.
        ("%y = f32[1,4] dynamic-slice(%x, %i, %i)", 2 * 16),
        ("%y = f32[8,4] dynamic-update-slice(%x, %row, %i, %i)", 2 * 16),
        ("%y = f32[1,4] fusion(%x, %row), calls=%twice", 128 + 16),
        ("%y = f32[8,4] fusion(%x, %row), calls=%put", 16 + 16),
        # The scratch memory of a library is its own.
        (
            "%y = (f32[8,4], s8[1000]{0}) custom-call(%x, %w), "
            'custom_call_target="__cublas$gemm"',
            4 * 80,
        ),
        ('%y = (f32[8,4], f32[8]{0}) custom-call(%x), custom_call_target="a"', 288),
    ],
)
def test_bytes_are_those_that_are_read_and_written(line, num_bytes):
    fused = function(
        "%twice (p: f32[8,4], r: f32[1,4]) -> f32[1,4]",
        "%all = f32[8,4] slice(%p), slice={[0:8], [0:4]}",
        "%first = f32[1,4] slice(%p), slice={[0:1], [0:4]}",
        "ROOT %n = f32[1,4] negate(%first)",
    ) + function(
        "%put (p.1: f32[8,4], r.1: f32[1,4]) -> f32[8,4]",
        "%z = s32[] constant(0)",
        "ROOT %u = f32[8,4] dynamic-update-slice(%p.1, %r.1, %z, %z)",
    )
    text = program(
        "%i = s32[] constant(3)",
        "%row = f32[1,4] constant(0)",
        f"ROOT {line}",
        before=fused,
    )
    assert overlap.read(text).work.num_bytes == num_bytes


def test_a_matmul_in_a_fusion_of_a_fusion_counts():
    fused = function(
        "%inner (a: f32[8,4], b: f32[4,4]) -> f32[8,4]",
        f"ROOT %d = f32[8,4] dot(%a, %b), {DOT}",
    ) + function(
        "%outer (a.1: f32[8,4], b.1: f32[4,4]) -> f32[8,4]",
        "ROOT %f = f32[8,4] fusion(%a.1, %b.1), kind=kOutput, calls=%inner",
    )
    line = "ROOT %y = f32[8,4] fusion(%x, %w), kind=kOutput, calls=%outer"
    work = overlap.read(program(line, before=fused)).work
    assert work == Work({"f32": 2 * 8 * 4 * 4}, 4 * 80)


def test_work_takes_the_longest_of_compute_memory_and_kernel():
    speeds = Accelerator({"f32": 10.0}, 5.0, least_seconds=3)
    assert speeds.seconds(Work({"f32": 100.0}, 20)) == 10
    assert speeds.seconds(Work({"f32": 100.0}, 60)) == 12
    assert speeds.seconds(Work({"f32": 1.0}, 1)) == 3
    assert speeds.seconds(Work({}, 0)) == 0


def test_sends_are_named_as_not_read():
    line = "%s = (f32[8,4], u32[], token[]) send(%x, %w), channel_id=3"
    assert overlap.read(program(line)).uncounted == ("s",)


def test_of_an_operand_that_is_sliced_only_the_slice_is_read():
    fused = function(
        "%fused (p: f32[100,8], i: s32[]) -> f32[1,8]",
        "%zero = s32[] constant(0)",
        "%s = f32[1,8] dynamic-slice(%p, %i, %zero), dynamic_slice_sizes={1,8}",
        "ROOT %n = f32[1,8] negate(%s)",
    )
    text = program(
        "%stack = f32[100,8] custom-call()",
        "%i.1 = s32[] constant(3)",
        "ROOT %f = f32[1,8] fusion(%stack, %i.1), kind=kLoop, calls=%fused",
        before=fused,
    )
    work = overlap.read(text).ops[-1].work
    assert work.num_bytes == 32 + 4 + 32


@pytest.mark.parametrize(
    ("text", "phrase"),
    [
        ("", "wanted the text of a compiled program"),
        ("HloModule a, entry_computation_layout={}\n", "wanted the text of a compiled"),
    ],
)
def test_another_text_is_refused(text, phrase):
    with pytest.raises(ValueError, match=phrase):
        overlap.read(text)


def test_axes_of_another_size_are_refused():
    with pytest.raises(ValueError, match=r"runs on 4 devices, the axes .* have 6"):
        overlap.read(permuted(), {"workers": 6})


# Speeds: a second for each byte moved, and a second for each byte sent.
SLOW = Accelerator({"f32": 1e30}, 1.0, least_seconds=0)
LINE = Network(4, 1.0, 1.0, inside_latency=0, between_latency=0)


def test_a_step_takes_the_longer_of_work_and_message():
    beside = overlap.read(permuted(DOTTED))
    found = overlap.estimate(beside, SLOW, LINE)
    assert (found.compute, found.communication) == (4 * 80, 128)
    assert (found.step, found.exposed, found.limit) == (320, 0, 320)
    faster = Accelerator({"f32": 1e30}, 10.0, least_seconds=0)
    found = overlap.estimate(beside, faster, LINE)
    assert (found.compute, found.step, found.exposed) == (32, 128, 96)


@pytest.mark.parametrize("seed", range(30))
def test_the_estimate_is_the_longest_path(seed):
    """Edges from each work to the next, each message to the next, starts and ends."""
    draw = random.Random(seed)
    count = draw.randrange(1, 6)
    places = sorted(draw.randrange(12) for _ in range(count))
    order = [("work", i, draw.randrange(1, 9)) for i in range(12)]
    lines, waiting, schedule = [], [], []
    for i in range(12):
        schedule.append(order[i])
        schedule += [("start", k, 0) for k in range(count) if places[k] == i]
        waiting += [k for k in range(count) if places[k] == i]
        if waiting and draw.random() < 0.4:
            schedule.append(("end", waiting.pop(draw.randrange(len(waiting))), 0))
    schedule += [("end", k, 0) for k in waiting]
    sizes = {k: draw.randrange(1, 20) for k in range(count)}
    for kind, k, cost in schedule:
        if kind == "work":
            lines.append(f"%w{k} = u8[{cost}]{{0}} custom-call()")
        elif kind == "start":
            lines.append(f"%m{k} = u8[{sizes[k]}]{{0}} constant(0)")
            lines.append(
                f"%s{k} = (u8[{sizes[k]}]) collective-permute-start(%m{k}), {PAIRS}"
            )
        else:
            lines.append(f"%e{k} = u8[{sizes[k]}]{{0}} collective-permute-done(%s{k})")
    found = overlap.estimate(overlap.read(program(*lines)), SLOW, LINE)

    paths: dict = {}  # Bellman-Ford over (from, to, seconds).
    graph = []
    for (before, a, cost), (after, b, _) in itertools.pairwise(schedule):
        graph.append(((before, a), (after, b), cost if before == "work" else 0))
    graph.append((schedule[-1][:2], "last", 0))
    graph += [(("start", k), ("sent", k), sizes[k]) for k in range(count)]
    started = [k for kind, k, _ in schedule if kind == "start"]
    graph += [
        (("sent", a), ("sent", b), sizes[b]) for a, b in itertools.pairwise(started)
    ]
    graph += [(("sent", k), ("end", k), 0) for k in range(count)]
    paths[schedule[0][:2]] = 0
    for _ in range(len(graph)):
        for a, b, seconds in graph:
            if a in paths:
                paths[b] = max(paths.get(b, 0), paths[a] + seconds)
    last = schedule[-1]
    assert found.step == paths["last"] + (last[2] if last[0] == "work" else 0)
    assert found.compute == sum(cost for kind, _, cost in schedule if kind == "work")
    assert found.communication == sum(sizes.values())


def collective(kind, groups, num_bytes=1000.0) -> Collective:
    nothing = overlap.read(program("ROOT %y = f32[8,4] add(%x, %x)")).work
    return Collective(
        "c", kind, (), groups, num_bytes, 1, 0, 0, nothing.times(0), False, False, ""
    )


@pytest.mark.parametrize(
    ("kind", "groups", "seconds"),
    [
        ("collective-permute", ((0, 1), (1, 0)), 5 + 1000 / 10),  # Inside a node.
        ("collective-permute", ((0, 2), (1, 3)), 20 + 2000 / 4),  # Two share the link.
        ("collective-permute", ((0, 0), (1, 1)), 0),
        ("all-reduce", ((0, 1, 2, 3),), 2 * 2 * 20 + 1500 / 4),
        ("all-gather", ((0, 1), (2, 3)), 5 + 500 / 10),
        ("reduce-scatter", ((0, 2), (1, 3)), 20 + 2 * 500 / 4),
        ("all-to-all", ((0, 1, 2, 3),), 3 * 20 + 2 * 2 * 250 / 4),
    ],
)
def test_a_message_takes_as_long_as_its_busiest_link(kind, groups, seconds):
    network = Network(2, 10.0, 4.0, inside_latency=5, between_latency=20)
    assert network.seconds(collective(kind, groups)) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("kind", "groups", "seconds"),
    [
        ("collective-permute", ((1, 2), (2, 1)), 1000 / 2),  # By one of two links.
        ("collective-permute", ((0, 2), (1, 3)), 1000 / 2),  # By one each.
        ("all-to-all", ((0, 2), (1, 3)), 500 / 2),
        ("all-gather", ((0, 2),), 500 / 4),
    ],
)
def test_a_device_alone_has_one_of_its_nodes_links(kind, groups, seconds):
    network = Network(2, 10.0, 4.0, 2, inside_latency=0, between_latency=0)
    assert network.seconds(collective(kind, groups)) == pytest.approx(seconds)


def test_nodes_that_do_not_divide_the_devices_are_refused():
    schedule = overlap.read(permuted())
    with pytest.raises(ValueError, match="4 devices do not fill nodes of 3"):
        overlap.estimate(schedule, SLOW, Network(3, 1, 1))


TURNS = ', backend_config={"known_trip_count":{"n":"5"}}'
WHILE = f"while(%x), condition=%condition, body=%body{TURNS}"


BRANCHES = "conditional(%i, %x, %x), branch_computations={%body, %other}"
CHOICE = "%i = s32[] constant(0)", f"%c = f32[8,4] {BRANCHES}"
OTHER = ("ROOT %negated = f32[8,4] negate(%q)",)


@pytest.mark.parametrize(
    ("lines", "other", "compute", "communication", "step"),
    [
        ([f"%l = f32[8,4] {WHILE}"], OTHER, 0, 5 * 128, 5 * 128),
        # One over a loop is waited for once.
        (
            [f"{START}, {PAIRS}", f"%l = f32[8,4] {WHILE}", f"{DONE}(%start)"],
            *(OTHER, 0, 6 * 128, 6 * 128),
        ),
        # The mean of the branches.
        (CHOICE, OTHER, 256 / 2, 128 / 2, (128 + 256) / 2),
        # After which the network is free on average.
        (
            [*CHOICE, f"%y = f32[8,4] collective-permute(%c), {PAIRS}"],
            *((), 0, 128 / 2 + 128, 128 / 2 + 128),
        ),
    ],
)
def test_a_loop_takes_its_trips_and_branches_their_mean(
    lines, other, compute, communication, step
):
    before = LOOP + function("%other (q: f32[8,4]) -> f32[8,4]", *other)
    schedule = overlap.read(program(*lines, before=before))
    found = overlap.estimate(schedule, SLOW, LINE)
    times = found.compute, found.communication, found.step
    assert times == (compute, communication, step)


@pytest.mark.parametrize("dtype", ["f8e4m3fn", "s8"])
def test_unlisted_types_run_at_a_known_rate(dtype):
    speeds = Accelerator({"bf16": 10.0, "f64": 1.0}, 1e30, least_seconds=0)
    assert speeds.seconds(Work({dtype: 100.0}, 0)) == 10
    assert speeds.seconds(Work({"c64": 100.0}, 0)) == 100


# Compiled for 4 nodes of 4 H100s.

WIDTH = 512


def loss_fn(params, model_state, batch, key):
    x = batch
    for w in params:
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2), (model_state, {})


def read_step(plan, mesh, depth=6, t=0) -> overlap.StepSchedule:
    train_step = on_mesh(local_update(loss_fn, optax.adam(1e-3)), plan, mesh)
    state = jax.eval_shape(
        lambda: init_state(
            [jnp.zeros((WIDTH, WIDTH))] * depth,
            optax.adam(1e-3),
            jax.random.key(0),
            plan,
        )
    )
    batch = jax.ShapeDtypeStruct((plan.num_workers, 1024, WIDTH), jnp.float32)
    lowered = train_step.lower(*shapes(mesh, (state, batch), AXIS), t)
    program = lowered.compile(COMPILE_ONLY)
    schedule = overlap.read(program)
    names = [c.name for c in schedule.collectives]
    assert sorted(names) == sorted(hlo.collective_names(program.as_text()))
    assert schedule.unpaired == ()
    return schedule


@pytest.fixture(scope="module")
def mesh():
    return gpu_mesh(4, 4)


GRAPHS = {
    "one_peer_exponential": topology.one_peer_exponential(16),
    "butterfly_groups": topology.butterfly_groups(16, 4),
    "alternating_exponential_ring": topology.alternating_exponential_ring(16, 4),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", GRAPHS)
def test_every_byte_of_awc_is_covered_and_of_atc_less(name, mesh):
    graph = GRAPHS[name]
    beside = read_step(graph, mesh)
    assert beside.sent_bytes(AXIS) > 0
    assert beside.covered() >= 0.95
    assert not any(c.in_conditional for c in beside.collectives)
    assert {c.axes for c in beside.collectives} == {(AXIS,)}
    assert read_step(atc(graph), mesh).covered() < 0.9 * beside.covered()


def test_the_flops_are_those_of_the_matmuls(mesh):
    schedule = read_step(GRAPHS["one_peer_exponential"], mesh, depth=3)
    # Forward 3, backward 3 for the weights and 2 for the inputs.
    assert schedule.work.flops == {"f32": 8 * 2 * 1024 * WIDTH**2}


def test_all_reduce_sends_what_it_should(mesh):
    schedule = read_step(methods.all_reduce(16), mesh, depth=3)
    model = 3 * WIDTH**2 * 4
    assert schedule.sent_bytes() == pytest.approx(2 * 15 / 16 * model, rel=1e-3)


def test_a_switch_in_the_step_is_not_covered(mesh):
    graph = topology.one_peer_exponential(16)

    def step(params, x, t):
        grads = jax.grad(lambda p: loss_fn(p, (), x, None)[0])(params)
        branches = [
            functools.partial(mix, exchange=exchange, axis_name=AXIS)
            for exchange in graph
        ]
        mixed = lax.switch(t % 4, branches, params)
        return jax.tree.map(lambda m, g: m - 0.1 * g, mixed, grads)

    stacked = [jax.ShapeDtypeStruct((16, WIDTH, WIDTH), jnp.float32)] * 4
    x = jax.ShapeDtypeStruct((16, 1024, WIDTH), jnp.float32)
    t = jax.ShapeDtypeStruct((16,), jnp.int32)
    found = overlap.read(
        compiled(over_workers(step, mesh), *shapes(mesh, (stacked, x, t), AXIS))
    )
    assert found.covered() == 0
    assert all(c.in_conditional for c in found.collectives)
    assert found.sent_bytes() == pytest.approx(4 * WIDTH**2 * 4)


def test_a_convolution_counts_and_covers(mesh):
    graph = topology.one_peer_exponential(16)

    def step(kernel, images):
        def loss(kernel):
            made = lax.conv_general_dilated(
                images,
                kernel,
                (1, 1),
                "VALID",
                dimension_numbers=("NHWC", "HWIO", "NHWC"),
            )
            return jnp.mean(made**2)

        return mix(kernel, graph[0], AXIS) - jax.grad(loss)(kernel)

    kernel = jax.ShapeDtypeStruct((16, 3, 3, 64, 64), jnp.float32)
    images = jax.ShapeDtypeStruct((16, 8, 34, 34, 64), jnp.float32)
    schedule = overlap.read(
        compiled(over_workers(step, mesh), *shapes(mesh, (kernel, images), AXIS))
    )
    assert schedule.covered() == 1
    forward = 2 * 8 * 32 * 32 * 64 * 9 * 64
    assert sum(schedule.work.flops.values()) == pytest.approx(2 * forward)


@pytest.mark.parametrize(
    "options",
    [
        {"window_strides": (1, 1), "padding": "VALID"},
        {"window_strides": (2, 1), "padding": "SAME"},
        {"window_strides": (1, 1), "padding": ((3, 0), (1, 5))},
        {"window_strides": (1, 1), "padding": "SAME", "rhs_dilation": (2, 3)},
        {"window_strides": (1, 1), "padding": ((2, 2), (2, 2)), "lhs_dilation": (2, 3)},
        {"window_strides": (1, 1), "padding": "SAME", "feature_group_count": 2},
    ],
)
def test_the_flops_of_a_convolution_are_those_that_xla_counts(options):
    names = ("NHWC", "HWIO", "NHWC")
    groups = options.get("feature_group_count", 1)
    image, kernel = jnp.ones((2, 9, 7, 4)), jnp.ones((3, 5, 4 // groups, 6))
    convolve = functools.partial(
        lax.conv_general_dilated, dimension_numbers=names, **options
    )
    program = jax.jit(convolve).lower(image, kernel).compile()
    cost = program.cost_analysis()
    assert cost is not None
    assert sum(overlap.read(program).work.flops.values()) == cost["flops"]


def test_on_a_mesh_of_slices_only_the_exchange_leaves_a_slice():
    mesh = gpu_mesh(4, 4, workers=4, model=4)
    graph = topology.one_peer_ring(4)
    spec = (
        jax.sharding.PartitionSpec(None, "model"),
        jax.sharding.PartitionSpec("model"),
    )

    def step(params, x):
        first, second = params

        def loss(params):
            first, second = params
            return jnp.mean((jnp.tanh(x @ first) @ second) ** 2)

        mixed = mix((first, second), graph[0], AXIS, shards=spec)
        grads = jax.grad(loss)((first, second))
        return jax.tree.map(lambda m, g: m - 0.1 * g, mixed, grads)

    arrays = [
        shapes(mesh, jax.ShapeDtypeStruct((4, 512, 512), jnp.float32), AXIS, *axes)
        for axes in [(None, "model"), ("model",)]
    ]
    x = shapes(mesh, jax.ShapeDtypeStruct((4, 1024, 512), jnp.float32), AXIS)
    schedule = overlap.read(compiled(over_workers(step, mesh), tuple(arrays), x))
    along = {c.kind: c.axes for c in schedule.collectives}
    assert along.pop("collective-permute") == (AXIS,)
    assert along
    assert set(along.values()) == {("model",)}
    assert schedule.sent_bytes(AXIS) == pytest.approx(2 * 512 * 512 * 4 / 4)


def test_a_program_for_this_machine_is_read_too():
    text = jax.jit(lambda x: jnp.sin(x) @ x).lower(jnp.ones((8, 8))).compile()
    schedule = overlap.read(text)
    assert schedule.num_devices == 1
    assert schedule.collectives == ()
    assert schedule.covered() == 1
    assert np.isfinite(overlap.estimate(schedule, SLOW, Network(1, 1, 1)).step)
