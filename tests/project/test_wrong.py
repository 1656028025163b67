"""What is wrong is answered by a sentence: command lines, and calls of the library."""

import re
import shlex

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from benches.__main__ import BENCHES
from decentjax import (
    AXIS,
    Rounds,
    Topology,
    __main__,
    analysis,
    cast_compute,
    codec,
    compression,
    consensus_distance,
    decentralize,
    gossip,
    init_state,
    local_update,
    methods,
    mix,
    on_mesh,
    over_workers,
    place,
    policy,
    rounds,
    simulate,
    topology,
    worker_mesh,
)
from decentjax._rounds.schedule import every
from decentjax.exchange import Exchange, Groups, Permutations
from decentjax.methods import Tracking
from decentjax.mixing import Lowering, global_mean
from decentjax.optim import accum_adam, exact_diffusion, quasi_global_momentum
from tests.pages import run_all
from train.run.nonfinite import poison_gradient

TINY = "tests/tiny.py"
ADVISE = "advise --nodes 4 --between 25gbit --compute 65ms --params 65M"
TEXT = f"prepare text {TINY} --out nowhere"
INT = "an integer of at most 2,147,483,647, got 'many'"

# A command line, and what is said of it. The folder is the repository's.
COMMANDS = [
    ("trian", "no command 'trian': did you mean train"),
    ("nosuch", "no command 'nosuch': decentjax --help lists them"),
    ("train", "usage: decentjax train CONFIG"),
    ("train --num-steps 3", "usage: decentjax train CONFIG"),
    ("train nosuch", "no config is named nosuch: give the path"),
    ("train tests/tiny", "file tests/tiny: did you mean tests/tiny.py"),
    ("train quikstart", "no config is named quikstart: did you mean quickstart"),
    (
        "train elsewhere/quickstart.py",
        "file elsewhere/quickstart.py: did you mean quickstart, which comes with the",
    ),
    (
        "launch -n 2 elsewhere/quickstart.py",
        "no config or script elsewhere/quickstart.py: did you mean quickstart, which",
    ),
    ("train README.md", "a config file must be a Python file NAME.py, got README.md"),
    (f"train {TINY} --num-steps -3", "num_steps must be at least 1, got -3"),
    (f"train {TINY} --lr -1", "--optimizer.learning-rate must be at least 0"),
    (f"train {TINY} --num-steps many", f"--num-steps must be {INT}"),
    (f"train {TINY} --num-steps", "--num-steps must be an integer .* got nothing"),
    (f"train {TINY} --num-stps 3", "no option --num-stps: did you mean --num-steps"),
    (f"train {TINY} extra", "'extra' follows no option that takes it: "),
    (f"compare {TINY} --topology.degree 2 4", "changes nothing: alternating_exp"),
    (f"dbench {TINY} --topology.name ring --graphs ring", "--graphs: give one of"),
    (f"dbench {TINY} --graph ring", "no option --graph: did you mean --graphs?"),
    (f"train {TINY} --topology.name rign", "got 'rign': did you mean 'ring'"),
    (
        f"train {TINY} --topology.name hypercube --workers.num-workers 6",
        "hypercube needs num_workers to be a power of two, got 6",
    ),
    (
        "train quickstart --workers.num-workers 2",
        "not fill nodes of 4: set workers.workers_per_node to 1 or 2",
    ),
    (
        f"train {TINY} --workers.num-workers 6 --workers.workers-per-node 4",
        "not fill nodes of 4: set workers.workers_per_node to 1, 2, 3 or 6",
    ),
    (f"train {TINY} --workers.num-workers 1", "set workers.workers_per_node to 1$"),
    (f"train {TINY} --optimizer.learning-rate nan", "a number that float32 holds, go"),
    (f"train {TINY} --optimizer.warmup-steps 12", "= 12 must be less than num_steps"),
    (f"train {TINY} --step.xla-options fast", "xla_NAME=VALUE, got 'fast'"),
    (f"train {TINY} --task.model.num-heads 3", "16 must be a multiple of num_heads, "),
    (f"train {TINY} --exchange.elastic", "is an option of --exchange peers: give"),
    (f"train {TINY} --exchange background", "simulated workers send nothing: ex"),
    (
        f"train {TINY} --method rounds --method.learning-rate 0.5",
        "--method.outer = none has no learning_rate: set --method.outer too, or le",
    ),
    (f"train {TINY} --init-from nowhere", "nowhere holds no run: it has no config"),
    (f"train {TINY} --resume", "a run brings its own config: decentjax resume runs/t"),
    (f"train {TINY} --resume x/y", "brings its own config: decentjax resume x/y"),
    ("launch quickstart -n", "usage: decentjax launch .* error: argument -n"),
    ("resume", "usage: .* decentjax resume RUN"),
    ("resume nowhere", "nowhere holds no run"),
    ("launch", "usage: decentjax launch -n N"),
    (f"launch --processes many {TINY}", "--processes: invalid int value: 'many'"),
    (f"launch --processes 0 {TINY}", "processes must be at least 1, got 0"),
    ("emulate --nodes 2", "usage: decentjax emulate --nodes N .* -- COMMAND"),
    ("emulate --nodes 0 -- true", "nodes must be between 1 and 254, got 0"),
    ("emulate --nodes 2 --rate fast -- true", "rate must be like 200mbit, .*'fast'"),
    ("advise", "missing --nodes INT --between 25gbit --compute"),
    (f"{ADVISE} --between 25", "number with one of the units .*25gbit.*, got '25'"),
    (f"{ADVISE} --compute 65", "number with one of the units .* as 65ms, got '65'"),
    (f"{ADVISE} --workers-per-node 4", "nodes of 4 workers need --inside, such as"),
    (f"{ADVISE} --late-workers 1", "late_workers and late_by need each other, got 1"),
    (
        f"{ADVISE} --late-workers 9 --late-by 1s",
        "late_workers must be at most 4, the number of all workers, got 9",
    ),
    (f"{ADVISE} --steps 0", "steps must be positive, got 0"),
    (f"{ADVISE} --out README.md", "File exists: 'README.md'; give another path"),
    ("advise --measure", "usage: decentjax advise --measure CONFIG"),
    (f"advise --measure {TINY} --measured-steps 0", "must be positive, got 300 and 0"),
    (f"preflight {TINY}", "missing --target STR .*: see .* --help"),
    (
        f"preflight {TINY} --target h10 --nodes 2 --gpus-per-node 8",
        "no target 'h10': take t4, a40",
    ),
    ("prepare", "give a command: wmt14, pairs, text, imagenet"),
    (f"{TEXT} --vocabulary 3", "at least 257 tokens, got 3"),
    (f"{TEXT} --held-out-share 2", "must be between 0 and 1, got 2.0"),
    (f"{TEXT} --tokenizer README.md", "README.md is not the JSON file of a tokenizer"),
    ("evaluate README.md", "README.md holds no run: it has no config.json"),
    (
        "evaluate nowhere --workers many",
        "takes, for example, 2 2, got 'many'",
    ),
    ("generate nowhere a", "nowhere holds no run: it has no config.json"),
    (f"compare {TINY} {TINY}", r"a name of its own, got \['tiny', 'tiny'\]"),
    (f"compare {TINY} --seeds 0", "seeds must be at least 1, got 0"),
    (
        f"compare {TINY} --optimizer.learning-rat 1",
        "--optimizer.learning-rat: a config has no field .* mean learning_rate",
    ),
    (
        f"compare {TINY} --stp.algorithm 1",
        "no option --stp.algorithm: did you mean --method?",
    ),
    (f"compare {TINY} --epochs 3", "no option --epochs: did you mean --num-steps?"),
    (f"compare {TINY} --optimizer.beta1 0", "did you mean --optimizer.b1?"),
    (f"compare {TINY} --num-steps many", f"--num-steps must be {INT}"),
    (f"train {TINY} --local-steps 3", "did you mean --method.every-steps?"),
    (f"train {TINY} --epochs 3", "no option --epochs: did you mean --num-steps?"),
    (f"train {TINY} --optimizer.max-grad-norm 1", "mean --optimizer.clip-norm?"),
    (f"train {TINY} --bf16", "--bf16: did you mean --task.model.compute-dtype?"),
    ("slurm quickstart --time 3", "no option --time: did you mean --hours?"),
    ("train text --task.data nowhere", "no file or folder nowhere: give text files"),
    (f"train {TINY} --nnodes 2", "--nnodes: did you mean --workers.num-workers?"),
    (f"train {TINY} --output-dir a", "--output-dir: did you mean --run-dir?"),
    (f"compare {TINY} --clock.between 1gbit", "need to know how long a step computes"),
    ("report nowhere", "nowhere holds no run: it has no config.json"),
    ("checkpoint nosuch nowhere", "no command 'nosuch': use one of list, verify, ex"),
    ("checkpoint list nowhere", "nowhere holds no run: it has no config.json"),
    ("export nowhere --to model.bin", "a file NAME.safetensors, got model.bin"),
    (f"dbench {TINY} --graphs nosuch", "TopologyConfig.name must be one of 'complete"),
    (f"dbench {TINY} --graphs ring@0", "wanted GRAPH or GRAPH@STEPS, .*'ring@0'"),
    (f"dbench {TINY} --workers 0", r"--workers must be at least 1 each, got \(0,\)"),
    (f"dbench {TINY} --change seed=1", "there is no option --change"),
    (f"train {TINY} --exchange.where peers", "no option --exchange.where"),
    (
        f"compare {TINY} --policy.name thinning",
        "did you mean --method.policy",
    ),
    ("replay nowhere", "nowhere holds no run of peers: they are those with --exch"),
    (f"chaos {TINY}", "no command 'chaos': in a checkout, run python -m benches.cha"),
    ("bench nosuch --help", "no bench 'nosuch': take one of race, quality, "),
    ("bench step --rounds 0", "rounds must be at least 1, got 0"),
]


@pytest.mark.slow
def test_a_wrong_command_is_answered_by_what_is_wrong():
    """In one sentence; in one process: a traceback would end it, and fail."""
    lines = [("decentjax", *shlex.split(line)) for line, _ in COMMANDS]
    results = run_all(lines, {"train", "text", "images", "emulate"})
    for (line, wanted), (code, text) in zip(COMMANDS, results, strict=True):
        # A sentence in place of a code is printed, and the code is then 1.
        assert code in (1, 2) or str(code).startswith("error: "), (line, code, text)
        said = text if code in (1, 2) else str(code)
        assert re.search(wanted, " ".join(said.split())), (line, said)
        if "usage: " not in said:
            assert re.fullmatch(r"error: .*\n?", said), (line, said)


@pytest.mark.slow
def test_each_command_has_help_with_an_example():
    names = list(__main__.COMMANDS)
    lines = [("decentjax", name, "--help") for name in names]
    results = run_all(lines, {"train", "text", "images", "emulate"})
    for name, (code, text) in zip(names, results, strict=True):
        said = " ".join(text.translate(FRAME).split())
        assert code == 0, (name, code, text)
        assert re.search(rf"[Ee]xamples?: `?decentjax .*{name}", said), (name, said)
    advice = " ".join(results[names.index("advise")][1].split())
    assert "--between 25gbit rate" in advice
    assert "--inside 25gbit rate" in advice
    assert " STR " not in advice


@pytest.mark.slow
@pytest.mark.parametrize("name", ["prepare", "checkpoint", "bench"])
def test_each_kind_of_a_command_has_an_example(name):
    kinds = {
        "prepare": ("wmt14", "pairs", "text", "imagenet"),
        "checkpoint": ("list", "verify", "export"),
        "bench": tuple(BENCHES),
    }[name]
    lines = [("decentjax", name, kind, "--help") for kind in kinds]
    if name == "bench":  # And those whose options are those of a config.
        lines += [("decentjax", x, "quickstart", "--help") for x in OF_CONFIGS]
    results = run_all(lines, {"train", "text", "images", "emulate"})
    for line, (code, text) in zip(lines, results, strict=True):
        said = " ".join(text.translate(FRAME).split())
        assert code == 0, (line, code, text)
        assert re.search(r"[Ee]xamples?: `?(srun |taskset -c 0 )?decentjax", said), line


OF_CONFIGS = ("train", "preflight")
FRAME = str.maketrans(dict.fromkeys("│─╭╮╰╯", " "))
RING, LOST = topology.ring(4), topology.ring
PARTY = gossip.PeerProcess(gossip.Folder("x"), [0], worker_mesh(1))
WHOLE = NamedSharding(worker_mesh(1), PartitionSpec())
DILOCO, MEAN = methods.diloco(4), methods.all_reduce(4)
SGD = optax.sgd(0.1)
FUNCTION = "wanted a Topology, such as topology.ring.8., got ring; call a function"
PLAN = "wanted a plan: a topology, as topology.ring.8., .* got "
NO_AXIS = "needs the mapped axis 'workers': call this inside"
OPTIMIZER = "wanted an optax optimizer, such as optax.adamw.1e-3., got sgd"


def loss_fn(params, model_state, batch, key):
    return jnp.mean((params - batch) ** 2), (model_state, {})


local = local_update(loss_fn, SGD)


def start(params=0.0, optimizer=SGD, num_workers=4, **options):
    """The state of workers; params without a dim."""
    params = jnp.asarray(params) if isinstance(params, float) else params
    return init_state(params, optimizer, jax.random.key(0), num_workers, **options)


def run(local=local, plan=RING, num_rows=4, number=0, state=None):
    """A simulated step, with batches of 6 examples."""
    state = start() if state is None else state
    return simulate(local, plan)(state, jnp.zeros((num_rows, 6)), number)


def mapped(function):
    """The function of one worker, traced for four."""
    return jax.eval_shape(jax.vmap(function, axis_name=AXIS), jnp.ones(4))


def updated(optimizer, *arguments, **options):
    state = optimizer.init(jnp.ones(3))
    return optimizer.update(jnp.ones(3), state, *arguments, **options)


CALLS = [
    (lambda: topology.ring(0), "num_workers must be at least one, got 0"),
    (lambda: topology.ring(2.5), "num_workers must be a whole number, got 2.5"),
    (lambda: topology.torus("4"), "num_workers must be a whole number, got '4'"),
    (lambda: topology.hypercube(4.0), "num_workers must be a whole number, got 4.0"),
    (lambda: topology.random_matching(4, 2, -1), "a seed of at least 0, got -1"),
    (lambda: topology.hierarchical(8, 2, RING), "a function from .*ring, got Topology"),
    (lambda: topology.damped(LOST, 0.5), FUNCTION),
    (lambda: topology.from_edges([0, 1]), r"are pairs of the numbers .* got \[0, 1\]"),
    (lambda: topology.from_edges([("a", "b")]), "node_labels_to_integers, got "),
    (lambda: analysis.compare(RING, RING), "got <Topology ring: .* as a list"),
    (lambda: analysis.compare(RING, -1), "a number above 0, got -1"),
    (lambda: analysis.compare(3), r"wanted topologies, .*, got int"),
    (lambda: analysis.plot(["ring"]), "wanted a Topology, such as .* got str"),
    (lambda: topology.from_edges([(0, 1, 2)]), r"such as \(0, 1\); .* got \["),
    (lambda: analysis.plot(RING, -1), "num_steps must be at least 0, got"),
    (lambda: analysis.plot(RING, 1.5), "num_steps must be a whole number"),
    (lambda: topology.with_mean_every(LOST, 2), FUNCTION),
    (lambda: topology.matrices(LOST), FUNCTION),
    (
        lambda: topology.from_matrix(np.eye(3)[:2]),
        r"must be square, got shape \(2, 3\)",
    ),
    (lambda: Topology("a", RING[0]), "a tuple of Exchanges, got only one"),
    (lambda: Topology("a", (RING,)), "consists of Exchanges, got Topology"),
    (lambda: Exchange(RING), "consists of Permutations or Groups, got Topology"),
    (lambda: Permutations(((0, 0),), (1.0,)), r"not a permutation .*: \(0, 0\)"),
    (lambda: Groups(((0, 1), (2,))), r"groups must have equal size, .* got \(\(0, 1"),
    (lambda: Lowering(groups="ring"), 'must be "scatter" or "sum", got \'ring\''),
    (lambda: mapped(lambda x: mix(x, RING, AXIS)), "one Exchange, .* got Topology"),
    (
        lambda: mapped(lambda x: mix(x, topology.ring(5)[0], AXIS)),
        "for 5 workers, but axis 'workers' has size 4",
    ),
    (lambda: mapped(lambda x: mix((), RING[0], AXIS)), "the tree has no leaves"),
    (
        lambda: mapped(lambda x: mix(x, RING[0], "worker")),
        "needs the mapped axis 'worker': call this inside",
    ),
    (lambda: mix(jnp.ones(3), RING[0], AXIS), NO_AXIS),
    (lambda: global_mean(jnp.ones(3), AXIS), NO_AXIS),
    (lambda: consensus_distance(jnp.ones(3), AXIS), NO_AXIS),
    (
        lambda: mapped(lambda x: mix(x, RING[0], AXIS, message_dtype="fp16")),
        "float16 has a smaller range than float32, .* use bfloat16",
    ),
    (lambda: cast_compute(loss_fn, "bf61"), "\"bfloat16\", got 'bf61'"),
    (lambda: cast_compute(loss_fn, None), "dtype of floats, .* got None"),
    (
        lambda: gossip.PeerProcess("x", [0], worker_mesh(1)),
        r"as gossip.Folder\(path\), ",
    ),
    (lambda: decentralize(SGD, LOST, AXIS), PLAN + "ring; call a function"),
    (lambda: decentralize(optax.sgd, RING, AXIS), OPTIMIZER),
    (
        lambda: decentralize(SGD, RING, AXIS, "float99"),
        "message_dtype must be a dtype of",
    ),
    (lambda: updated(decentralize(SGD, RING, AXIS)), "pass params to update"),
    (lambda: updated(decentralize(SGD, RING, AXIS), jnp.ones(3)), NO_AXIS),
    (lambda: decentralize(SGD, DILOCO.schedule, AXIS), PLAN + "Schedule"),
    (lambda: updated(decentralize(SGD, DILOCO, AXIS), jnp.ones(3)), NO_AXIS),
    (
        lambda: updated(decentralize(SGD, DILOCO, AXIS), jnp.ones(3), step=0),
        "counts the steps of rounds itself, .* leave out step, got 0",
    ),
    (lambda: accum_adam(1e-3, accum_steps=2.5), "must be a whole number, got 2.5"),
    (lambda: exact_diffusion(optax.sgd), OPTIMIZER),
    (lambda: updated(exact_diffusion(SGD)), "needs the params: pass them to update"),
    (lambda: quasi_global_momentum(0.1, 2.0), r"momentum must be in \[0, 1\), got 2.0"),
    (lambda: start(optimizer=optax.sgd), OPTIMIZER),
    (lambda: init_state(0.0, SGD, 1, 4), "key must be a random key, as .*, got 1"),
    (lambda: start(num_workers=0), "num_workers must be at least one, got 0"),
    (lambda: start(workers=[7]), r"workers must be from 0 to 3, got \[7\]"),
    (lambda: start(params={}), "nothing to train: the params have no leaves"),
    (lambda: run(plan=LOST), PLAN + "ring; call a function"),
    (lambda: run(plan=RING[0]), PLAN + "Exchange; call"),
    (lambda: run(number="0"), "the step as a Python int, got '0'"),
    (lambda: run(number=0.5), "the step as a Python int, got 0.5"),
    (lambda: run(state=jnp.ones(4)), "takes a WorkerState, .* got ArrayImpl"),
    (lambda: run(num_rows=5), "for each worker, got 4 of state.params, 5 of batch"),
    (lambda: run(plan=topology.ring(5)), "for 5 workers, but axis 'workers' has"),
    (lambda: run(loss_fn), "missing 1 required positional argument: 'key'"),
    (lambda: run(loss_fn, MEAN), "pass local_update.loss_fn, opt.*, got loss_fn"),
    (lambda: local_update(loss_fn, optax.sgd), OPTIMIZER),
    (
        lambda: run(local_update(lambda params, batch, key: params, SGD)),
        r"called as loss_fn\(params, model_state, batch, key\): too many posit",
    ),
    (lambda: run(local_update(3, SGD)), r"loss_fn\(params, .*, key\), got int"),
    (
        lambda: run(local_update(loss_fn, SGD, 0)),
        "a worker's batch of 6 cannot be split into 0 equal micro-batches",
    ),
    (lambda: run(plan=DILOCO), "rounds need .*: make it by step.init.*, got tuple"),
    (lambda: run(plan=DILOCO.schedule), PLAN + "Schedule"),
    (
        lambda: Tracking(RING, 2, outer=optax.sgd(0.7)),
        "tracking averages whole models .* take merge=shift, no outer optimizer",
    ),
    (lambda: on_mesh(local, RING, None), "wanted a mesh, .* got NoneType; simulate"),
    (lambda: worker_mesh(0), "num_workers must be at least one, got 0"),
    (
        lambda: place(np.zeros((3, 2)), worker_mesh(4)),
        "a row for each of the 4 workers, got 3 of stacked$",
    ),
    (
        lambda: over_workers(lambda x: x, worker_mesh(4))(jnp.zeros((6, 2))),
        "a row for each of the 4 workers, got 6 of x$",
    ),
    (lambda: gossip.Background(local, LOST, worker_mesh(4)), PLAN + "ring; call"),
    (lambda: gossip.Background(local, RING, None), "wanted a mesh, .* got NoneType"),
    (lambda: gossip.AllReduce(local, None), "wanted a mesh, .* got NoneType"),
    (
        lambda: gossip.Background(local, MEAN, worker_mesh(4)),
        "wanted a topology or Rounds, .* got GradientMean: use gossip.AllReduce",
    ),
    (
        lambda: gossip.Peers(local, MEAN, PARTY),
        "wanted a topology or Rounds, .* got GradientMean: use gossip.AllReduce",
    ),
    (lambda: gossip.Peers(local, DILOCO.schedule, PARTY), PLAN + "Schedule"),
    (
        lambda: gossip.Peers(local, RING, gossip.Folder("x")),
        "wanted a gossip.PeerProcess.book, workers, mesh., got Folder",
    ),
    (lambda: codec.top_k(0), r"must be in \(0, 1\], got 0"),
    (lambda: codec.int8(block=0), "a block needs at least 1 number, got 0"),
    (lambda: compression.error_feedback(codec.int8), "wanted a Codec, .* got <"),
    (
        lambda: compression.error_feedback(codec.int8(), keep=2),
        "keep must be in .* got 2",
    ),
    (
        lambda: compression.error_feedback(codec.int8(), shards=[]),
        "a NamedSharding for each leaf of a model, got list",
    ),
    (
        lambda: compression.drift(codec.int8(), shards=[WHOLE]).check_leaves(2),
        "wanted a NamedSharding for each of the 2 leaves of the model, got 1",
    ),
    (lambda: Rounds(DILOCO), "wanted a Topology, .* got Rounds"),
    (lambda: Rounds(LOST), FUNCTION),
    (lambda: Rounds(RING, 2, outer=optax.sgd), OPTIMIZER),
    (lambda: Rounds(RING, 2.5), "steps between rounds must be a whole number, got 2.5"),
    (lambda: Rounds(RING, 4, fragments=2), r"such as \[\[0, 1\], \[2\]\], .* got 2"),
    (lambda: Rounds(RING, 4, fragments=["w"]), r"numbers of the leaves .* got \['w'\]"),
    (lambda: Rounds(RING, 4, stacked=[1]), r"such as \{2: 12\}, got \[1\]"),
    (lambda: simulate(SGD, RING), "wanted a local update, .* got GradientTransf"),
    (lambda: gossip.Background(3, RING, worker_mesh(4)), "local update, .* got int"),
    (lambda: Rounds(RING, 2, merge="shift"), r"such as rounds.shift or .* got 'shift'"),
    (
        lambda: Rounds(RING, 2, merge=rounds.blend),
        r"merge is called as merge\(now, sent, new\): too many positional",
    ),
    (lambda: Rounds(RING, 2, compression=codec.int8()), "wanted a Compression, .* Cod"),
    (lambda: rounds.blend(1.5), r"share must be in \[0, 1\], got 1.5"),
    (lambda: every(LOST, 2), FUNCTION),
    (
        lambda: every(RING, 2, delay=3),
        "merged after 3 steps, .* use a delay from 0 to 2",
    ),
    (
        lambda: methods.diloco(4, num_steps=0),
        "at least 1 step from one to the next, go",
    ),
    (
        lambda: methods.diloco(topology.ring(8)),
        r"num_workers must be a whole number, got <Topology.{0,60}$",
    ),
    (
        lambda: methods.diloco(4, num_steps=2.5),
        "steps between rounds must be a whole number",
    ),
    (
        lambda: methods.diloco(4, learning_rate=-1),
        "learning_rate must be at least 0, go",
    ),
    (lambda: methods.noloco(4, momentum=1.5), r"momentum must be in \[0, 1\), got 1.5"),
    (lambda: policy.merged(LOST, 2), FUNCTION),
    (lambda: policy.merged(LOST, 10), FUNCTION),
    (
        lambda: policy.damping(RING, lambda step: 2.0, 4).turn(0),
        r"in \[0, 1\], got 2.0 at 0",
    ),
    (lambda: policy.thinning(8, 1, 1.0, 5, 2), "2 <= least <= degree .* got 2 and 1"),
    (lambda: analysis.consensus_factor(LOST), FUNCTION),
    (lambda: analysis.exact_after(LOST), FUNCTION),
    (lambda: analysis.traffic(LOST, 1e6), FUNCTION),
    # The loss of a task, of which the program says it as a sentence.
    (lambda: poison_gradient(lambda *_: 1.0)(1, (), 1, None), "must return .loss, .mo"),
]


@pytest.mark.parametrize(("call", "wanted"), CALLS, ids=range(len(CALLS)))
def test_a_wrong_call_is_answered_by_one_sentence(call, wanted):
    with pytest.raises((TypeError, ValueError), match=wanted) as caught:
        call()
    assert "\n" not in str(caught.value)
