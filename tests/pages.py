"""What the pages of the documentation speak of: commands, and public names."""

import json
import subprocess
import sys
from types import ModuleType

import decentjax
from tests.checkout import ENV, ROOT

# What an extra brings, by the names that are imported. The program has `train` always.
MODULES = {
    "train": set(),
    "text": {"num2words", "sacrebleu", "tensorflow_datasets", "tokenizers"},
    "images": {"sklearn", "tensorflow_datasets"},
    "gpu": {"jax_plugins", "jax_cuda12_plugin", "jax_cuda12_pjrt"},
    "preflight": {"jax_plugins", "jax_cuda12_plugin", "jax_cuda12_pjrt"},
    "emulate": {"pyroute2"},
    "tls": {"cryptography"},
    "wandb": {"wandb"},
    "mlflow": {"mlflow"},
    "navigate": {"xminigrid"},
    "trackio": {"trackio"},
    "meteor": {"nltk"},
    "datasets": {"datasets"},
    "rivals": {"torch", "decent_dp"},
    "docs": {"latex2mathml", "material", "mkdocs", "mkdocstrings"},
    "test": {"hypothesis", "importlinter", "pyright", "pytest", "ruff"},
}

# Runs commands in one process, where some packages are unavailable. Each is as good
# as alone: it ends while it reads its options.
RUN_ALL = """
import contextlib, io, json, runpy, sys

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in hidden:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

hidden, commands = json.load(sys.stdin)
sys.meta_path.insert(0, Hidden())
results = []
for module, *arguments in commands:
    sys.argv, text, code = [module, *arguments], io.StringIO(), None
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
        try:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        except SystemExit as ended:
            code = ended.code
    results.append([code, text.getvalue()])
print(json.dumps(results))
"""


def run_all(commands: list[tuple[str, ...]], extras: set[str]) -> list[list]:
    """Exit code, or its sentence, and output of each."""
    installed = set().union(*(MODULES[extra] for extra in extras))
    hidden = set().union(*MODULES.values()) - installed
    done = subprocess.run(
        [sys.executable, "-c", RUN_ALL],
        input=json.dumps([sorted(hidden), commands]),
        cwd=ROOT,
        env=ENV | {"COLUMNS": "200"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


CONSTANTS = {"AXIS"}  # The reference has them in a sentence.


def public_names() -> set[str]:
    """The public names of the library, those of its modules as "topology.ring"."""
    things = {name: getattr(decentjax, name) for name in decentjax.__all__}
    modules = {x: thing for x, thing in things.items() if isinstance(thing, ModuleType)}
    core = {*things} - {*modules}
    rest = (
        {f"{name}.{x}" for x in public(module) - core}
        for name, module in modules.items()
    )
    return core.union(*rest) - CONSTANTS


def public(module: ModuleType) -> set[str]:
    """The names that a module gives, or else those that begin there."""
    begun = {
        name
        for name, thing in vars(module).items()
        if getattr(thing, "__module__", None) == module.__name__
    }
    names = getattr(module, "__all__", begun)
    return {name for name in names if not name.startswith("_")}
