"""Deliberate bugs, each of which a test has to notice: `python tests/mutants.py`.

A bug that slips says that nothing looks at what it changes. What a careless change of
the code would break stands here: arguments swapped, a check dropped, a sum for a mean.
"""

import argparse
import contextlib
import os
import queue
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
FAILED = 1  # pytest's code where tests ran, and one failed.


class Mutant(NamedTuple):
    """A bug.

    Args:
      path: of the file.
      old: what stands in it, exactly once.
      new: what stands there instead.
      tests: that notice it, as arguments of pytest.
    """

    path: str
    old: str
    new: str
    tests: str

    def __str__(self) -> str:
        return f"{self.path}: {' '.join(self.old.split())[:60]}"

    def is_found(self) -> bool:
        path = ROOT / self.path
        return path.is_file() and path.read_text().count(self.old) == 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="regular expression of bugs to try")
    parser.add_argument("--jobs", type=int, default=1, help="bugs tried at a time")
    parser.add_argument("--limit", type=float, default=150, help="seconds for each")
    parser.add_argument("--check", action="store_true", help="look for snippets alone")
    parser.add_argument("--intact", action="store_true", help="run without the bugs")
    parser.add_argument("--stay", action="store_true", help="keep copies and outputs")
    options = parser.parse_args()
    mutants = [m for m in MUTANTS if re.search(options.only, f"{m} {m.tests}")]
    if options.intact:  # Each command once.
        mutants = list({mutant.tests: mutant for mutant in mutants}.values())
    lost = [mutant for mutant in mutants if not mutant.is_found()]
    for mutant in lost:
        print(f"the snippet is not found once  {mutant}")
    if lost or options.check:
        print(f"{len(mutants) - len(lost)} of {len(mutants)} snippets are found once")
        return bool(lost)

    # A shell has its background jobs ignore Ctrl-C, and tests' processes would too.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    start, folder = time.monotonic(), Path(tempfile.mkdtemp(prefix="mutants"))
    trees: queue.SimpleQueue[Path] = queue.SimpleQueue()
    for number in range(options.jobs):
        trees.put(copy(folder / str(number)))

    def tried(mutant: Mutant) -> bool:
        begin, tree = time.monotonic(), trees.get()
        code = run(mutant, tree, options.limit, options.intact)
        trees.put(tree)
        is_noticed = code is None or code == FAILED or code < 0
        words = ("FAILS", "passes") if options.intact else ("noticed", "SLIPPED")
        word = "NO TEST RAN" if code and not is_noticed else words[not is_noticed]
        how = " as it hangs" if code is None else " as it crashes" * (code < 0)
        seconds = time.monotonic() - begin
        print(f"{word}{how}  {seconds:.0f} s  {mutant}", flush=True)
        return is_noticed if not options.intact else code == 0

    with ThreadPoolExecutor(options.jobs) as pool:
        good = sum(pool.map(tried, mutants))
    if options.stay:
        print(f"copies and outputs are in {folder}")
    else:
        shutil.rmtree(folder, ignore_errors=True)
    what = "pass without their bugs" if options.intact else "noticed"
    seconds = time.monotonic() - start
    print(f"{good} of {len(mutants)} {what}, in {seconds:.0f} s")
    return good < len(mutants)


def copy(tree: Path) -> Path:
    """Copies the working tree, but for what git ignores."""
    command = ["git", "ls-files", "-coz", "--exclude-standard"]
    listed = subprocess.check_output(command, cwd=ROOT, text=True)
    for name in set(listed.split("\0")):
        if (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name)
    return tree


def run(mutant: Mutant, tree: Path, limit: float, is_intact: bool) -> int | None:
    """Returns pytest's exit code on the tree with the bug, None where it hangs."""
    path = tree / mutant.path
    text = path.read_text()
    if not is_intact:
        path.write_text(text.replace(mutant.old, mutant.new))
    env = {
        "PYTHONPATH": f"{tree}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
        # A bug that is made and mended within a second would be taken for the other.
        "PYTHONDONTWRITEBYTECODE": "1",
        "JAX_COMPILATION_CACHE_DIR": str(tree.parent / "cache"),
    }
    options = ("-xq", "-p", "no:cacheprovider", f"--basetemp={tree}.tmp")
    command = (sys.executable, "-m", "pytest", *options, *shlex.split(mutant.tests))
    with open(f"{tree}.txt", "a") as output:
        process = subprocess.Popen(
            command, cwd=tree, env=os.environ | env, stdout=output, stderr=output
        )
        try:
            return process.wait(limit)
        except subprocess.TimeoutExpired:
            return None
        finally:
            end_all(tree)
            process.wait()
            path.write_text(text)


def end_all(tree: Path) -> None:
    """Ends what a bug may have left behind, in whatever session: it knows the tree."""
    mark = f"PYTHONPATH={tree}{os.pathsep}".encode()
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark in (path / "environ").read_bytes():
                os.kill(int(path.name), signal.SIGKILL)


MUTANTS = [
    Mutant(
        "decentjax/__init__.py",
        "        return _import(name)",
        "        return [*map(_import, _CORE), _import(name)][-1]",
        "tests/test_topology.py -k import_no_jax",
    ),
    Mutant(
        "decentjax/exchange.py",
        "abs(sum(self.weights) - 1) > 1e-9",
        "abs(sum(self.weights) - 1) > 1e-1",
        "tests/test_topology.py -k an_error_says",
    ),
    Mutant(
        "decentjax/exchange.py",
        "self.exchanges[step % self.period]",
        "self.exchanges[min(step, self.period - 1)]",
        "tests/test_topology.py -k take_turns_for_ever",
    ),
    Mutant(
        "decentjax/exchange.py",
        "(1 - exchange.factor) * values + exchange.factor * spread",
        "(1 - exchange.factor) * values + spread",
        "tests/test_topology.py -k damping_moves",
    ),
    Mutant(
        "decentjax/exchange.py",
        "np.broadcast_arrays(sources, np.arange(between.size))",
        "np.broadcast_arrays(np.arange(between.size), sources)",
        "tests/test_analysis.py -k who_sends_to_more",
    ),
    Mutant(
        "decentjax/topology.py",
        "_circulant(num_workers, [0, -hop])",
        "_circulant(num_workers, [0, hop])",
        "tests/test_topology.py -k is_the_one_of_its_paper",
    ),
    Mutant(
        "decentjax/topology.py",
        "(of_bit[1::2], of_bit[::2])",
        "(of_bit[::2], of_bit[1::2])",
        "tests/test_topology.py -k keeps_the_order_of_decent_dp",
    ),
    Mutant(
        "decentjax/topology.py",
        "(step * active + r) % bits",
        "(step + r) % bits",
        "tests/test_topology.py -k butterfly_groups_are_those",
    ),
    Mutant(
        "decentjax/topology.py",
        "factor=e.factor * factor",
        "factor=factor",
        "tests/test_topology.py -k damping_twice",
    ),
    Mutant(
        "decentjax/topology.py",
        "exchange.workers_per_node != 1 or exchange.factor != 1",
        "exchange.workers_per_node != 1 and exchange.factor != 1",
        "tests/test_topology.py -k an_error_says",
    ),
    Mutant(
        "decentjax/topology.py",
        "matrix.sum(1 - turn % 2, keepdims=True)",
        "matrix.sum(1, keepdims=True)",
        "tests/test_topology.py -k from_matrix",
    ),
    Mutant(
        "decentjax/topology.py",
        "topology[step] if (step + 1) % period else mean",
        "topology[step] if step % period else mean",
        "tests/test_topology.py -k is_the_one_of_its_paper",
    ),
    Mutant(
        "decentjax/topology.py",
        "range(math.lcm(topology.period, period))",
        "range(max(topology.period, period))",
        "tests/test_topology.py -k is_the_one_of_its_paper",
    ),
    Mutant(
        "decentjax/topology.py",
        "(mean,) = complete(topology.num_workers)",
        "(mean,) = alone(topology.num_workers)",
        "tests/test_wagma.py -k within_the_bound",
    ),
    Mutant(
        "decentjax/topology.py",
        "hops[step:] + hops[:step]",
        "hops",
        "tests/test_topology.py -k is_the_one_of_its_paper",
    ),
    Mutant(
        "decentjax/topology.py",
        "[0, *(-hop for hop in order[:degree])]",
        "[0, *(hop for hop in order[:degree])]",
        "tests/test_wagma.py -k push_sum",
    ),
    Mutant(
        "decentjax/topology.py",
        "if not 1 <= degree <= len(hops):",
        "if not 1 <= degree:",
        "tests/test_topology.py -k which_sizes",
    ),
    Mutant(
        "decentjax/topology.py",
        "2 ** (num_workers.bit_length() // 2) if",
        "2 ** ((num_workers.bit_length() - 1) // 2) if",
        "tests/test_topology.py -k by_default_of_the_root",
    ),
    Mutant(
        "train/config.py",
        "topologies.with_mean_every(topology, self.mean_every)",
        "topologies.with_mean_every(topology, self.period)",
        "tests/test_train.py -k mean_every_few",
    ),
    Mutant(
        "train/config.py",
        "any(a >= b for a, b in",
        "any(a > b for a, b in",
        "tests/test_train.py -k impossible_value",
    ),
    Mutant(
        "train/run/optimizers.py",
        "{step - warmup: config.decay_factor",
        "{step: config.decay_factor",
        "tests/test_train.py -k the_rate_falls",
    ),
    Mutant(
        "train/run/optimizers.py",
        'Kind(optax.sgd, ("momentum",), decouples=False)',
        "Kind(optax.sgd, (), decouples=False)",
        "tests/test_train.py -k sgd_has_momentum",
    ),
    Mutant(
        "train/advise/rank.py",
        "if config.mean_every is not None:",
        "if config.mean_every is None:",
        "tests/test_advise.py -k says_its_options",
    ),
    Mutant(
        "decentjax/_base_k.py",
        "block_size / (len(part) + len(later))",
        "block_size / len(part)",
        "tests/test_topology.py -k base_k_is_exact",
    ),
    Mutant(
        "decentjax/_base_k.py",
        "min(_simple_base(workers, base), product, key=len)",
        "product",
        "tests/test_topology.py -k base_k_has_the_period",
    ),
    Mutant(
        "decentjax/_birkhoff.py",
        "np.where(unsent[rows, columns], columns, -1)",
        "columns",
        "tests/test_matching.py -k edge_colouring",
    ),
    Mutant(
        "decentjax/_birkhoff.py",
        "residual = np.array(matrix, np.float64)",
        "residual = np.asarray(matrix, np.float64)",
        "tests/test_matching.py -k leaves_its_argument_alone",
    ),
    Mutant(
        "decentjax/mixing.py",
        "own + exchange.factor * (mixed.astype(own.dtype) - own)",
        "mixed.astype(own.dtype)",
        "tests/test_mixing.py -k each_worker_gets",
    ),
    Mutant(
        "decentjax/mixing.py",
        "[model - sent.astype(dtype) for model in models]",
        "[model - x.astype(dtype) for model in models]",
        "tests/test_mixing.py -k models_that_agree_stay",
    ),
    Mutant(
        "decentjax/mixing.py",
        "jnp.finfo(dtype).nexp >= 8",
        "jnp.finfo(message_dtype).nexp >= 5",
        "tests/test_mixing.py -k without_the_range_of_float32",
    ),
    Mutant(
        "decentjax/mixing.py",
        "sum_over(x.astype(sum_dtype(x)), axis_name)",
        "sum_over(x, axis_name)",
        "tests/test_mixing.py -k global_mean_of_bfloat16",
    ),
    Mutant(
        "decentjax/mixing.py",
        "jnp.sqrt(sum_over(squares, axis_name) / lax.axis_size(axis_name))",
        "jnp.sqrt(sum_over(squares, axis_name))",
        "tests/test_mixing.py -k consensus_distance_is_the_root",
    ),
    Mutant(
        "decentjax/mixing.py",
        "jnp.abs(x.astype(sum_dtype(x)) - _mean(x, axis_name))",
        "x.astype(sum_dtype(x)) - _mean(x, axis_name)",
        "tests/test_mixing.py -k counts_imaginary_parts",
    ),
    Mutant(
        "decentjax/mixing.py",
        "[(j, i) for i, j in enumerate(one.sources) if j >= 0]",
        "[(i, j) for i, j in enumerate(one.sources) if j >= 0]",
        "tests/test_mixing.py -k each_worker_gets",
    ),
    Mutant(
        "decentjax/mixing.py",
        "max(1, piece_bytes // x.dtype.itemsize)",
        "max(1, piece_bytes)",
        "tests/test_mixing.py -k pieces_are_no_larger",
    ),
    Mutant(
        "decentjax/mixing.py",
        "jnp.asarray(of_nodes, dtype)[node]",
        "of_nodes[0]",
        "tests/test_mixing.py -k each_worker_gets",
    ),
    Mutant(
        "decentjax/_collectives.py",
        ".at[receivers].set(x[senders])",
        ".at[senders].set(x[receivers])",
        "tests/test_mixing.py -k devices_and_simulation_agree",
    ),
    Mutant(
        "decentjax/_collectives.py",
        "np.argsort(np.array(groups).ravel())",
        "np.array(groups).ravel()",
        "tests/test_mixing.py -k devices_and_simulation_agree",
    ),
    Mutant(
        "decentjax/_collectives.py",
        "    if number & (number - 1) == 0:",
        "    if number:",
        'tests/test_mixing.py -k "to_no_side"',
    ),
    Mutant(
        "decentjax/_collectives.py",
        "jnp.moveaxis(pieces, dim, 0).astype(dtype)",
        "jnp.moveaxis(pieces, dim, 0)",
        'tests/test_mixing.py -k "summed_in_float32 or rounded_once"',
    ),
    Mutant(
        "decentjax/step.py",
        'check_call(loss_fn, "loss_fn", "params", "model_state", "batch", "key")',
        'check_call(loss_fn, "loss_fn", "params", "batch", "key")',
        "tests/test_wrong.py -k wrong_call",
    ),
    Mutant(
        "decentjax/methods.py",
        "not learning_rate >= 0",
        "learning_rate > 1",
        "tests/test_wrong.py -k wrong_call",
    ),
    Mutant(
        "decentjax/schedule.py",
        'check_whole("num_steps", num_steps)',
        'check_whole("num_steps", int(num_steps))',
        "tests/test_wrong.py -k wrong_call",
    ),
    Mutant(
        "decentjax/placement.py",
        "first.setdefault(_num_rows(x), name)",
        "first[_num_rows(x)] = name",
        "tests/test_wrong.py -k wrong_call",
    ),
    Mutant(
        "decentjax/loss.py",
        "    if shape:\n",
        "    if len(shape) > 1:\n",
        "tests/test_step.py -k a_loss_function",
    ),
    Mutant(
        "decentjax/loss.py",
        "if wanted.get(path) != got.get(path):",
        "if path not in got:",
        "tests/test_step.py -k a_loss_function",
    ),
    Mutant(
        "decentjax/loss.py",
        "all(x is y for x, y in pairs)",
        "any(x is y for x, y in pairs)",
        "tests/test_step.py -k keys_that_no_step_changes",
    ),
    Mutant(
        "decentjax/step.py",
        "jax.vmap(folded, (0, None), 1)(x.ravel(), numbers)",
        "jax.vmap(folded, (0, None), 1)(x.ravel(), 0 * numbers)",
        "tests/test_step.py -k start_from_one_model",
    ),
    Mutant(
        "decentjax/step.py",
        "descend(optimizer, grads, state.opt_state, mixed, loss)",
        "descend(optimizer, grads, state.opt_state, state.params, loss)",
        "tests/test_step.py -k adapt_sends_nothing",
    ),
    Mutant(
        "decentjax/step.py",
        "        grads = reduce_gradients(grads)",
        "        pass",
        "tests/test_step.py -k all_reduce_keeps_its_replicas",
    ),
    Mutant(
        "decentjax/step.py",
        "lambda x: x.mean(0), metrics",
        "lambda x: x.sum(0), metrics",
        "tests/test_step.py -k micro_batches_give",
    ),
    Mutant(
        "decentjax/step.py",
        "(s / num_micro_batches).astype(x.dtype)",
        "s.astype(x.dtype)",
        "tests/test_step.py -k micro_batches_give",
    ),
    Mutant(
        "decentjax/step.py",
        "jnp.zeros_like(x, sum_dtype(x))",
        "jnp.zeros_like(x)",
        "tests/test_step.py -k micro_batches_of_narrow_params",
    ),
    Mutant(
        "decentjax/step.py",
        "jax.random.split(step_key, num_micro_batches)",
        "jnp.stack([step_key] * num_micro_batches)",
        "tests/test_step.py -k keys_of_their_own",
    ),
    Mutant(
        "decentjax/step.py",
        "split(key, num_workers)[numbers]",
        "split(key, num_workers)[: len(numbers)]",
        "tests/test_step.py -k some_workers_start",
    ),
    Mutant(
        "decentjax/step.py",
        "if any(map(is_decentralized, ",
        "if not any(map(is_decentralized, ",
        "tests/test_step.py -k of_one_worker_a_step_is_plain",
    ),
    Mutant(
        "decentjax/schedule.py",
        "begun = step - delay + 1",
        "begun = step - delay",
        "tests/test_rounds.py -k keeps_what_a_worker",
    ),
    Mutant(
        "decentjax/schedule.py",
        "receives = delay > 0 and begun >= 0",
        "receives = delay > 0",
        "tests/test_rounds.py -k begins_rounds_where",
    ),
    Mutant(
        "decentjax/schedule.py",
        "after = [*places[1:], places[0] + self.period]",
        "after = [*places[1:], places[0] + 2 * self.period]",
        "tests/test_rounds.py -k without_sense",
    ),
    Mutant(
        "decentjax/schedule.py",
        "begins = {part * num_steps // count: tuple(x)",
        "begins = {part: tuple(x)",
        "tests/test_rounds.py -k streaming_diloco_sends",
    ),
    Mutant(
        "decentjax/rounds.py",
        "now.astype(dtype) - sent.astype(dtype)",
        "sent.astype(dtype) - now.astype(dtype)",
        "tests/test_rounds.py -k keeps_what_a_worker",
    ),
    Mutant(
        "decentjax/rounds.py",
        "share * now.astype(dtype) + (1 - share) * new",
        "(1 - share) * now.astype(dtype) + share * new",
        "tests/test_rounds.py -k streaming_diloco_sends",
    ),
    Mutant(
        "decentjax/rounds.py",
        "    new = new._replace(extra=mixed.extra)",
        "    new = new._replace(extra=state.extra)",
        "tests/test_rounds.py -k streaming_diloco_sends",
    ),
    Mutant(
        "decentjax/rounds.py",
        "as_seen(z, carried.sent[number]) - mixed[number].astype(z.dtype)",
        "mixed[number].astype(z.dtype) - as_seen(z, carried.sent[number])",
        "tests/test_rounds.py -k algorithm_1",
    ),
    Mutant(
        "decentjax/rounds.py",
        "place = rounds.schedule.fragments.index(fragment)",
        "place = 0",
        "tests/test_rounds.py -k streaming_diloco_sends",
    ),
    Mutant(
        "decentjax/rounds.py",
        "    params = lax.optimization_barrier(jax.tree.unflatten(structure, leaves))",
        "    params = state.params",
        "tests/test_rounds.py -k after_h_steps",
    ),
    Mutant(
        "decentjax/methods.py",
        "nesterov=True)\n    return Rounds(every(",
        "nesterov=False)\n    return Rounds(every(",
        "tests/test_rounds.py -k algorithm_1",
    ),
    Mutant(
        "decentjax/correction.py",
        "u + (x - p)",
        "u + (p - x)",
        "tests/test_correction.py -k is_d2",
    ),
    Mutant(
        "decentjax/correction.py",
        "last = state.rate",
        "last = rate(state.count)",
        "tests/test_correction.py -k quasi_global_momentum_is",
    ),
    Mutant(
        "decentjax/correction.py",
        "found.append(Tracked(new, wide))",
        "found.append(Tracked(new, before.gradient))",
        "tests/test_correction.py -k diging",
    ),
    Mutant(
        "decentjax/gossip/late.py",
        "            self._send_again(state, step)\n",
        "            pass\n",
        "tests/test_rounds.py -k second_thread",
    ),
    Mutant(
        "decentjax/gossip/late.py",
        "range(max(0, step - self._rounds.schedule.delay + 1), step)",
        "range(max(0, step - self._rounds.schedule.delay + 2), step)",
        "tests/test_rounds.py -k second_thread",
    ),
    Mutant(
        "decentjax/gossip/late.py",
        "self._arriving.popleft()",
        "self._arriving.pop()",
        "tests/test_rounds.py -k second_thread",
    ),
    Mutant(
        "decentjax/codec.py",
        "jnp.floor(blocks * scale[:, None] + added)",
        "jnp.round(blocks * scale[:, None])",
        "tests/test_codec.py -k right_on_average",
    ),
    Mutant(
        "decentjax/codec.py",
        "[place::each] << shift for",
        "[place::each] << place for",
        "tests/test_codec.py -k one_away",
    ),
    Mutant(
        "decentjax/codec.py",
        "_packed(2, block, _half)",
        "_packed(2, block, _uniform)",
        "tests/test_codec.py -k nearest_level",
    ),
    Mutant(
        "decentjax/codec.py",
        "jnp.split(joined, ends[:-1], axis=-1)",
        "jnp.split(joined, ends[:-1], axis=-1)[::-1]",
        "tests/test_codec.py -k deep_squeeze",
    ),
    Mutant(
        "decentjax/codec.py",
        "of_values.encode(largest, key)",
        "exact().encode(largest, key)",
        "tests/test_codec.py -k bytes_are_counted",
    ),
    Mutant(
        "decentjax/codec.py",
        "[codec.decode(one[number], leaf.shape) - own for",
        "[codec.decode(one[number], leaf.shape) - leaf for",
        "tests/test_codec.py -k deep_squeeze",
    ),
    Mutant(
        "decentjax/gossip/late.py",
        "known = state._replace(extra=())",
        "known = state",
        "tests/test_rounds.py -k second_thread",
    ),
    Mutant(
        "decentjax/gossip/late.py",
        "            self._start_step(*self._pending)\n",
        "            pass\n",
        "tests/test_rounds.py -k second_thread",
    ),
    Mutant(
        "decentjax/gossip/peer_rounds.py",
        "number = self.schedule.count(step)",
        "number = step",
        "tests/test_peers.py -k rounds_by_peers",
    ),
    Mutant(
        "decentjax/gossip/peer_rounds.py",
        "time.monotonic() + self.patience\n        rows",
        "time.monotonic() + 300\n        rows",
        "tests/test_peers.py -k late_peer_of_a_round",
    ),
    Mutant(
        "decentjax/rounds.py",
        "shards=of_leaves)",
        "shards=dict(enumerate(specs)))",
        "tests/test_rounds.py -k slice_of_the_mesh",
    ),
    Mutant(
        "decentjax/codec.py",
        "jax.random.fold_in(key, lax.axis_index(axes))",
        "key",
        "tests/test_rounds.py -k noise_differs",
    ),
    Mutant(
        "decentjax/rounds.py",
        "functools.partial(_mix_coded_shards, average, shardings)",
        "average",
        "tests/test_rounds.py -k encoded_shards_travel",
    ),
    Mutant(
        "decentjax/codec.py",
        "jnp.concatenate([x] * count) if count > 1 else x",
        "x",
        "tests/test_rounds.py -k each_shard_is_encoded",
    ),
    Mutant(
        "train/run/clock.py",
        "model_bytes=sent_bytes(rounds, None, model)",
        "model_bytes=size",
        "tests/test_compare.py -k rounds_have_a_clock",
    ),
    Mutant(
        "train/bench/quality/quality.py",
        "if x * seconds[method.name] <= longest",
        "",
        "tests/test_bench_quality.py -k end_after_ddp",
    ),
    Mutant(
        "decentjax/_collectives.py",
        "cpu=as_bits, default=move)",
        "cpu=move, default=move)",
        "tests/test_mixing.py -k bytes_that_analysis_says",
    ),
    Mutant(
        "decentjax/runtime/schemes.py",
        "rest = 0.0 if hidden else compute",
        "rest = 0.0",
        "tests/test_runtime.py -k delay_does_not_hide",
    ),
    Mutant(
        "decentjax/runtime/schemes.py",
        "under_way[step + schedule.delay - 1]",
        "under_way[step + schedule.delay]",
        "tests/test_runtime.py -k rounds",
    ),
    Mutant(
        "decentjax/runtime/schemes.py",
        "part = job.model_bytes / len(schedule.fragments)",
        "part = job.model_bytes",
        "tests/test_advise_race.py -k exposed",
    ),
    Mutant(
        "train/advise/race.py",
        "sent *= 2.0 if",
        "sent *= 1.0 if",
        "tests/test_advise_race.py -k exposed",
    ),
    Mutant(
        "train/advise/race.py",
        "first(middle) == below else",
        "first(middle) == above else",
        "tests/test_advise_race.py -k changes_with_the_rate",
    ),
    Mutant(
        "train/bench/quality/curves.py",
        "(high - loss) / (high - low)",
        "(loss - low) / (high - low)",
        "tests/test_bench_quality.py -k between_two",
    ),
    Mutant(
        "train/bench/quality/curves.py",
        "near = rates[max(place - 1, 0) : place + 2]",
        "near = rates[place : place + 2]",
        "tests/test_bench_quality.py -k from_the_middle",
    ),
    Mutant(
        "train/bench/quality/quality_report.py",
        "min((run.seconds_to(self.goal, per_step) for run in runs), default=inf)",
        "runs[0].seconds_to(self.goal, per_step)",
        "tests/test_bench_quality.py -k ratios_to_ddp",
    ),
    Mutant(
        "train/job/namespaces.py",
        '((net, INTERFACE), (self._switch, f"node{node}"))',
        "((net, INTERFACE),)",
        "tests/test_emulate.py -k rate_of_a_link_changes",
    ),
    Mutant(
        "train/bench/model/diloco.py",
        "job = Job(model_bytes=MODEL_BYTES,",
        "job = Job(model_bytes=2 * MODEL_BYTES,",
        "tests/test_bench_model.py -k round_of_diloco",
    ),
    Mutant(
        "decentjax/codec.py",
        "source[worker] = group[(place + turn) % size]",
        "source[worker] = group[(place + 1) % size]",
        "tests/test_codec.py -k sent_as_permutations",
    ),
    Mutant(
        "decentjax/compression.py",
        "part = -1 if is_copy else compression.keep",
        "part = -1 if is_copy else 1",
        "tests/test_codec.py -k sparse_loco",
    ),
    Mutant(
        "decentjax/compression.py",
        "memory[number] + decoded if is_copy else payload - decoded",
        "memory[number] + decoded if is_copy else 0 * payload",
        "tests/test_codec.py -k deep_squeeze",
    ),
    Mutant(
        "decentjax/compression.py",
        "moved[number] = moved[number] + difference",
        "moved[number] = difference",
        "tests/test_codec.py -k choco_is",
    ),
    Mutant(
        "train/run/rounds.py",
        "    if options.copies:\n",
        "    if False:\n",
        "tests/test_train_rounds.py -k copies_of_peers",
    ),
    Mutant(
        "train/run/seeds.py",
        "                exchange = as_permutations(exchange)\n",
        "                pass\n",
        "tests/test_train_rounds.py -k numbers_of_its_seeds",
    ),
    Mutant(
        "decentjax/gossip/carrier.py",
        "return self._engine.submit(self._exchange, models, exchange, step)",
        "done = self._engine.submit(self._exchange, models, exchange, step)\n"
        "        done.result()\n        return done",
        "tests/test_rounds.py -k fragments_fly",
    ),
    Mutant(
        "decentjax/gossip/carrier.py",
        'if compression.of != "drift":',
        "if True:",
        "tests/test_rounds.py -k second_thread",
    ),
    Mutant(
        "decentjax/codec.py",
        "lambda x: lax.all_gather(x, axis_name)",
        'lambda x: lax.all_gather(x.astype("float32"), axis_name).astype(x.dtype)',
        "tests/test_codec.py -k bytes_are_what_travels",
    ),
    Mutant(
        "decentjax/rounds.py",
        "    numbers = leaves_of(fragment, state.params)\n    if",
        "    numbers = leaves_of(None, state.params)\n    if",
        "tests/test_codec.py -k bytes_are_what_travels",
    ),
    Mutant(
        "decentjax/topology.py",
        "order = generator.permutation(num_workers).tolist()",
        "order = list(range(num_workers))",
        "tests/test_rounds.py -k noloco_is",
    ),
    Mutant(
        "train/run/build.py",
        '(config.step.algorithm == "awc" or late)',
        'config.step.algorithm == "awc"',
        "tests/test_distributed.py -k rounds_in_processes",
    ),
    Mutant(
        "train/run/peers.py",
        "    if isinstance(peers, gossip.PeerRounds):\n",
        "    if False:\n",
        "tests/test_peer_job.py -k of_rounds_who_was_away",
    ),
    Mutant(
        "decentjax/placement.py",
        "self._jit(self._plan[place])(state, batch)",
        "self._jit(self._plan[0])(state, batch)",
        "tests/test_step.py -k follows_the_dense",
    ),
    Mutant(
        "decentjax/placement.py",
        "            donate_argnums=0,",
        "",
        "tests/test_step.py -k gives_up_the_buffers",
    ),
    Mutant(
        "decentjax/placement.py",
        "and state.key.is_deleted():",
        "and False:",
        "tests/test_step.py -k a_state_that_was_given_up",
    ),
    Mutant(
        "decentjax/placement.py",
        "            return x[0]",
        "            return x[-1]",
        "tests/test_step.py -k from_worker_zero",
    ),
    Mutant(
        "decentjax/placement.py",
        "Mesh(devices[:num_workers], (AXIS,))",
        "Mesh(devices[-num_workers:], (AXIS,))",
        "tests/test_step.py -k a_worker_mesh_takes",
    ),
    Mutant(
        "decentjax/optim.py",
        "(count + accum_steps - 1) // accum_steps",
        "(count + accum_steps) // accum_steps",
        "tests/test_optim.py -k accum_adam_is_the_papers_loop",
    ),
    Mutant(
        "decentjax/optim.py",
        "b + g.astype(b.dtype) / accum_steps",
        "b + g.astype(b.dtype)",
        "tests/test_optim.py -k accum_adam_is_the_papers_loop",
    ),
    Mutant(
        "decentjax/optim.py",
        "adam.update(acc, last)",
        "adam.update(updates, last)",
        "tests/test_optim.py -k accum_adam_is_the_papers_loop",
    ),
    Mutant(
        "decentjax/optim.py",
        "(moved.mu, moved.nu, optax.tree.zeros_like(acc))",
        "(moved.mu, moved.nu, acc)",
        "tests/test_optim.py -k accum_adam_is_the_papers_loop",
    ),
    Mutant(
        "decentjax/optim.py",
        "optax.add_decayed_weights(weight_decay, mask)",
        "optax.add_decayed_weights(weight_decay)",
        "tests/test_optim.py -k accum_adamw",
    ),
    Mutant(
        "decentjax/optim.py",
        "optax.apply_updates(mixed, update)",
        "optax.apply_updates(params, update)",
        "tests/test_optim.py -k follows_the_dense_recursion",
    ),
    Mutant(
        "decentjax/optim.py",
        "if _in_conditional(axis_name):",
        "if False:",
        "tests/test_optim.py -k around_it_a_wrapper",
    ),
    Mutant(
        "decentjax/optim.py",
        "count, inner_state = state.count + 1, worker.opt_state",
        "count, inner_state = state.count, worker.opt_state",
        "tests/test_optim.py -k the_state_counts",
    ),
    Mutant(
        "decentjax/optim.py",
        "(mix_once, plan[step])",
        "(mix_once, plan[0])",
        "tests/test_optim.py -k wraps_around",
    ),
    Mutant(
        "decentjax/analysis.py",
        "return rounds / size, rounds",
        "return 2.0, rounds",
        "tests/test_analysis.py -k one_exchange_sends",
    ),
    Mutant(
        "decentjax/analysis.py",
        "product = apply(exchange, product)",
        "product = product @ apply(exchange, np.eye(len(product)))",
        "tests/test_analysis.py -k multiplies_its_matrices",
    ),
    Mutant(
        "decentjax/analysis.py",
        "return step + 1 if distance",
        "return step if distance",
        "tests/test_analysis.py -k is_exact_after_these",
    ),
    Mutant(
        "decentjax/analysis.py",
        "pairs[1], 1 / local, 1)",
        "pairs[1], 1.0, 1)",
        "tests/test_analysis.py -k alternating_ring",
    ),
    Mutant(
        "decentjax/gossip/staged.py",
        "self._sent_for != step or list",
        "list",
        "tests/test_gossip.py -k a_step_out_of_turn",
    ),
    Mutant(
        "decentjax/gossip/links.py",
        "self._left[worker, peer, channel] = life, 1 - slot",
        "self._left[worker, peer, channel] = life, slot",
        "tests/test_peers.py -k numbers_of_awc",
    ),
    Mutant(
        "decentjax/gossip/links.py",
        "if message.said.step >= step]",
        "if True]",
        "tests/test_peers.py -k older_message",
    ),
    Mutant(
        "decentjax/gossip/links.py",
        "except RefusedError as why:\n            self.refused",
        "except () as why:\n            self.refused",
        "tests/test_peers.py -k refused_by_name",
    ),
    Mutant(
        "decentjax/gossip/links.py",
        "            self._check_numbers()\n",
        "",
        "tests/test_peers.py -k number_is_one",
    ),
    Mutant(
        "decentjax/gossip/links.py",
        "if is_ahead or has_died or time.monotonic() >= deadline:",
        "if False:",
        "tests/test_peers.py -k slow_worker",
    ),
    Mutant(
        "decentjax/gossip/links.py",
        "slots = {1 - edge.newest[-1]} if",
        "slots = {0} if",
        "tests/test_peers.py -k came_late",
    ),
    Mutant(
        "decentjax/gossip/links.py",
        "if is_ahead or has_died or",
        "if has_died or",
        "tests/test_peers.py -k peer_ahead",
    ),
    Mutant(
        "decentjax/gossip/handshake.py",
        "create_server((host, int(port or 0))",
        "create_server((host, 0)",
        "tests/test_peers.py -k not_free",
    ),
    Mutant(
        "decentjax/mixing.py",
        "if not models or not is_mixed(x):",
        "if not models:",
        "tests/test_peers.py -k only_floats",
    ),
    Mutant(
        "train/config.py",
        "or topology.mean_every is None",
        "",
        "tests/test_peer_job.py -k groups_without",
    ),
    Mutant(
        "decentjax/gossip/replay.py",
        "if left[worker] and step != left[worker][-1] + 1:",
        "if False:",
        "tests/test_peers.py -k came_back_is_not",
    ),
    Mutant(
        "decentjax/gossip/means.py",
        "return butterfly_hops(self.num_workers, self.group_size, step)",
        "return butterfly_hops(self.num_workers, self.group_size, 0)",
        "tests/test_wagma_peers.py -k butterflys_groups",
    ),
    Mutant(
        "decentjax/gossip/means.py",
        "return (step + 1) % self.period == 0",
        "return step % self.period == 0",
        "tests/test_wagma_peers.py -k mean_of_all_has",
    ),
    Mutant(
        "decentjax/gossip/means.py",
        "        if self._groups.is_global(self._step):\n            return False",
        "",
        "tests/test_wagma_peers.py -k mean_of_all_has",
    ),
    Mutant(
        "decentjax/gossip/means.py",
        "return _mean_with(own, one.leaves, count + 1)",
        "return _mean(own, one.leaves, count)",
        "tests/test_wagma_peers.py -k was_recorded",
    ),
    Mutant(
        "decentjax/gossip/means.py",
        ">= self._step\n            for worker",
        "> self._step + 10**6\n            for worker",
        "tests/test_wagma_peers.py -k delays_no_other",
    ),
    Mutant(
        "decentjax/gossip/means.py",
        "        return self._links.newest_number(worker, peer, FAREWELLS) >= 0",
        "        return True",
        "tests/test_wagma_peers.py -k who_is_done",
    ),
    Mutant(
        "decentjax/gossip/wagma.py",
        "for i, at in enumerate(steps) if at >= 0)",
        "for i, at in enumerate(steps) if at >= step)",
        "tests/test_wagma_peers.py -k was_recorded",
    ),
    Mutant(
        "decentjax/gossip/wagma.py",
        "row[own].max() if groups.is_global(step) else",
        "",
        "tests/test_wagma_peers.py -k simulation",
    ),
    Mutant(
        "decentjax/gossip/replay.py",
        "_drop({*of_steps[own].models, own}, uses, offered)",
        "pass",
        "tests/test_wagma_peers.py -k drops_the_models",
    ),
    Mutant(
        "decentjax/gossip/ways.py",
        "- share < LEAST_MASS:",
        "- share < 0:",
        "tests/test_peers.py -k little_mass",
    ),
    Mutant(
        "decentjax/gossip/peers.py",
        "new._replace(key=state.key), max(",
        "new._replace(key=state.key, opt_state=state.opt_state), max(",
        "tests/test_elastic.py -k joiner",
    ),
    Mutant(
        "decentjax/gossip/replay.py",
        "self._masses[group] = used.mass",
        "self._masses[group] = 1.0",
        "tests/test_peers.py -k bit_for_bit",
    ),
    Mutant(
        "decentjax/gossip/replay.py",
        "for i in (worker, worker ^ hops[-1])",
        "for i in (worker, worker)",
        "tests/test_wagma_peers.py -k was_recorded",
    ),
    Mutant(
        "decentjax/mixing.py",
        "difference = came.astype(dtype) - sent.astype(dtype)",
        "difference = came.astype(dtype) - x.astype(dtype)",
        "tests/test_peers.py -k mean_stays",
    ),
    Mutant(
        "decentjax/gossip/ways.py",
        "if life and swap.sent is None:",
        "if life:",
        "tests/test_peers.py -k mean_stays",
    ),
    Mutant(
        "decentjax/gossip/ways.py",
        "if not push.life or push.mass:",
        "if not push.life:",
        "tests/test_peers.py -k mean_stays",
    ),
    Mutant(
        "decentjax/gossip/ways.py",
        "mass = self._masses[worker, group]\n        mass +=",
        "mass = 1.0\n        mass +=",
        "tests/test_peers.py -k mean_stays",
    ),
    Mutant(
        "decentjax/gossip/ways.py",
        "self._masses[worker, group] += push.mass",
        "pass",
        "tests/test_peers.py -k dead_worker_did_not_take",
    ),
    Mutant(
        "decentjax/gossip/ways.py",
        "swap = self._swaps[worker, group][peer] = _Swap(life)",
        "swap.life = life",
        "tests/test_peers.py -k begins_anew",
    ),
    Mutant(
        "decentjax/gossip/links.py",
        'edge = repr(("array", source, target, life, channel, slot))',
        'edge = repr(("array", source, target, channel, slot))',
        "tests/test_peers.py -k not_lost",
    ),
    Mutant(
        "decentjax/gossip/links.py",
        'hmac.digest(self._secret, edge.encode(), "sha256")',
        'hmac.digest(b"", edge.encode(), "sha256")',
        "tests/test_handshake.py -k not_guessed",
    ),
    Mutant(
        "decentjax/gossip/handshake.py",
        'proof = self._prove("host", other, nonce, says, answer)',
        "proof = mac",
        "tests/test_handshake.py -k does_not_serve_again",
    ),
    Mutant(
        "decentjax/gossip/handshake.py",
        "if not hmac.compare_digest(proof.encode(), mac.encode()):\n            _send",
        "if False:\n            _send",
        "tests/test_handshake.py -k does_not_serve_again",
    ),
    Mutant(
        "decentjax/gossip/handshake.py",
        "if len(self._guests) > MAX_GUESTS:",
        "if False:",
        "tests/test_handshake.py -k garbage",
    ),
    Mutant(
        "decentjax/gossip/handshake.py",
        'nonce = secrets.token_hex(NONCE_BYTES)\n        _send(writer, {"nonce"',
        'nonce = "0" * 64\n        _send(writer, {"nonce"',
        "tests/test_handshake.py -k does_not_serve_again",
    ),
    Mutant(
        "decentjax/distributed/start.py",
        "hosts = _hosts(local_workers, start_seconds)",
        'hosts = [""] * place.num_processes',
        'tests/test_initialize.py -k "finds_its_place or differ"',
    ),
    Mutant(
        "decentjax/distributed/start.py",
        "        end_where_uncaught()\n",
        "",
        "tests/test_initialize.py -k an_exception",
    ),
    Mutant(
        "decentjax/distributed/failure.py",
        "end_process(message, os.EX_SOFTWARE)",
        "end_process(message, 1)",
        "tests/test_initialize.py -k an_exception",
    ),
    Mutant(
        "decentjax/distributed/failure.py",
        "    threading.excepthook = lambda",
        "    _ = lambda",
        "tests/test_initialize.py -k an_exception",
    ),
    Mutant(
        "decentjax/distributed/failure.py",
        "if issubclass(kind, SystemExit):",
        "if False:",
        "tests/test_initialize.py -k an_exception",
    ),
    Mutant(
        "decentjax/distributed/devices.py",
        "hosts.index(hosts[d.process_index])",
        "0",
        "tests/test_initialize.py -k finds_its_place",
    ),
    Mutant(
        "decentjax/distributed/devices.py",
        "range(local_id * count, (local_id + 1) * count)",
        "range(local_id, local_id + count)",
        "tests/test_initialize.py -k gpus_of_its_own",
    ),
    Mutant(
        "decentjax/distributed/place.py",
        "if found[1:3] != own[1:3]:",
        "if False:",
        "tests/test_initialize.py -k variables_that_cannot",
    ),
    Mutant(
        "decentjax/distributed/place.py",
        "return found  # PyTorch",
        "return own  # PyTorch",
        "tests/test_initialize.py -k launcher_says",
    ),
    Mutant(
        "decentjax/distributed/place.py",
        "if own >= count:",
        "if own > count:",
        "tests/test_initialize.py -k variables_that_cannot",
    ),
    Mutant(
        "decentjax/distributed/place.py",
        "_number(names.address[-1], 1) + 1",
        "_number(names.address[-1], 1)",
        "tests/test_initialize.py -k each_launcher",
    ),
    Mutant(
        "train/launch.py",
        '"config" in stored and not names.lookup("config").is_namespace()',
        '"config" in stored',
        "tests/test_launch.py -k a_config_is",
    ),
    Mutant(
        "train/launch.py",
        "env | variables_of(place)",
        "env",
        "tests/test_launch.py -k runs_as_by",
    ),
    Mutant(
        "train/launch.py",
        "(options.script or not",
        "(not",
        "tests/test_launch.py -k binds_config",
    ),
    Mutant(
        "decentjax/distributed/join.py",
        'hostname="127.0.0.1"',
        'hostname=""',
        "tests/test_trust.py -k listens",
    ),
    Mutant(
        "train/cli/config_json.py",
        "fields = json.loads(path.read_text())",
        "fields = eval(path.read_text(), dict(null=None, true=True, false=False))",
        "tests/test_trust.py -k evaluates_no_code",
    ),
    Mutant(
        "train/cli/command.py",
        "os.umask(os.umask(0o077) | 0o022)",
        "pass",
        "tests/test_trust.py -k owner_alone",
    ),
    Mutant(
        "train/run/folder.py",
        "    check_links(run_dir)\n",
        "",
        "tests/test_trust.py -k link",
    ),
    Mutant(
        "decentjax/gossip/peers.py",
        "return x + (y - x) / mass if is_mixed(x) else y",
        "return y",
        "tests/test_peers.py -k divided_by_the_mass",
    ),
    Mutant(
        "decentjax/gossip/ways.py",
        "exchange.factor * one.weights[worker]",
        "one.weights[worker]",
        "tests/test_peers.py -k numbers_of_awc",
    ),
    Mutant(
        "decentjax/gossip/ways.py",
        "came.get(peer, own)",
        "came.get(peer, [0 * x for x in own])",
        "tests/test_peers.py -k was_recorded",
    ),
    Mutant(
        "decentjax/gossip/ways.py",
        "Taken(peer, message.said.step, step))",
        "Taken(peer, message.said.step - 1, step))",
        "tests/test_peers.py -k was_recorded",
    ),
    Mutant(
        "decentjax/gossip/engine.py",
        "enabled = jnp.result_type(float) == jnp.float64",
        "enabled = False",
        "tests/test_gossip.py -k double_precision_holds",
    ),
    Mutant(
        "decentjax/gossip/carrier.py",
        "cpus[process].pop(0) for",
        "cpus[process].pop() for",
        "tests/test_gossip.py -k host_mesh_has_a_cpu",
    ),
    Mutant(
        "decentjax/gossip/stages.py",
        'check_rows({"state": state, "batch": batch}, mesh.size, hint)',
        "",
        "tests/test_gossip.py -k rows_that_are_missing",
    ),
    Mutant(
        "decentjax/gossip/all_reduce.py",
        "jax.block_until_ready(self._mean(grads))",
        "jax.block_until_ready(grads)",
        "tests/test_gossip.py -k all_reduce_gives_the_numbers",
    ),
    Mutant(
        "decentjax/gossip/staged.py",
        "        check_not_donated(state)\n        plan",
        "        plan",
        "tests/test_gossip.py -k a_state_that_was_given_up",
    ),
    Mutant(
        "decentjax/gossip/background.py",
        "        self._carrier._end(seconds)",
        "        pass",
        "tests/test_gossip.py -k a_closed_train_step",
    ),
    Mutant(
        "decentjax/gossip/engine.py",
        "        future.set_running_or_notify_cancel()",
        "",
        "tests/test_engine.py -k cannot_be_cancelled",
    ),
    Mutant(
        "decentjax/gossip/engine.py",
        "            del task, future, function, args",
        "",
        "tests/test_engine.py -k keeps_no_array_alive",
    ),
    Mutant(
        "decentjax/gossip/engine.py",
        "self._end(CLOSING_SECONDS if kind is None else FAILING_SECONDS)",
        "self._end(CLOSING_SECONDS)",
        "tests/test_engine.py -k after_an_error_nobody_waits",
    ),
    Mutant(
        "decentjax/gossip/engine.py",
        "            if self._closed:\n                raise",
        "            if False:\n                raise",
        "tests/test_engine.py -k nothing_can_follow",
    ),
    Mutant(
        "decentjax/gossip/engine.py",
        "                future.set_exception(self._error)\n                continue",
        "                pass",
        "tests/test_engine.py -k reaches_all_futures",
    ),
    Mutant(
        "decentjax/gossip/engine.py",
        "is_last = not self._users[self._engine]",
        "is_last = True",
        "tests/test_engine.py -k waits_for_its_work_and_ends_no_other",
    ),
    Mutant(
        "decentjax/gossip/engine.py",
        "engine is None or engine.failed or",
        "engine is None or",
        "tests/test_engine.py -k no_newcomer",
    ),
    Mutant(
        "decentjax/gossip/engine.py",
        "self._users[self._engine] -= not self._closed",
        "self._users[self._engine] -= 1",
        "tests/test_engine.py -k shared",
    ),
    Mutant(
        "decentjax/gossip/cut.py",
        "                if equation.effects:",
        "                if False:",
        "tests/test_cut.py -k side_effects_of_the_mixed",
    ),
    Mutant(
        "decentjax/gossip/cut.py",
        "with equation.ctx.manager:",
        "if equation.ctx:",
        "tests/test_cut.py -k noted_for_the_compiler",
    ),
    Mutant(
        "decentjax/gossip/stages.py",
        "    if group:\n        yield",
        "    if False:\n        yield",
        "tests/test_gossip.py -k where_groups_of_leaves_end",
    ),
    Mutant(
        "decentjax/gossip/tuning.py",
        "int(np.argmin(slowest",
        "int(np.argmax(slowest",
        "tests/test_tuning.py -k found_by_all_workers",
    ),
    Mutant(
        "decentjax/gossip/tuning.py",
        "if size is None or size < num_bytes]",
        "]",
        "tests/test_tuning.py -k no_pieces",
    ),
    Mutant(
        "decentjax/gossip/tuning.py",
        " and message_dtype is None:",
        ":",
        "tests/test_tuning.py -k narrow_messages_too",
    ),
    Mutant(
        "decentjax/runtime/schemes.py",
        "end = max(end, slowest) + seconds",
        "end = slowest + seconds",
        "tests/test_runtime.py -k a_step_of_all_reduce_has_its_closed_form",
    ),
    Mutant(
        "decentjax/runtime/schemes.py",
        "if (step + 1) % sync_every == 0:",
        "if step % sync_every == 0:",
        'tests/test_runtime.py -k "sync"',
    ),
    Mutant(
        "decentjax/runtime/schemes.py",
        "ready = start if hidden else start + compute",
        "ready = start + compute if hidden else start",
        "tests/test_runtime.py -k exchange_has_its_closed_form",
    ),
    Mutant(
        "decentjax/runtime/schemes.py",
        "finish(legs, job.model_bytes / num_buckets, begun, free)",
        "finish(legs, job.model_bytes, begun, free)",
        "tests/test_runtime.py -k background_is_that_of",
    ),
    Mutant(
        "decentjax/runtime/schemes.py",
        "models[there - 1].step",
        "models[0].step",
        "tests/test_runtime.py -k tick_by_tick",
    ),
    Mutant(
        "decentjax/runtime/schemes.py",
        "del models[:there]",
        "pass",
        "tests/test_runtime.py -k tick_by_tick",
    ),
    Mutant(
        "decentjax/runtime/schemes.py",
        "bisect.bisect_left(",
        "bisect.bisect_right(",
        "tests/test_runtime.py -k a_newer_model_replaces",
    ),
    Mutant(
        "decentjax/runtime/arrivals.py",
        "all(busy_until[card] <= now for card in cards)",
        "any(busy_until[card] <= now for card in cards)",
        "tests/test_runtime.py -k tick_by_tick",
    ),
    Mutant(
        "decentjax/runtime/arrivals.py",
        "Arrived(end + latency,",
        "Arrived(end,",
        "tests/test_runtime.py -k tick_by_tick",
    ),
    Mutant(
        "decentjax/runtime/arrivals.py",
        "waiting[model.sender, model.receiver] = model.step",
        "waiting.setdefault((model.sender, model.receiver), model.step)",
        "tests/test_runtime.py -k a_newer_model_replaces",
    ),
    Mutant(
        "decentjax/runtime/arrivals.py",
        "places = workers if inside else nodes",
        "places = nodes",
        "tests/test_runtime.py -k tick_by_tick",
    ),
    Mutant(
        "decentjax/runtime/schemes.py",
        "seconds / (len(self.start) - skipped)",
        "seconds / len(self.start)",
        "tests/test_runtime.py -k seconds_per_step",
    ),
    Mutant(
        "decentjax/runtime/cluster.py",
        "share * num_bytes / min(rates)",
        "share * num_bytes / max(rates)",
        "tests/test_runtime.py -k a_step_of_all_reduce_has_its_closed_form",
    ),
    Mutant(
        "decentjax/analysis.py",
        "_ring(groups, share / local, rounds)",
        "_ring(groups, share, rounds)",
        "tests/test_analysis.py -k one_exchange_sends",
    ),
    Mutant(
        "decentjax/runtime/cluster.py",
        "sent + rounds * kind.latency",
        "sent + kind.latency",
        "tests/test_runtime.py -k latencies_count_per",
    ),
    Mutant(
        "decentjax/runtime/cluster.py",
        "between_latency=self.between_latency * factor",
        "between_latency=self.between_latency / factor",
        "tests/test_advise.py -k as_long_as_it_was_measured",
    ),
    Mutant(
        "decentjax/runtime/sharing.py",
        "np.minimum(overlap, seconds[second])",
        "overlap",
        "tests/test_runtime.py -k two_on_a_card",
    ),
    Mutant(
        "decentjax/runtime/sharing.py",
        "end = clock + shortest * count",
        "end = clock + shortest",
        "tests/test_runtime.py -k share_their_card",
    ),
    Mutant(
        "decentjax/runtime/compute_times.py",
        "sigma**-2, seconds * sigma**2, num_workers",
        "sigma**-2, seconds * sigma, num_workers",
        "tests/test_runtime.py -k mean_and_deviation",
    ),
    Mutant(
        "decentjax/runtime/compute_times.py",
        "times[late] += seconds",
        "times[late] = seconds",
        'tests/test_runtime.py tests/test_advise.py -k "late_by or draws_differ"',
    ),
    Mutant(
        "decentjax/runtime/ratios.py",
        "float(drawn.var()) / mean**2",
        "float(drawn.var()) / mean",
        "tests/test_runtime.py -k three_ratios",
    ),
    Mutant(
        "decentjax/runtime/job.py",
        "default_rng((seed, step))",
        "default_rng(seed)",
        "tests/test_runtime.py -k draws_differ",
    ),
    Mutant(
        "decentjax/overlap/hlo.py",
        "BITS.get(self.dtype, 8) / 8",
        "BITS.get(self.dtype, 8)",
        "tests/test_overlap.py -k bytes_are_those_of_the_whole",
    ),
    Mutant(
        "decentjax/overlap/hlo.py",
        ".transpose(order)",
        "",
        "tests/test_overlap.py -k groups_run_along",
    ),
    Mutant(
        "decentjax/overlap/schedule.py",
        'passes = 2 if kind == "all-reduce" else 1',
        "passes = 1",
        "tests/test_overlap.py -k bytes_are_those_of_the_whole",
    ),
    Mutant(
        "decentjax/overlap/reader.py",
        "repeats = 1 / len(bodies)",
        "repeats = 1.0",
        "tests/test_overlap.py -k branches_of_a_conditional",
    ),
    Mutant(
        "decentjax/overlap/reader.py",
        "is_start and '\"is_sync\":true' not in instruction.attributes",
        "is_start",
        "tests/test_overlap.py -k a_start_that_blocks",
    ),
    Mutant(
        "decentjax/overlap/reader.py",
        "made -= sum(operands)",
        "made -= 0",
        "tests/test_overlap.py -k larger_side",
    ),
    Mutant(
        "decentjax/overlap/reader.py",
        "                self.unpaired.add(number)",
        "                pass",
        "tests/test_overlap.py -k what_has_no_end",
    ),
    Mutant(
        "decentjax/overlap/work.py",
        "2.0 * math.prod(made.dims) * inner",
        "math.prod(made.dims) * inner",
        "tests/test_overlap.py -k flops_are_those_of_the_matmuls",
    ),
    Mutant(
        "decentjax/overlap/work.py",
        "Work(flops, 2 * operands[1].num_bytes)",
        "Work(flops, 2 * operands[0].num_bytes)",
        "tests/test_overlap.py -k bytes_are_those_that_are_read",
    ),
    Mutant(
        "decentjax/overlap/estimate.py",
        "            link /= self.links_per_node",
        "            pass",
        "tests/test_overlap.py -k a_device_alone_has_one",
    ),
    Mutant(
        "decentjax/overlap/estimate.py",
        "max(compute, moving, self.least_seconds)",
        "max(compute + moving, self.least_seconds)",
        "tests/test_overlap.py -k longest_of_compute",
    ),
    Mutant(
        "decentjax/overlap/estimate.py",
        "            self._network = network",
        "",
        "tests/test_overlap.py -k after_a_conditional",
    ),
    Mutant(
        "train/config.py",
        'if step.algorithm != "awc" and way',
        'if step.algorithm == "atc" and way',
        "tests/test_peer_job.py -k takes_collectives",
    ),
    Mutant(
        "train/config.py",
        "if exchange.workers_per_node > 1 or not can_send:",
        "if not can_send:",
        "tests/test_peer_job.py -k takes_collectives",
    ),
    Mutant(
        "train/job/peers.py",
        "own = range(place.process_id * count, (place.process_id + 1) * count)",
        "own = range(count)",
        "tests/test_peer_job.py -k place_is_slurms",
    ),
    Mutant(
        "train/job/peers.py",
        "return peer_place(config)[:2]",
        "return 0, 1",
        "tests/test_peer_job.py -k process_is_late",
    ),
    Mutant(
        "decentjax/distributed/devices.py",
        'jax.config.update("jax_cuda_visible_devices", visible)',
        "pass",
        "tests/test_peer_job.py -k devices_given",
    ),
    Mutant(
        "train/run/peers.py",
        "    if find_checkpoints(run_dir).steps:",
        "    if False:",
        "tests/test_peer_job.py -k another_kind",
    ),
    Mutant(
        "train/run/peers.py",
        "        if count != place.num_processes:",
        "        if False:",
        "tests/test_peer_job.py -k share_one_config",
    ),
    Mutant(
        "train/run/peers.py",
        "if k not in OWN}",
        "}",
        "tests/test_peer_job.py -k share_what_is_trained",
    ),
    Mutant(
        "train/run/peers.py",
        "math.inf if exchange.patience is None else exchange.patience",
        "exchange.patience or 0",
        "tests/test_peer_job.py -k simulated_workers",
    ),
    Mutant(
        "train/run/peers.py",
        "[x for x in exchange.addresses for _ in place.workers]",
        "exchange.addresses",
        "tests/test_peer_job.py -k stopped_run",
    ),
    Mutant(
        "train/run/peers.py",
        'if int(row.split(",")[0]) < start]',
        "if True]",
        "tests/test_peer_job.py -k stays_known",
    ),
    Mutant(
        "train/run/peers.py",
        "one.step - model.step for one",
        "model.step - one.step for one",
        "tests/test_peer_job.py -k stays_known",
    ),
    Mutant(
        "train/run/peers.py",
        "counting = optax.ScaleByScheduleState | WatchState",
        "counting = WatchState",
        "tests/test_peer_job.py -k schedule_is_at",
    ),
    Mutant(
        "train/run/peers.py",
        "        if alive != self._alive:",
        "        if self._alive is None:",
        "tests/test_peer_job.py -k killed_process",
    ),
    Mutant(
        "train/run/peers.py",
        "set(self._peers.refused.values()) - self._refused",
        "set(self._peers.refused.values())",
        "tests/test_peer_job.py -k another_config_is_named",
    ),
    Mutant(
        "train/run/loop.py",
        "(resume or Resume()) if was_saved else None",
        "resume",
        "tests/test_peer_job.py -k process_alone",
    ),
    Mutant(
        "train/run/loop.py",
        "or config.exchange.elastic) and begin.step <= last:",
        "or config.exchange.elastic):",
        "tests/test_peer_job.py -k process_alone",
    ),
    Mutant(
        "train/run/peers.py",
        "    if step is None:\n        how",
        "    if step:\n        how",
        "tests/test_peer_job.py -k process_alone",
    ),
    Mutant(
        "train/run/loop.py",
        "build_check(mesh, first)",
        "build_check(mesh)",
        "tests/test_peer_job.py -k names_the_worker",
    ),
    Mutant(
        "train/run/finite.py",
        "rows = _rows(watch.step, first_worker)",
        "rows = _rows(watch.step, 0)",
        "tests/test_peer_job.py -k names_the_worker",
    ),
    Mutant(
        "train/run/observe.py",
        "(first + i, one) for i",
        "(i, one) for i",
        "tests/test_peer_job.py -k evaluation_has",
    ),
    Mutant(
        "train/cli/command.py",
        "wrong and not network and not where",
        "wrong and not network",
        "tests/test_cli.py -k no_restart_mends",
    ),
    Mutant(
        "train/cli/command.py",
        "wrong and not network and not where",
        "wrong and not where",
        "tests/test_cli.py -k no_restart_mends",
    ),
    Mutant(
        "train/job/processes.py",
        "known = first != name and",
        "known = first == name and",
        "tests/test_launch.py -k several_processes_have",
    ),
    Mutant(
        "train/job/processes.py",
        "if name.isdecimal()), default=None)",
        'if "part" not in name), default=None)',
        "tests/test_launch.py -k gives_up_says",
    ),
    Mutant(
        "train/job/processes.py",
        "if again and (step := _newest_step(ended.folder)):",
        "if step := _newest_step(ended.folder):",
        "tests/test_launch.py -k gives_up_says",
    ),
    Mutant(
        "train/launch.py",
        "if code == 0 and count > 1 and not asked.exists():",
        "if code == 0 and not asked.exists():",
        "tests/test_launch.py -k knows_its_place",
    ),
    Mutant(
        "decentjax/distributed/place.py",
        "        if asked := os.environ.get(ASKED):\n            Path(asked).touch()\n",
        "",
        "tests/test_initialize.py -k finds_its_place",
    ),
    Mutant(
        "train/advise/setting.py",
        "assumed = self.sigma is None and",
        "assumed = self.sigma == SIGMA and",
        "tests/test_advise.py -k spread_that_nobody_gave",
    ),
    Mutant(
        "configs/cluster.sbatch",
        "if $ends; then kill -TERM",
        "if false; then kill -TERM",
        "tests/test_launch.py -k slurm_queues",
    ),
    Mutant(
        "train/run/scores.py",
        "return min(self.steps)",
        "return max(self.steps)",
        "tests/test_peer_job.py -k evaluation_has",
    ),
    Mutant(
        "train/run/timeline.py",
        'paths = [*run_dir.glob(FILES), *run_dir.glob(f"process-*/{FILES}")]',
        "paths = [*run_dir.glob(FILES)]",
        "tests/test_peer_job.py -k page_draws",
    ),
    Mutant(
        "train/report.py",
        "    parts = [part for run in runs for part in run.parts()]\n    sections",
        "    parts = runs\n    sections",
        "tests/test_peer_job.py -k page_draws",
    ),
    Mutant(
        "train/run/manifest.py",
        "        sync(path)\n",
        "        pass\n",
        "tests/test_checkpoint.py -k power_cut",
    ),
    Mutant(
        "train/run/checkpoint.py",
        "            sync(self._folder)",
        "            pass",
        "tests/test_checkpoint.py -k power_cut",
    ),
    Mutant(
        "train/run/trace.py",
        "    if headline not in scores:",
        "    if not headline:",
        'tests/test_own_task.py -k "broken and headline"',
    ),
    Mutant(
        "train/run/trace.py",
        "isinstance(batches, Iterator)",
        "isinstance(batches, set)",
        'tests/test_own_task.py -k "broken and iterator"',
    ),
    Mutant(
        "train/run/trace.py",
        "metrics.keys() & {*COLUMNS, task.amount.unit + PER_SECOND}",
        "metrics.keys() & COLUMNS",
        'tests/test_own_task.py -k "broken and metric"',
    ),
    Mutant(
        "train/run/trace.py",
        "(jnp.result_type(x), len(x.shape))",
        "len(x.shape)",
        'tests/test_own_task.py -k "broken and dtype"',
    ),
    Mutant(
        "train/run/trace.py",
        "typical[0][0] == first[0][0]",
        "typical[0][0] != first[0][0]",
        "tests/test_own_task.py -k typical_batch",
    ),
    Mutant(
        "train/run/build.py",
        "    if not isinstance(steps, grain.MapDataset):",
        "    if steps is None:",
        'tests/test_own_task.py -k "broken and form"',
    ),
    Mutant(
        "train/tasks/task.py",
        'headline.better not in ("lower", "higher")',
        "not headline.better",
        'tests/test_own_task.py -k "broken and up"',
    ),
    Mutant(
        "train/config.py",
        "    if count % size:",
        "    if count < size:",
        "tests/test_wrong.py -k wrong_command",
    ),
    Mutant(
        "train/cli/tables.py",
        "'s' * (number != 1)",
        "'s' * (number > 1)",
        "tests/test_tables.py -k one_thing",
    ),
    Mutant(
        "train/run/resume.py",
        "next(changes(*trained))",
        "next(changes(saved, now))",
        "tests/test_resume.py -k what_trains_otherwise",
    ),
    Mutant(
        "train/config.py",
        '(f\'exchange.way to "{other}", \' if other else "")',
        "f'exchange.way to \"{other}\", '",
        "tests/test_peer_job.py -k takes_collectives",
    ),
    Mutant(
        "train/config.py",
        "if not used and getattr(self, name)",
        "if used is None and getattr(self, name)",
        "tests/test_train_rounds.py -k no_sense",
    ),
    Mutant(
        "train/run/rounds.py",
        "steps > config.num_steps:",
        "steps < config.num_steps:",
        "tests/test_train_rounds.py -k longer_than_the_run",
    ),
    Mutant(
        "train/run/build.py",
        """    if config.exchange.where == "background":
        raise""",
        """    if config.exchange.where == "nowhere":
        raise""",
        "tests/test_wrong.py -k wrong_command",
    ),
    Mutant(
        "train/cli/trust.py",
        'one.endswith(".py") and not Path(one).is_file()',
        'one.endswith(".py") and Path(one).is_file()',
        "tests/test_own_task.py -k 40_lines",
    ),
    Mutant(
        "train/launch.py",
        'not in (None, "peers")',
        'not in (None, "peers", "background")',
        "tests/test_launch.py -k bad_input",
    ),
    Mutant(
        "train/advise/race.py",
        "options |= {name: new for name, _, new in found}",
        "options |= {name: old for name, old, _ in found}",
        "tests/test_advise_race.py -k command_of_the_first",
    ),
    Mutant(
        "train/advise/__main__.py",
        """        contenders = read_race(race)
        out.mkdir""",
        """        contenders = read_race(None)
        out.mkdir""",
        "tests/test_wrong.py -k wrong_command",
    ),
    Mutant(
        "train/run/stop.py",
        "                    _LIBC.signal(number, signal.SIG_DFL.value)",
        "                    pass",
        "tests/test_stop.py -k runs_no_handler",
    ),
    Mutant(
        "train/job/processes.py",
        "if abort := _ABORT.search(line):",
        "if abort := None:",
        "tests/test_launch.py -k page_of_a",
    ),
    Mutant(
        "train/launch.py",
        "pool.submit(are_peers, rest)",
        "pool.submit(bool, rest)",
        "tests/test_launch.py -k asked_before",
    ),
    Mutant(
        "train/job/processes.py",
        "elif self._running and code not in (1, 2):",
        "elif self._running:",
        "tests/test_peer_job.py -k where_one_fails",
    ),
    Mutant(
        "train/job/processes.py",
        "        if not self._are_peers():\n",
        "        if True:\n",
        "tests/test_peer_job.py -k where_one_fails",
    ),
    Mutant(
        "train/launch.py",
        'return fields["exchange"]["where"] == "peers"',
        "return False",
        "tests/test_peer_job.py -k launcher_knows",
    ),
    Mutant(
        "train/config.py",
        "config.optimizer.warmup_steps >= config.num_steps",
        "config.optimizer.warmup_steps > config.num_steps",
        "tests/test_train.py -k an_impossible_config",
    ),
    Mutant(
        "train/config.py",
        "(self.coordinator, count, own) != (None, None, None)",
        "False",
        "tests/test_distributed.py -k a_place_in_a_job",
    ),
    Mutant(
        "train/config.py",
        "topologies.damped(topology, self.factor)",
        "topology",
        "tests/test_train.py -k an_impossible_config",
    ),
    Mutant(
        "train/fields.py",
        "    if isinstance(value, bool):  # bool is a subclass of int.",
        "    if False:",
        "tests/test_cli.py -k no_field_holds",
    ),
    Mutant(
        "train/fields.py",
        "isinstance(value, int) and abs(value) <= LARGEST_INT",
        "isinstance(value, int)",
        "tests/test_cli.py -k numbers_that_jax_would_cut",
    ),
    Mutant(
        "train/cli/config_json.py",
        "return tuple(map(_as_tuple, x)) if isinstance(x, list) else x",
        "return x",
        'tests/test_cli.py tests/test_tasks.py -k "config and comes_back or '
        'read_as_it_was"',
    ),
    Mutant(
        "train/cli/config_json.py",
        "for key in {**old, **new}:",
        "for key in old:",
        "tests/test_train.py -k differences_name",
    ),
    Mutant(
        "train/cli/command.py",
        "INTERRUPTED, CLOSED = 130, 141",
        "INTERRUPTED, CLOSED = 1, 1",
        "tests/test_cli.py -k ctrl_c",
    ),
    Mutant(
        "train/cli/command.py",
        "                sys.stdout.flush()  # Here",
        "                pass  # Here",
        'tests/test_cli.py -k "closed or full_output"',
    ),
    Mutant(
        "train/cli/command.py",
        'if name.partition(".")[0] in OURS:',
        "if False:",
        "tests/test_cli.py -k a_bug_of_ours",
    ),
    Mutant(
        "train/cli/load.py",
        "except BaseException as error:  # Also sys.exit()",
        "except Exception as error:  # Also sys.exit()",
        "tests/test_cli.py -k a_config_that_ends",
    ),
    Mutant(
        "train/cli/command.py",
        "    raise SystemExit(2)",
        "    raise SystemExit(0)",
        "tests/test_cli.py -k ends_with_code_2",
    ),
    Mutant(
        "train/run/build.py",
        "loss_fn=poison_gradient(task.loss_fn)",
        "loss_fn=task.loss_fn",
        'tests/test_resume.py -k "named_and_never_saved and loss"',
    ),
    Mutant(
        "train/run/optimizers.py",
        "optax.chain(*steps, make(schedule, **named))",
        "optax.chain(*steps[1:], make(schedule, **named), steps[0])",
        'tests/test_resume.py -k "named_and_never_saved and gradient"',
    ),
    Mutant(
        "train/run/optimizers.py",
        "x.ndim >= 2",
        "x.ndim >= 1",
        "tests/test_train.py -k weight_decay_spares",
    ),
    Mutant(
        "train/run/optimizers.py",
        "decay_steps=num_steps",
        "decay_steps=num_steps - config.warmup_steps",
        "tests/test_train.py -k the_schedule_warms_up",
    ),
    Mutant(
        "train/run/build.py",
        "    _check_same_kind(model, jax.eval_shape(task.init, model_key))",
        "",
        "tests/test_resume.py -k begins_with_the_mean_model",
    ),
    Mutant(
        "train/run/optimizers.py",
        "if config.clip_norm is not None:",
        "if config.clip_norm is None:",
        "tests/test_tasks.py -k without_a_clip_norm",
    ),
    Mutant(
        "train/run/build.py",
        '        "message_dtype": config.step.message_dtype,\n        "exchange_mesh',
        '        "exchange_mesh',
        "tests/test_train.py -k dtype_of_the_config",
    ),
    Mutant(
        "train/run/build.py",
        "mix, axis_name=AXIS, message_dtype=dtype",
        "mix, axis_name=AXIS",
        "tests/test_preflight.py -k half_precision_message",
    ),
    Mutant(
        "train/run/finite.py",
        "is_first = is_wrong & (state.last != state.count)",
        "is_first = wrong.any()",
        'tests/test_resume.py -k "named_and_never_saved and batch"',
    ),
    Mutant(
        "train/run/finite.py",
        "jnp.isfinite(x).all() for x in leaves",
        "jnp.isfinite(x).any() for x in leaves",
        "tests/test_resume.py -k one_number",
    ),
    Mutant(
        "train/run/finite.py",
        "jnp.where(is_first, jnp.argmax(wrong).astype(jnp.int32), state.leaf)",
        "jnp.where(is_first, jnp.argmin(wrong).astype(jnp.int32), state.leaf)",
        'tests/test_resume.py -k "named_and_never_saved and gradient"',
    ),
    Mutant(
        "train/run/finite.py",
        "rows |= {first + i: row",
        "rows |= {i: row",
        "tests/test_resume.py -k on_a_mesh_the_worker",
    ),
    Mutant(
        "train/run/stop.py",
        "at = min(at, time.monotonic() + REPEAT_SECONDS)",
        "at = min(at, time.monotonic())",
        "tests/test_stop.py -k twice_at_once",
    ),
    Mutant(
        "train/run/stop.py",
        "if signal.getsignal(s) != signal.SIG_IGN",
        "if s",
        "tests/test_stop.py -k ignored_stays",
    ),
    Mutant(
        "train/run/stop.py",
        "({signal.SIGTERM} if self._in_job else set())",
        "set()",
        "tests/test_distributed.py -k a_signal_to_one",
    ),
    Mutant(
        "train/run/stop.py",
        "signal.SIG_DFL if handler is None else handler",
        "signal.SIG_DFL",
        "tests/test_stop.py -k twice_at_once",
    ),
    Mutant(
        "train/run/stop.py",
        "        raise Stopped",
        "        pass",
        'tests/test_stop.py -k "results_are_shown and 15"',
    ),
    Mutant(
        "train/run/folder.py",
        "            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)",
        "            pass",
        "tests/test_stop.py -k is_locked_until",
    ),
    Mutant(
        "train/cli/tables.py",
        "    part.write_text(text)\n    part.replace(path)",
        "    path.write_text(text)",
        "tests/test_stop.py -k whole_or_as_it_was",
    ),
    Mutant(
        "train/run/folder.py",
        '        raise SaveError(f"{path} could not be written: '
        '{error.strerror}") from error',
        "        pass",
        "tests/test_stop.py -k rows_that_cannot",
    ),
    Mutant(
        "train/run/log.py",
        'if row["step"] <= after]',
        'if row["step"] < after]',
        "tests/test_resume.py -k goes_on_with_its_own_config",
    ),
    Mutant(
        "train/run/log.py",
        "[_row(line) for line in lines]",
        "list(iter(map(_row, lines).__next__, None))",
        "tests/test_resume.py -k broken_rows",
    ),
    Mutant(
        "train/run/log.py",
        "self._seconds_before + time",
        "time",
        "tests/test_resume.py -k goes_on_with_its_own_config",
    ),
    Mutant(
        "train/run/log.py",
        "self.closed = self.quiet = True",
        "self.quiet = True",
        "tests/test_stop.py -k output_that_is_closed",
    ),
    Mutant(
        "train/run/loop.py",
        "        checkpoints.check()",
        "",
        "tests/test_resume.py -k failed_save",
    ),
    Mutant(
        "train/run/loop.py",
        "observer.log is not None and observer.log.closed",
        "False",
        "tests/test_stop.py -k output_that_is_closed",
    ),
    Mutant(
        "train/run/loop.py",
        "end = stop.poll() or step == config.num_steps",
        "end = stop.poll()",
        "tests/test_train.py -k leaves_its_config",
    ),
    Mutant(
        "train/run/loop.py",
        "save = end or evaluate or step",
        "save = end or step",
        "tests/test_resume.py -k evaluated_is_saved",
    ),
    Mutant(
        "train/run/loop.py",
        "                train_step.settle()\n                check",
        "                check",
        "tests/test_resume.py -k is_settled_checked",
    ),
    Mutant(
        "train/run/loop.py",
        "            check_gradients(state, first)",
        "",
        'tests/test_resume.py -k "named_and_never_saved and gradient"',
    ),
    Mutant(
        "train/run/loop.py",
        "                train_step.settle()\n                check(state, step)",
        "                train_step.settle()",
        "tests/test_resume.py -k of_finite_gradients",
    ),
    Mutant(
        "train/run/observe.py",
        "            if stop.poll():\n                raise Stopped",
        "            if False:\n                raise Stopped",
        'tests/test_stop.py -k "signal_in_an_evaluation and 15"',
    ),
    Mutant(
        "train/run/observe.py",
        "float(self._schedule(step - 1))",
        "float(self._schedule(step))",
        "tests/test_train.py -k leaves_its_config",
    ),
    Mutant(
        "train/run/straggler.py",
        "step % num_processes == process",
        "step % num_processes != process",
        "tests/test_distributed.py -k a_rotating_straggler",
    ),
    Mutant(
        "train/run/observe.py",
        "        self._num_skipped = self._num_counted = 0\n        self._means.put",
        "        self._means.put",
        "tests/test_resume.py -k skipped_is_in",
    ),
    Mutant(
        "train/run/checkpoint.py",
        "if path.is_symlink() or not path.is_dir():",
        "if not path.is_dir():",
        "tests/test_resume.py -k strays",
    ),
    Mutant(
        "train/run/checkpoint.py",
        "    if path.name != str(step):",
        "    if False:",
        "tests/test_resume.py -k strays",
    ),
    Mutant(
        "train/run/checkpoint.py",
        "exist_ok=True)\n            self._drop_unfinished()",
        "exist_ok=True)",
        "tests/test_resume.py -k half_written",
    ),
    Mutant(
        "train/run/checkpoint.py",
        "[: -self._num_kept]",
        "[self._num_kept :]",
        "tests/test_train.py -k leaves_its_config",
    ),
    Mutant(
        "train/run/checkpoint.py",
        "        waiting.join(seconds)",
        "",
        "tests/test_resume.py -k after_an_error_the_last",
    ),
    Mutant(
        "train/run/checkpoint.py",
        "        if kind is None:\n            self.wait()\n            return",
        "        if kind is None:\n            return",
        "tests/test_train.py -k leaves_its_config",
    ),
    Mutant(
        "train/run/checkpoint.py",
        "            self._writer.check_for_errors()",
        "            pass",
        "tests/test_resume.py -k failed_save",
    ),
    Mutant(
        "train/run/checkpoint.py",
        "    if wanted.shape != got.shape:",
        "    if False:",
        "tests/test_evaluate.py -k checkpoint_of_another_model",
    ),
    Mutant(
        "train/run/checkpoint.py",
        "list(found.steps)[::-1]",
        "list(found.steps)",
        "tests/test_resume.py -k goes_on_with_its_own_config",
    ),
    Mutant(
        "train/run/checkpoint.py",
        "if other > step]",
        "if other >= step]",
        "tests/test_resume.py -k from_an_earlier_step",
    ),
    Mutant(
        "train/run/resume.py",
        "    if refused:",
        "    if False:",
        "tests/test_resume.py -k what_trains_otherwise",
    ),
    Mutant(
        "train/run/resume.py",
        '    "task.num_eval_windows",',
        "",
        "tests/test_train.py -k resumes_to_nothing",
    ),
    Mutant(
        "train/run/resume.py",
        "            check(restored, step)",
        "",
        "tests/test_resume.py -k not_gone_on_with",
    ),
    Mutant(
        "train/run/resume.py",
        "    if found.steps:",
        "    if False:",
        "tests/test_resume.py -k a_folder_with_a_run",
    ),
    Mutant(
        "train/run/resume.py",
        "make_state(trained.mean())",
        "make_state(trained.worker(0))",
        "tests/test_resume.py -k begins_with_the_mean_model",
    ),
    Mutant(
        "train/run/resume.py",
        "if jax.process_count() > 1 or step == steps[-1]:",
        "if jax.process_count() > 1:",
        "tests/test_resume.py -k where_all_are_broken",
    ),
    Mutant(
        "train/run/resume.py",
        'if now["num_steps"] > saved["num_steps"]:',
        'if now["num_steps"] != saved["num_steps"]:',
        "tests/test_resume.py -k a_shorter_run",
    ),
    Mutant(
        "train/run/scores.py",
        "if not 0 <= number < num_workers:",
        "if not 0 <= number <= num_workers:",
        "tests/test_evaluate.py -k bad_input",
    ),
    Mutant(
        "train/__main__.py",
        "raise SystemExit(code) from error",
        "raise SystemExit(1) from error",
        "tests/test_resume.py -k ends_with_its_own_code",
    ),
    Mutant(
        "train/__main__.py",
        "if outcome.step < config.num_steps:",
        "if outcome.step <= config.num_steps:",
        "tests/test_resume.py -k the_command_line_goes_on",
    ),
    Mutant(
        "train/run/observe.py",
        "counted / seconds",
        "counted",
        "tests/test_log.py -k throughput_is",
    ),
    Mutant(
        "train/run/facts.py",
        "whole = dataclasses.replace(config.step, num_micro_batches=1)",
        "whole = config.step",
        "tests/test_log.py -k flops_are",
    ),
    Mutant(
        "train/run/facts.py",
        "write_json(run_dir / FACTS, facts | kept)",
        "write_json(run_dir / FACTS, facts)",
        "tests/test_log.py -k says_what_it_is",
    ),
    Mutant(
        "train/run/sinks.py",
        "            dropped.set()\n",
        "",
        "tests/test_log.py -k is_behind",
    ),
    Mutant(
        "train/run/sinks.py",
        "found is None or found.origin is None",
        "found is None",
        "tests/test_log.py -k missing_package",
    ),
    Mutant(
        "train/run/sinks.py",
        "        put(end)\n",
        "        put(None)\n",
        "tests/test_log.py -k has_failed",
    ),
    Mutant(
        "train/run/profile.py",
        "        if running:  # The last",
        "        if False:  # The last",
        "tests/test_log.py -k traces_the_rest",
    ),
    Mutant(
        "train/config.py",
        "return range(int(first), int(last))",
        "return range(int(first), int(last) + 1)",
        "tests/test_log.py -k trace_has_the_steps",
    ),
    Mutant(
        "train/run/timeline.py",
        "return next(undisturbed, window(later[0]))",
        "return window(later[0])",
        "tests/test_report.py -k avoids_evaluations",
    ),
    Mutant(
        "train/cli/config_json.py",
        'json.loads(json.dumps(_defaults(Config) | {"task": task}))',
        "json.loads(json.dumps(_defaults(Config)))",
        "tests/test_report.py -k says_how_the_run_was_made",
    ),
    Mutant(
        "train/cli/config_json.py",
        "return {**fields, **inner, **missing}",
        "return {**fields, **missing}",
        "tests/test_resume.py -k earlier_version",
    ),
    Mutant(
        "train/report.py",
        "run.evaluations()[-1:]:",
        "run.evaluations()[:1]:",
        "tests/test_report.py -k a_page_of_two_runs",
    ),
    Mutant(
        "train/run/history.py",
        "    if not rows and not processes:\n        raise",
        "    if False:\n        raise",
        "tests/test_report.py -k a_folder_without_a_run",
    ),
    Mutant(
        "train/run/history.py",
        "return [row[against] for row in rows], [",
        'return [row["step"] for row in rows], [',
        "tests/test_report.py -k a_curve_is_over",
    ),
    Mutant(
        "train/run/outcome.py",
        "lambda step, words: report(before + step, words)",
        "report",
        "tests/test_compare.py -k few_at_once",
    ),
    Mutant(
        "train/run/outcome.py",
        "or {name: found.get(name) for name in wanted} != wanted:",
        "or False:",
        "tests/test_compare.py -k written_kept",
    ),
    Mutant(
        "train/compare.py",
        '"lower" if "loss" in score else "higher"',
        '"higher" if "loss" in score else "lower"',
        "tests/test_compare.py -k lower_training_loss",
    ),
    Mutant(
        "train/run/comparison.py",
        "np.arange(len(order), 0, -1)",
        "np.arange(1, len(order) + 1)",
        "tests/test_compare.py -k p_values_are_corrected",
    ),
    Mutant(
        "train/run/comparison.py",
        "is_paired = a.draws == b.draws",
        "is_paired = True",
        "tests/test_compare.py -k tested_in_pairs",
    ),
    Mutant(
        "train/run/comparison.py",
        "(test.difference > 0) == (headline",
        "(test.difference > 0) != (headline",
        "tests/test_compare.py -k a_clear_difference",
    ),
    Mutant(
        "train/run/comparison.py",
        "np.std(values, ddof=1)",
        "np.std(values)",
        "tests/test_compare.py -k two_standard_deviations",
    ),
    Mutant(
        "train/run/seeds.py",
        "place = policy(step - 1, (step - 1) / options.epoch_steps)",
        "place = policy(step, (step - 1) / options.epoch_steps)",
        "tests/test_compare.py -k seeds_together",
    ),
    Mutant(
        "train/run/seeds.py",
        "10 * step > 9 * self._num_steps",
        "10 * step >= 9 * self._num_steps",
        "tests/test_compare.py -k last_tenth",
    ),
    Mutant(
        "train/run/seeds.py",
        "if not np.isfinite(values).all():",
        "if False:",
        "tests/test_compare.py -k a_loss_that_is_not_finite",
    ),
    Mutant(
        "train/run/timeline.py",
        "if span.step < start]",
        "if span.step <= start]",
        "tests/test_report.py -k dropped_from_the_timelines",
    ),
    Mutant(
        "train/run/timeline.py",
        '"ts": (span.start - start) * 1e6',
        '"ts": (span.start - start) * 1e3',
        "tests/test_report.py -k a_timeline_of_any_length",
    ),
    Mutant(
        "train/run/timeline.py",
        "(sent, sent + exchange)",
        "(start, start + exchange)",
        "tests/test_report.py -k simulated_exchanges_begin",
    ),
    Mutant(
        "train/data/batches.py",
        "(int(index) * row.every + row.first) * size",
        "int(index) * row.every * size",
        "tests/test_train.py -k workers_share_no_example",
    ),
    Mutant(
        "train/data/batches.py",
        "default_rng((*row.seeds, place))",
        "default_rng(place)",
        "tests/test_batches.py -k draws_are_fixed",
    ),
    Mutant(
        "train/data/batches.py",
        "row.examples[place + num_bad]",
        "row.examples[place]",
        "tests/test_batches.py -k replaces_an_unreadable",
    ),
    Mutant(
        "train/data/batches.py",
        "int(np.random.SeedSequence(seed).generate_state(1)[0])",
        "seed",
        "tests/test_batches.py -k seeds_in_a_row",
    ),
    Mutant(
        "train/data/batches.py",
        "        self.close()\n        self._next_step = step",
        "        self._next_step = step",
        "tests/test_train.py -k depend_on_seed",
    ),
    Mutant(
        "train/data/by_length.py",
        "        waiting[above] += rest",
        "",
        "tests/test_translation_data.py -k what_fills_no_step",
    ),
    Mutant(
        "train/data/by_length.py",
        "filled[np.arange(len(rows)), lengths] = END",
        "pass",
        "tests/test_translation_data.py -k each_pass_gives",
    ),
    Mutant(
        "train/data/by_length.py",
        "steps[-1] = -(-waiting[-1] // pairs_per_step[-1])",
        "steps[-1] = waiting[-1] // pairs_per_step[-1]",
        'tests/test_translation_data.py -k "few_pairs or each_pass_gives"',
    ),
    Mutant(
        "train/data/token_files.py",
        "(len(self._text) - 1) // self._length",
        "len(self._text) // self._length",
        "tests/test_text_data.py -k windows_have",
    ),
    Mutant(
        "train/data/token_files.py",
        "if largest >= vocabulary:",
        "if largest > vocabulary:",
        "tests/test_text_data.py -k token_that_the_model_does_not_know",
    ),
    Mutant(
        "train/data/token_files.py",
        "np.array([*row, between], np.uint16)",
        "np.array(row, np.uint16)",
        "tests/test_text_data.py -k all_documents",
    ),
    Mutant(
        "train/data/images.py",
        "crop[:, ::-1] if",
        "crop[::-1] if",
        "tests/test_image_data.py -k the_random_crop",
    ),
    Mutant(
        "train/data/digit_images.py",
        "random.integers(0, 3)",
        "random.integers(0, 2)",
        "tests/test_image_data.py -k a_shifted_digit",
    ),
    Mutant(
        "train/data/imagenet_files.py",
        "np.full(self.rows, NO_LABEL, np.int32)",
        "np.zeros(self.rows, np.int32)",
        "tests/test_image_data.py -k validation_has_each_image",
    ),
    Mutant(
        "train/data/files.py",
        "    if size % width:",
        "    if False:",
        "tests/test_text_data.py -k missing_or_cut_off",
    ),
    Mutant(
        "train/data/files.py",
        "    finally:\n        shutil",
        "    except KeyError:\n        shutil",
        "tests/test_text_data.py -k leaves_nothing",
    ),
    Mutant(
        "train/data/pairs.py",
        "side[: max_tokens - 1] for side in pair",
        "side[:max_tokens] for side in pair",
        'tests/test_translation_data.py -k "corpus"',
    ),
    Mutant(
        "train/data/pairs.py",
        "(parts[side].offsets[1:] + ends[side])",
        "parts[side].offsets[1:]",
        "tests/test_translation_data.py -k same_in_memory",
    ),
    Mutant(
        "train/models/resnet.py",
        "stride = 2 if stage and i == 0 else 1",
        "stride = 2 if i == 0 else 1",
        "tests/test_resnet.py -k logits_are_those_of_the_peers",
    ),
    Mutant(
        "train/models/resnet.py",
        "scale[...] = jnp.zeros_like(scale[...])",
        "pass",
        "tests/test_resnet.py -k zero_init",
    ),
    Mutant(
        "train/models/resnet.py",
        "use_running_average=not train",
        "use_running_average=train",
        "tests/test_resnet.py -k running_statistics",
    ),
    Mutant(
        "train/models/gpt.py",
        "config.init_std / (2 * config.num_layers) ** 0.5",
        "config.init_std",
        "tests/test_train.py -k golden",
    ),
    Mutant(
        "train/models/gpt.py",
        "approximate=True",
        "approximate=False",
        "tests/test_gpt.py -k of_transformers",
    ),
    Mutant(
        "train/models/gpt.py",
        "        q, k, v = (",
        "        k, q, v = (",
        "tests/test_gpt.py -k equations",
    ),
    Mutant(
        "train/models/transformer.py",
        "self.tokens(tokens_BxT) * width**0.5",
        "self.tokens(tokens_BxT)",
        "tests/test_transformer.py -k logits_are_those_of_torch",
    ),
    Mutant(
        "train/models/transformer.py",
        "[np.sin(angles), np.cos(angles)]",
        "[np.cos(angles), np.sin(angles)]",
        "tests/test_transformer.py -k logits_are_those_of_torch",
    ),
    Mutant(
        "train/models/transformer.py",
        "jnp.full_like(cache.source_lengths, position + 1)",
        "jnp.full_like(cache.source_lengths, position)",
        "tests/test_transformer.py -k token_by_token",
    ),
    Mutant(
        "train/models/beam.py",
        "_penalty(search, position + 1)",
        "_penalty(search, position)",
        "tests/test_beam.py -k exhaustive",
    ),
    Mutant(
        "train/models/beam.py",
        "jax.tree.map(lambda leaf: leaf[parent_N], cache)",
        "cache",
        "tests/test_beam.py -k few_beams",
    ),
    Mutant(
        "train/models/beam.py",
        "state.running.scores.max(axis=1) / _penalty(search, search.max_lengths)",
        "state.running.scores.max(axis=1)",
        "tests/test_beam.py -k the_penalty_prefers",
    ),
    Mutant(
        "train/models/attention.py",
        "is_causal=lengths_B is None",
        "is_causal=False",
        "tests/test_attention.py -k causal",
    ),
    Mutant(
        "train/tasks/translation.py",
        "jnp.mean(nats, where=there)",
        "jnp.mean(nats)",
        "tests/test_tasks.py -k ignores_padding",
    ),
    Mutant(
        "train/tasks/translation.py",
        "model.context < corpus.max_tokens + decoding.extra_tokens",
        "model.context < corpus.max_tokens",
        "tests/test_tasks.py -k does_not_fit_the_corpus",
    ),
    Mutant(
        "train/tasks/classification.py",
        "jnp.sum, where=counted",
        "jnp.sum",
        "tests/test_tasks.py -k scores_count_hits",
    ),
    Mutant(
        "train/tasks/classification.py",
        "min(5, logits.shape[1])",
        "min(4, logits.shape[1])",
        "tests/test_tasks.py -k first_five",
    ),
    Mutant(
        "train/tasks/stdlib.py",
        "nats / jnp.log(2)",
        "nats",
        "tests/test_tasks.py -k of_bytes",
    ),
    Mutant(
        "train/models/gpt.py",
        "position + 1, jnp.int32",
        "position, jnp.int32",
        "tests/test_gpt.py -k token_by_token",
    ),
    Mutant(
        "train/models/gpt.py",
        "epsilon=config.norm_epsilon",
        "epsilon=1e-6",
        "tests/test_gpt2.py -k with_its_biases",
    ),
    Mutant(
        "train/models/gpt2.py",
        "if not config.bias and any(map(np.any, biases)):",
        "if False:",
        "tests/test_gpt2.py -k config_has_not",
    ),
    Mutant(
        "train/models/gpt2.py",
        "dataclasses.replace(config, bias=True)",
        "config",
        "tests/test_gpt2.py -k bit_for_bit",
    ),
    Mutant(
        "train/models/gpt2.py",
        '    "norm_epsilon": ("layer_norm_epsilon", 1e-5),\n',
        "",
        "tests/test_gpt2.py -k another_kind_or_size",
    ),
    Mutant(
        "train/tasks/sampling.py",
        "logits_V[:known]",
        "logits_V",
        "tests/test_language.py -k a_text_is_continued",
    ),
    Mutant(
        "train/tasks/sampling.py",
        "min(sampling.top_k, known)",
        "known",
        "tests/test_sampling.py -k chances",
    ),
    Mutant(
        "train/tasks/sampling.py",
        "jnp.full_like(logits_V, -jnp.inf).at[ids].set(values)",
        "jnp.where(logits_V < values[-1], -jnp.inf, logits_V)",
        "tests/test_sampling.py -k equal_logits",
    ),
    Mutant(
        "train/tasks/sampling.py",
        "(logits_V - logits_V.max())",
        "logits_V",
        "tests/test_sampling.py -k cold",
    ),
    Mutant(
        "train/tasks/sampling.py",
        "if number and len(text)",
        "if len(text)",
        "tests/test_language.py -k likeliest",
    ),
    Mutant(
        "train/tasks/sampling.py",
        "text[-1:], len(text) - 1, 0",
        "text[-1:], len(text), 0",
        "tests/test_language.py -k likeliest",
    ),
    Mutant(
        "train/tasks/sampling.py",
        "            shown = text",
        "            shown = text.rstrip()",
        "tests/test_sampling.py -k pieces_are",
    ),
    Mutant(
        "train/tasks/sampling.py",
        "        if not text.endswith(",
        "        if text and text.endswith(",
        "tests/test_sampling.py -k are_whole",
    ),
    Mutant(
        "train/tasks/translation.py",
        "if sampling != Sampling():",
        "if False:",
        "tests/test_tasks.py -k is_not_drawn",
    ),
    Mutant(
        "train/network.py",
        "1e3**n / 8 for",
        "1e3**n for",
        "tests/test_advise.py -k read_in_its_unit",
    ),
    Mutant(
        "train/advise/setting.py",
        "cluster.slowed(self.measured[topology] / predicted)",
        "cluster.slowed(predicted / self.measured[topology])",
        "tests/test_advise.py -k as_long_as_it_was_measured",
    ),
    Mutant(
        "train/advise/rank.py",
        "all_reduce_step / step,",
        "step / all_reduce_step,",
        "tests/test_advise.py -k exposed_and_waited_for",
    ),
    Mutant(
        "train/advise/rank.py",
        "key=lambda row: (row.to_consensus, row.step)",
        "key=lambda row: row.step",
        "tests/test_advise.py -k consensus_decides",
    ),
    Mutant(
        "train/advise/rank.py",
        "skipped = period * math.ceil(num_steps / 10 / period)",
        "skipped = 0",
        "tests/test_advise.py -k mean_over_whole_periods",
    ),
    Mutant(
        "train/advise/measure.py",
        "max(gather(median(seconds[1:])))",
        "min(gather(median(seconds[1:])))",
        "tests/test_advise_measure.py -k the_slowest_process",
    ),
    Mutant(
        "train/advise/measure.py",
        "share * exchanges.model_bytes / max(of_inside - short, 1e-9)",
        "exchanges.model_bytes / max(of_inside - short, 1e-9)",
        "tests/test_advise_measure.py -k a_network_is_measured",
    ),
    Mutant(
        "train/preflight/preflight_report.py",
        "return 0 if passed else 1",
        "return 0",
        "tests/test_preflight.py -k too_little_overlap_is_a_code",
    ),
    Mutant(
        "train/preflight/preflight_report.py",
        "min(finding.schedule.covered(AXIS) for finding in found)",
        "max(finding.schedule.covered(AXIS) for finding in found)",
        "tests/test_preflight.py -k that_of_the_worst_exchange",
    ),
    Mutant(
        "train/preflight/preflight_report.py",
        "is_covered and covered >= (require_overlap or 0)",
        "covered >= (require_overlap or 0)",
        "tests/test_preflight.py -k never_covered",
    ),
    Mutant(
        "train/preflight/tune.py",
        "int(np.argmax(sent))",
        "int(np.argmin(sent))",
        "tests/test_preflight.py -k busiest_step_is",
    ),
    Mutant(
        "decentjax/distributed/failure.py",
        "        os._exit(code)",
        "        os._exit(0)",
        "tests/test_distributed.py -k a_process_that_fails",
    ),
    Mutant(
        "decentjax/distributed/failure.py",
        "            time.sleep(1)",
        "            pass",
        "tests/test_distributed.py -k says_why_and_ends",
    ),
    Mutant(
        "decentjax/distributed/devices.py",
        "needed = 2 if count == 1 else 8 * count",
        "needed = 2",
        "tests/test_distributed.py -k threads_to_wait",
    ),
    Mutant(
        "decentjax/distributed/devices.py",
        "max(given, needed)",
        "given",
        "tests/test_distributed.py -k threads_to_wait",
    ),
    Mutant(
        "train/job/distributed.py",
        "result(self._timeout_seconds)",
        "result()",
        "tests/test_distributed.py -k do_not_wait_for_a_process_0",
    ),
    Mutant(
        "train/job/distributed.py",
        "float(np.mean([row[k] for row in rows]))",
        "float(np.sum([row[k] for row in rows]))",
        "tests/test_distributed.py -k processes_train_as",
    ),
    Mutant(
        "train/job/distributed.py",
        "    if phrases:",
        "    if False:",
        "tests/test_distributed.py -k processes_that_differ",
    ),
    Mutant(
        "train/job/processes.py",
        "return 128 - returncode, f",
        "return -returncode, f",
        "tests/test_launch.py -k a_killed_process_gives",
    ),
    Mutant(
        "train/job/processes.py",
        "    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)",
        "",
        "tests/test_launch.py -k leaves_no_child",
    ),
    Mutant(
        "train/job/processes.py",
        "            stderr=subprocess.STDOUT,",
        "            stderr=subprocess.DEVNULL,",
        "tests/test_launch.py -k standard_error_is_merged",
    ),
    Mutant(
        "train/job/processes.py",
        "            send(signal.SIGKILL)",
        "            send(signal.SIGTERM)",
        "tests/test_launch.py -k a_second_signal",
    ),
    Mutant(
        "train/job/processes.py",
        "elif now - first >= REPEAT_SECONDS:",
        "else:",
        "tests/test_launch.py -k lets_all_save",
    ),
    Mutant(
        "train/job/processes.py",
        "        if self.asked:  # It came",
        "        if False:  # It came",
        "tests/test_launch.py -k is_told_too",
    ),
    Mutant(
        "train/job/processes.py",
        "            child.close()\n            self._paused",
        "            self._paused",
        "tests/test_launch.py -k again_after_a_pause",
    ),
    Mutant(
        "train/job/processes.py",
        "self._pauses.get(child.name, 0.0) if is_soon else 0.0",
        "0.0",
        "tests/test_launch.py -k again_after_a_pause",
    ),
    Mutant(
        "train/job/processes.py",
        "os.fsdecode(folder[1])",
        "folder[1].decode()",
        "tests/test_launch.py -k need_not_be_text",
    ),
    Mutant(
        "train/job/processes.py",
        "    with contextlib.suppress(OSError):\n        print(text",
        "    with contextlib.suppress(KeyError):\n        print(text",
        "tests/test_launch.py -k a_warning_that_nobody_reads",
    ),
    Mutant(
        "train/job/cores.py",
        "            _remove_left(root)",
        "",
        "tests/test_emulate.py -k has_its_share",
    ),
    Mutant(
        "train/run/manifest.py",
        "    except OSError as error:  # Its run",
        "    except KeyError as error:  # Its run",
        "tests/test_checkpoint.py -k goes_while_it_is_read",
    ),
    Mutant(
        "train/run/checkpoint.py",
        "        except OSError as error:  # Such as",
        "        except KeyError as error:  # Such as",
        "tests/test_checkpoint.py -k cannot_be_removed",
    ),
    Mutant(
        "decentjax/gossip/links.py",
        "            if life == known.life:",
        "            if False:",
        "tests/test_peers.py -k connection_that_breaks",
    ),
    Mutant(
        "decentjax/gossip/links.py",
        "            known.life = 0  # Nothing listens",
        "            pass  # Nothing listens",
        "tests/test_peers.py -k who_has_died",
    ),
    Mutant(
        "decentjax/gossip/peers.py",
        "late = min(time.monotonic() + each, end)",
        "late = time.monotonic() + each",
        "tests/test_elastic.py -k share_the_time",
    ),
    Mutant(
        "train/job/processes.py",
        "self.failed, self.after = child, self.output.step",
        "self.failed = child",
        "tests/test_launch.py -k names_the_last_step",
    ),
    Mutant(
        "decentjax/gossip/peers.py",
        "return math.sqrt(sum(of_groups) / len(self._workers))",
        "return math.sqrt(sum(of_groups))  / len(self._workers) / 2",
        "tests/test_elastic.py -k distance_of_the_models",
    ),
    Mutant(
        "train/run/peers.py",
        "by_going = gone / (2 * before * stay)",
        "by_going = gone / (2 * before * before)",
        "tests/test_elastic_job.py -k mean_moves",
    ),
    Mutant(
        "train/run/peers.py",
        "came * (stay - 1) / (2 * stay * (stay + came) ** 2)",
        "came / (2 * (stay + came) ** 2)",
        "tests/test_elastic_job.py -k mean_moves",
    ),
    Mutant(
        "train/job/processes.py",
        "            self._output.print(self._printed(self.unprinted))",
        "            pass",
        "tests/test_launch.py -k a_last_line",
    ),
    Mutant(
        "decentjax/distributed/rendezvous.py",
        " or number in came:",
        ":",
        "tests/test_job.py -k who_does_not_belong",
    ),
    Mutant(
        "decentjax/distributed/rendezvous.py",
        "            elif not sees:",
        "            elif False:",
        "tests/test_job.py -k who_does_not_belong",
    ),
    Mutant(
        "decentjax/distributed/rendezvous.py",
        "came = {i: other for i, other in came.items() if other is not guest}",
        "pass",
        "tests/test_job.py -k may_come_again",
    ),
    Mutant(
        "decentjax/distributed/rendezvous.py",
        "server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)",
        "pass",
        "tests/test_job.py -k until_the_coordinator_listens",
    ),
    Mutant(
        "decentjax/distributed/rendezvous.py",
        "        server.settimeout(GREETING_SECONDS)",
        "",
        "tests/test_job.py -k says_nothing",
    ),
    Mutant(
        "train/job/namespaces.py",
        "local_rank, node = divmod(rank, cluster.nodes)",
        "node, local_rank = divmod(rank, cluster.nodes)",
        "tests/test_emulate.py -k cyclic_workers",
    ),
    Mutant(
        "train/job/namespaces.py",
        "rate=round(rate)",
        "rate=round(8 * rate)",
        "tests/test_emulate.py -k a_link_has_its_rate",
    ),
    Mutant(
        "train/launch.py",
        "given.get(name, value) for",
        "value for",
        "tests/test_launch.py -k what_the_user_has_set",
    ),
    Mutant(
        "train/launch.py",
        '"JAX_LOCAL_DEVICE_IDS"] = str(process_id)',
        '"JAX_LOCAL_DEVICE_IDS"] = str(num_processes)',
        "tests/test_launch.py -k share_of_cores",
    ),
    Mutant(
        "train/bench/race/contestants.py",
        "num_nodes.bit_count() == 1",
        "num_nodes > 1",
        "tests/test_bench.py -k a_graph_races",
    ),
    Mutant(
        "train/bench/race/race_report.py",
        "return median(self.rounds)",
        "return fmean(self.rounds)",
        "tests/test_bench.py -k the_median_round",
    ),
    Mutant(
        "train/bench/race/turns.py",
        "times[turn.warmup :]",
        "times",
        "tests/test_bench.py -k warmup_does_not",
    ),
    Mutant(
        "train/bench/race/turns.py",
        "4 * self.layers",
        "self.layers",
        "tests/test_bench.py -k bytes_over_rate",
    ),
    Mutant(
        "train/bench/race/turns.py",
        "turn.delays(num_workers)[:, rank]",
        "turn.delays(num_workers)[:, 0]",
        "tests/test_bench.py -k warmup_does_not",
    ),
    Mutant(
        "train/bench/race/turns.py",
        "0 if self.late == Late.ALWAYS else step % num_workers",
        "step % num_workers",
        "tests/test_stragglers.py -k in_turn_at_random_or_always",
    ),
    Mutant(
        "train/bench/race/turns.py",
        "default_rng(0).exponential(self.straggler, shape)",
        "default_rng().exponential(self.straggler, shape)",
        "tests/test_stragglers.py -k in_turn_at_random_or_always",
    ),
    Mutant(
        "train/bench/race/race_report.py",
        "alone = Scheme.PEERS_EXCHANGE if by_peers else Scheme.EXCHANGE",
        "alone = Scheme.EXCHANGE",
        "tests/test_bench.py -k the_table_compares",
    ),
    Mutant(
        "train/bench/race/race_report.py",
        "contestant.scheme == Scheme.NO_WAIT or not",
        "not",
        "tests/test_bench.py -k bytes_over_rate",
    ),
    Mutant(
        "train/bench/race/jax_worker.py",
        "0.0 if scheme == Scheme.NO_WAIT else math.inf",
        "math.inf",
        "tests/test_stragglers.py -k written_down",
    ),
    Mutant(
        "train/bench/stragglers/stragglers_report.py",
        "slice(1 if turn.late == Late.ALWAYS else 0, None)",
        "slice(0, None)",
        "tests/test_stragglers.py -k workers_that_count",
    ),
    Mutant(
        "train/bench/stragglers/stragglers_report.py",
        "predicted / delayed.predicted[COMPUTE]",
        "predicted / seconds[COMPUTE]",
        "tests/test_stragglers.py -k workers_that_count",
    ),
    Mutant(
        "train/bench/stragglers/stragglers_report.py",
        '("compute", begun + delay, awake)',
        '("compute", begun, awake)',
        "tests/test_stragglers.py -k the_spans",
    ),
    Mutant(
        "train/bench/stragglers/stragglers.py",
        "float(whole.mean()) / turn.steps",
        "float(whole.mean()) / len(seconds)",
        "tests/test_stragglers.py -k hand_arithmetic",
    ),
    Mutant(
        "train/bench/model/published.py",
        "cards * self.between * GBIT",
        "cards * self.between * 1e9",
        "tests/test_bench_model.py -k at_the_least",
    ),
    Mutant(
        "train/bench/model/published.py",
        "(1 + CLOSE) * self.measured[fast]",
        "self.measured[fast]",
        "tests/test_bench_model.py -k which_order",
    ),
    Mutant(
        "decentjax/gossip/means.py",
        "if self._of_all and self._of_all.step == step:",
        "if False:",
        "tests/test_wagma_peers.py -k however_long",
    ),
    Mutant(
        "decentjax/dispersion.py",
        "ranks = np.arange(1 - n, n, 2)",
        "ranks = np.arange(n)",
        "tests/test_policy.py -k hand_made",
    ),
    Mutant(
        "decentjax/dispersion.py",
        "_ratio(x.var(0), x.mean(0))",
        "_ratio(x.var(0, ddof=1), x.mean(0))",
        "tests/test_policy.py -k measures_of_dispersion",
    ),
    Mutant(
        "decentjax/dispersion.py",
        "np.quantile(_sorted(values), [0.25, 0.75], axis=0)",
        "np.quantile(_sorted(values), [0.2, 0.8], axis=0)",
        "tests/test_policy.py -k hand_made",
    ),
    Mutant(
        "decentjax/dispersion.py",
        "params = state.params if before_update else new.params",
        "params = new.params",
        "tests/test_policy.py -k before_they_are_averaged",
    ),
    Mutant(
        "decentjax/dispersion.py",
        "square(x) for x in",
        "square(x) ** 0.5 for x in",
        "tests/test_dbench.py -k how_far_replicas",
    ),
    Mutant(
        "decentjax/policy.py",
        "before = sum(x.period for x in self.graphs[: self.current])",
        "before = self.current",
        "tests/test_policy.py -k several_exchanges",
    ),
    Mutant(
        "decentjax/policy.py",
        "if graph not in self.graphs:",
        "if False:",
        "tests/test_policy.py -k not_named",
    ),
    Mutant(
        "decentjax/policy.py",
        "max(degree - math.floor(per_epoch * epoch), least)",
        "max(degree - math.ceil(per_epoch * epoch), least)",
        "tests/test_policy.py -k loses_neighbours",
    ),
    Mutant(
        "decentjax/policy.py",
        "neighbors(math.floor(epoch))",
        "neighbors(round(epoch))",
        "tests/test_policy.py -k loses_neighbours",
    ),
    Mutant(
        "decentjax/policy.py",
        "even = max(degree - degree % 2, 2)",
        "even = max(degree + degree % 2, 2)",
        "tests/test_policy.py -k loses_neighbours",
    ),
    Mutant(
        "decentjax/policy.py",
        "dispersion > (1 + slack) * target",
        "dispersion > target",
        "tests/test_policy.py -k closed_loop",
    ),
    Mutant(
        "decentjax/policy.py",
        "min(place + 1, len(graphs) - 1)",
        "place + 1 if place + 1 < len(graphs) else 0",
        "tests/test_policy.py -k closed_loop",
    ),
    Mutant(
        "decentjax/policy.py",
        "max(math.ceil(value * levels - 1e-6), 1) - 1",
        "max(math.floor(value * levels), 1) - 1",
        "tests/test_policy.py -k factor_follows",
    ),
    Mutant(
        "decentjax/policy.py",
        "if step == num_steps - 1 else",
        "if step == num_steps else",
        "tests/test_policy.py -k goes_on_in_turn",
    ),
    Mutant(
        "train/run/choose.py",
        "return state._replace(extra={GRAPH: graph})",
        "return state",
        "tests/test_policy.py -k resumes_bit_for_bit",
    ),
    Mutant(
        "train/run/choose.py",
        "if (step + 1) % self._options.every_steps:",
        "if False:",
        "tests/test_policy.py -k alone_and_as_seeds",
    ),
    Mutant(
        "train/run/choose.py",
        "factors[: rates.argmax()] = 1",
        "factors[: rates.argmax()] = 0",
        "tests/test_policy.py -k falls_with_the_learning",
    ),
    Mutant(
        "train/run/seeds.py",
        "return 1 if build_policy(config).measures else",
        "return",
        "tests/test_policy.py -k alone_and_as_seeds",
    ),
    Mutant(
        "train/run/seeds.py",
        "np.moveaxis(norms, 1, 0)",
        "np.moveaxis(norms, 0, 0)",
        "tests/test_dbench.py -k how_far_replicas",
    ),
    Mutant(
        "train/run/programs.py",
        "score_fn = jax.vmap(score_fn, in_axes=(0, 0, None))",
        "score_fn = jax.vmap(score_fn, in_axes=(0, 0, 0))",
        "tests/test_dbench.py -k kept_gone_on",
    ),
    Mutant(
        "train/run/programs.py",
        "before_update=before",
        "before_update=True",
        "tests/test_dbench.py -k of_a_mesh",
    ),
    Mutant(
        "train/dbench/grid.py",
        "* (count / base.num_workers) ** power",
        "* (count * base.num_workers) ** power",
        "tests/test_dbench.py -k scale_the_rate",
    ),
    Mutant(
        "train/dbench/grid.py",
        "if rest or not size:",
        "if not size:",
        "tests/test_dbench.py -k scale_the_rate",
    ),
    Mutant(
        "train/run/tune.py",
        "first, seen = (which - seen) % 2, seen + rows",
        "first, seen = 0, seen + rows",
        "tests/test_dbench.py -k halves",
    ),
    Mutant(
        "train/run/tune.py",
        "score.best(tried.values())",
        "max(tried.values())",
        "tests/test_dbench.py -k best_of_its_own",
    ),
    Mutant(
        "train/dbench/cells.py",
        "range(seeds.stop, seeds.stop + 1)",
        "range(seeds.stop - 1, seeds.stop)",
        "tests/test_dbench.py -k best_of_its_own",
    ),
    Mutant(
        "train/dbench/claims.py",
        'up = 1 if headline.better == "higher" else -1',
        "up = 1",
        "tests/test_dbench.py -k correlations_over_graphs",
    ),
    Mutant(
        "train/dbench/claims.py",
        "lambda rows, count: rows[-count:]",
        "lambda rows, count: rows[:count]",
        "tests/test_dbench.py -k correlations_over_graphs",
    ),
    Mutant(
        "train/dbench/cost.py",
        "at_once * count * cost.num_bytes",
        "count * cost.num_bytes",
        "tests/test_dbench.py -k fit_into_memory",
    ),
    Mutant(
        "train/data/batches.py",
        "np.flatnonzero(labels == label)",
        "np.flatnonzero(labels >= label)",
        "tests/test_batches.py -k unevenly",
    ),
    Mutant(
        "train/run/clock.py",
        "runtime.delayed(compute, self.late_workers, late_by)",
        "compute",
        "tests/test_compare.py -k late_workers_delay",
    ),
    Mutant(
        "train/run/manifest.py",
        "if found_hash != wanted[name]:",
        "if False:",
        "tests/test_checkpoint.py -k a_byte_that_changes",
    ),
    Mutant(
        "train/run/manifest.py",
        "in sorted(wanted.keys() ^ set(found))",
        "in sorted(wanted.keys() - set(found))",
        "tests/test_checkpoint.py -k damaged_is_named",
    ),
    Mutant(
        "train/run/manifest.py",
        "(folder / name).is_symlink()",
        "False",
        "tests/test_checkpoint.py -k damaged_is_named",
    ),
    Mutant(
        "train/run/manifest.py",
        "[share[0] :: share[1]]",
        "[:: share[1]]",
        "tests/test_checkpoint.py -k a_part_of_the_files",
    ),
    Mutant(
        "train/run/checkpoint.py",
        'check_files(path, part="run/")',
        "pass",
        "tests/test_checkpoint.py -k a_damaged_config",
    ),
    Mutant(
        "train/checkpoint.py",
        "return int(damaged)",
        "return 0",
        "tests/test_checkpoint.py -k damaged_is_named",
    ),
    Mutant(
        "train/job/processes.py",
        "if not again or restarts == max_restarts:",
        "if not again:",
        "tests/test_launch.py -k fails_each_time",
    ),
    Mutant(
        "train/job/processes.py",
        "not (ended.asked or ended.code in FINAL or are_peers())",
        "not (ended.code in FINAL or are_peers())",
        "tests/test_launch.py -k asked_to_end",
    ),
    Mutant(
        "train/job/processes.py",
        "first = first or ended.cause",
        "first = ended.cause",
        "tests/test_launch.py -k fails_each_time",
    ),
    Mutant(
        "train/job/processes.py",
        "            self._restarts -= 1",
        "",
        "tests/test_peer_job.py -k lost_peer_is_started",
    ),
    Mutant(
        "train/__main__.py",
        "if auto_resume and find_checkpoints(folder).steps:",
        "if False:",
        "tests/test_distributed.py -k killed_ends_as",
    ),
    Mutant(
        "train/cli/command.py",
        "return NOT_FINITE if isinstance(error, FloatingPointError) else FAILED",
        "return FAILED",
        "tests/test_resume.py -k own_code",
    ),
    Mutant(
        "train/run/regroup.py",
        "rows[np.arange(num_workers) % len(rows)]",
        "rows[np.arange(num_workers) // 2 % len(rows)]",
        "tests/test_resume.py -k another_number",
    ),
    Mutant(
        "train/run/regroup.py",
        "wide.mean(axis=0, keepdims=True)",
        "wide[:1]",
        "tests/test_resume.py -k another_number",
    ),
    Mutant(
        "train/run/regroup.py",
        "jax.random.fold_in(key, step)))(state.key)",
        "key))(state.key[:1].repeat(len(state.key)))",
        "tests/test_resume.py -k another_number",
    ),
    Mutant(
        "train/run/finite.py",
        "before = mixed, state.opt_state, state.model_state",
        "before = state.params, state.opt_state, state.model_state",
        "tests/test_quarantine.py -k dropped_whole",
    ),
    Mutant(
        "train/run/finite.py",
        "return x if _is_watch(x) else jnp.where(is_finite, x, kept)",
        "return jnp.where(is_finite, x, kept)",
        "tests/test_quarantine.py -k dropped_whole",
    ),
    Mutant(
        "train/run/build.py",
        "return quarantined(local) if",
        "return local if",
        "tests/test_quarantine.py -k share_of_workers",
    ),
    Mutant(
        "decentjax/mixing.py",
        "return lax.map(function, pieces).ravel()[: x.size].reshape(x.shape)",
        "return lax.map(function, pieces).ravel()[-x.size :].reshape(x.shape)",
        "tests/test_codec.py -k in_pieces",
    ),
    Mutant(
        "decentjax/exchange.py",
        "row[workers[place]] = workers[source]",
        "row[workers[place]] = source",
        "tests/test_elastic.py -k own_graph",
    ),
    Mutant(
        "decentjax/gossip/elastic.py",
        "if step not in self._exchanges:",
        "if True:",
        "tests/test_elastic.py -k one_view",
    ),
    Mutant(
        "decentjax/gossip/elastic.py",
        "if self.graph(n).num_workers != n:",
        "if False:",
        "tests/test_elastic.py -k refused",
    ),
    Mutant(
        "decentjax/gossip/peers.py",
        "is_there = len(there) >= self._elastic.quorum",
        "is_there = len(there) > self._elastic.quorum",
        "tests/test_elastic.py -k quorum",
    ),
    Mutant(
        "decentjax/gossip/peers.py",
        "there = {*self._living(), *self.links.left}",
        "there = {*self._living()}",
        "tests/test_elastic_job.py -k last_ones",
    ),
    Mutant(
        "decentjax/gossip/ways.py",
        "and message.said.step > self._links.floor(peer):",
        "and True:",
        "tests/test_elastic.py -k before_its_silence",
    ),
    Mutant(
        "decentjax/gossip/peers.py",
        "and message.said.step > after:",
        "and True:",
        "tests/test_elastic.py -k not_older",
    ),
    Mutant(
        "train/run/checkpoint.py",
        "ends.get(timeout=timeout_ms / 1000 + BARRIER_SECONDS)",
        "ends.get()",
        "tests/test_checkpoint.py -k out_of_reach",
    ),
    Mutant(
        "train/run/loop.py",
        "                if stop.stopped:  # It had",
        "                if False:  # It had",
        "tests/test_elastic_job.py -k waits_and",
    ),
    Mutant(
        "decentjax/gossip/peers.py",
        "self._links.was_silent()) or found",
        "False) or found",
        "tests/test_elastic.py -k frozen",
    ),
    Mutant(
        "decentjax/gossip/peers.py",
        "self._graph = Living(self._elastic, num_workers, self._living)",
        "pass",
        "tests/test_elastic.py -k dead_leave",
    ),
    Mutant(
        "decentjax/gossip/handshake.py",
        "line.step = int(word)",
        "int(word)",
        "tests/test_handshake.py -k hears_where",
    ),
    Mutant(
        "decentjax/gossip/handshake.py",
        "            line.lost = True",
        "            pass",
        "tests/test_handshake.py -k hears_where",
    ),
    Mutant(
        "decentjax/gossip/handshake.py",
        "async with asyncio.timeout(self._silent_seconds):",
        "async with asyncio.timeout(None):",
        "tests/test_handshake.py -k silent",
    ),
    Mutant(
        "decentjax/gossip/handshake.py",
        "self.joining.add((guest, worker))\n            return None",
        "self.joining.add((guest, worker))",
        "tests/test_handshake.py -k asks_to_join",
    ),
    Mutant(
        "decentjax/gossip/handshake.py",
        'if said.get("digest") != self._digest or worker not in self._says:',
        "if False:",
        "tests/test_handshake.py -k another_run",
    ),
    Mutant(
        "decentjax/gossip/links.py",
        "            self._lose(peer)\n        return known.is_known",
        "            pass\n        return known.is_known",
        "tests/test_elastic.py -k dead_leave",
    ),
    Mutant(
        "train/run/peers.py",
        "if not stop.stopped and peers.was_away():",
        "if False:",
        "tests/test_elastic_job.py -k freeze",
    ),
    Mutant(
        "train/run/peers.py",
        "or stop.poll()):",
        "):",
        "tests/test_elastic_job.py -k quorum",
    ),
    Mutant(
        "train/run/loop.py",
        "kept = config.num_steps if joins else begin.step",
        "kept = begin.step",
        "tests/test_chaos.py -k injected",
    ),
    Mutant(
        "train/chaos/faults.py",
        "if found != self.wanted:",
        "if found is None:",
        "tests/test_chaos.py -k other_numbers",
    ),
    Mutant(
        "train/chaos/jobs.py",
        "if (found == 0) if code is None else (found != code):",
        "if code is None and found == 0:",
        "tests/test_chaos.py -k hangs",
    ),
    Mutant(
        "train/chaos/jobs.py",
        'digest.update(f"{name} {x.shape} {x.dtype}".encode() + x.tobytes())',
        'digest.update(f"{name} {x.shape} {x.dtype}".encode())',
        "tests/test_chaos.py -k told_apart",
    ),
    Mutant(
        "train/figures/members_figure.py",
        "        if after - before > longest:",
        "        if False:",
        "tests/test_chaos.py -k but_for_gaps",
    ),
    Mutant(
        "train/run/peers.py",
        "        state, step = _saved_by_peers(folder, begin)",
        "",
        "tests/test_peer_job.py -k away_when_the_others",
    ),
    Mutant(
        "train/run/peers.py",
        "return state._replace(key=begin.state.key), step",
        "return state, step",
        "tests/test_peer_job.py -k away_when_the_others",
    ),
    Mutant(
        "train/run/peers.py",
        "if x[0] > begin.step), reverse=True",
        "if x[0] > begin.step)",
        "tests/test_peer_job.py -k away_when_the_others",
    ),
    Mutant(
        "train/run/checkpoint.py",
        "    if lost is not None:",
        "    if False:",
        "tests/test_checkpoint.py -k no_disk_is_the_reason",
    ),
    Mutant(
        "train/launch.py",
        "if not restarts or CACHE in given:",
        "if not restarts:",
        "tests/test_launch.py -k finds_what_was_compiled",
    ),
    Mutant(
        "train/launch.py",
        '"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",',
        "",
        "tests/test_launch.py -k finds_what_was_compiled",
    ),
    Mutant(
        "train/cli/trust.py",
        "if source is None:",
        "if False:",
        "tests/test_trust.py -k defines_alone",
    ),
    Mutant(
        "train/cli/trust.py",
        'getattr(found, "__module__", None) != module_name:',
        "False:",
        "tests/test_trust.py -k defines_alone",
    ),
    Mutant(
        "train/cli/trust.py",
        "names[0] == names[1])",
        "True)",
        "tests/test_trust.py -k defines_alone",
    ),
    Mutant(
        "train/cli/config_json.py",
        "**dict.fromkeys(HOOKS)",
        "",
        "tests/test_own_task.py -k not_to_evaluate",
    ),
    Mutant(
        "train/run/resume.py",
        'place.rpartition(":")[2]',
        "place",
        "tests/test_own_task.py -k became_a_module",
    ),
    Mutant(
        "train/run/optimizers.py",
        "optax.contrib.muon(-1.0,",
        "optax.contrib.muon(1.0,",
        "tests/test_tasks.py -k muon_turns",
    ),
    Mutant(
        "train/run/choose.py",
        "name=name, make=None)",
        "name=name)",
        "tests/test_own_task.py -k by_name_are_not",
    ),
    Mutant(
        "train/fields.py",
        'getattr(thing, "__qualname__", "").isidentifier()',
        "True",
        "tests/test_own_task.py -k no_function_or_task",
    ),
    Mutant(
        "train/data/image_folder.py",
        "drawn[count:]), sorted(drawn[:count])",
        "drawn), sorted(drawn[:count])",
        "tests/test_own_data.py -k on_both_sides",
    ),
    Mutant(
        "train/data/hub_datasets.py",
        "np.array([*row, between], np.int32)",
        "np.array(row, np.int32)",
        "tests/test_own_data.py -k one_sequence",
    ),
    Mutant(
        "train/run/loop.py",
        "config.on_step(step, state, metrics)",
        "config.on_step(step - 1, state, metrics)",
        "tests/test_own_task.py -k hooks_see",
    ),
    Mutant(
        "train/launch.py",
        "if options.places > options.processes and not options.elastic:",
        "if False:",
        "tests/test_elastic_job.py -k places",
    ),
    Mutant(
        "train/data/grid_maps.py",
        "np.roll(reached, 1, axis=1) | np.roll(reached, -1, axis=1)",
        "np.roll(reached, 1, axis=1)",
        "tests/test_navigate.py -k shortest_path",
    ),
    Mutant(
        "train/data/grid_maps.py",
        "(padded[:train], padded[train : train + held_out])",
        "(padded[:train], padded[:held_out])",
        "tests/test_navigate.py -k never_reach",
    ),
    Mutant(
        "train/data/iterations.py",
        "epoch_of_it == part == 0",
        "part == 0",
        "tests/test_navigate.py -k once_an_epoch",
    ),
    Mutant(
        "train/tasks/grid_world.py",
        "shortest / jnp.maximum(taken, shortest)",
        "shortest / shortest",
        "tests/test_navigate.py -k spl_of",
    ),
    Mutant(
        "train/tasks/grid_world.py",
        "aside = down * ahead_right - right * ahead_down",
        "aside = right * ahead_down - down * ahead_right",
        "tests/test_navigate.py -k an_agent_sees",
    ),
    Mutant(
        "train/tasks/navigate.py",
        "old=old, live=live",
        "old=old",
        "tests/test_navigate.py -k plays_nothing",
    ),
    Mutant(
        "train/tasks/ppo.py",
        "value = jnp.where(step.played, step.value, 0)",
        "value = step.value",
        "tests/test_ppo.py -k advantages_are",
    ),
    Mutant(
        "train/tasks/ppo.py",
        "jnp.maximum((values - returns) ** 2",
        "jnp.minimum((values - returns) ** 2",
        "tests/test_ppo.py -k that_of_the_paper",
    ),
    Mutant(
        "train/tasks/ppo.py",
        "jnp.minimum(ratio * scaled, clipped * scaled)",
        "ratio * scaled",
        "tests/test_ppo.py -k that_of_the_paper",
    ),
    Mutant(
        "train/tasks/grid_world.py",
        "return lax.bitcast_convert_type(x, dtype) if x.dtype == of else x",
        "return x",
        "tests/test_navigate.py -k other_workers",
    ),
    Mutant(
        "train/tasks/navigate.py",
        "(ppo_state.actions * count, count)",
        "(count, count)",
        "tests/test_navigate.py -k scored",
    ),
    Mutant(
        "train/run/comparison.py",
        "main = headline if headline in",
        "main = names[0] if headline in",
        "tests/test_compare.py -k by_the_headline",
    ),
    Mutant(
        "train/compare.py",
        "if max(map(len, rows.values())) < 2:",
        "if True:",
        "tests/test_compare.py -k evaluated_often",
    ),
    Mutant(
        "train/bench/work.py",
        "np.min(found, axis=0)",
        "np.max(found, axis=0)",
        "tests/test_bench_work.py -k shortest_round",
    ),
]

if __name__ == "__main__":
    sys.exit(main())
