"""How commands read configs and end: sentences and exit codes, never our traceback."""

import dataclasses
import errno
import json
import os
import re
import signal
import subprocess
import sys
import typing
from pathlib import Path

import pytest

from decentjax.distributed.rendezvous import MissingError
from tests import tiny
from tests.checkout import ROOT
from tests.jobs import python
from train.__main__ import main as train_main
from train.cli.command import command, sentence
from train.cli.config_json import read_config, to_json
from train.cli.families import matching_configs
from train.cli.load import find_config, load_config
from train.cli.sections import KINDS
from train.config import (
    Config,
    OptimizerConfig,
    StepConfig,
    TopologyConfig,
    WorkersConfig,
)
from train.models.gpt import GPTConfig
from train.models.resnet import ResNetConfig
from train.models.transformer import TransformerConfig
from train.prepare import main as prepare_main
from train.run.history import read_history
from train.tasks.corpus import TranslationTask
from train.tasks.digits import DigitsTask
from train.tasks.hub_images import HubImagesTask
from train.tasks.hub_text import HubTextTask
from train.tasks.image_folder import ImageFolderTask
from train.tasks.imagenet import ImageNetTask
from train.tasks.numbers import NumbersTask
from train.tasks.shipped import MODULES, shipped_task
from train.tasks.text import TextTask

TINY = str(ROOT / "tests" / "tiny.py")
HEAD = """
from train.config import *
from train.models.gpt import GPTConfig
from train.tasks.stdlib import StdlibTask
task = StdlibTask(model=GPTConfig())
"""


def ended(error: BaseException) -> tuple[object, str]:
    """The exit code, or its sentence, of a command that meets an error."""
    with pytest.raises(SystemExit) as exit, command():
        raise error
    return exit.value.code


@pytest.mark.parametrize(
    ("error", "note", "code", "said"),
    [
        (ValueError("too few"), None, "error: too few", ""),
        (PermissionError(errno.EACCES, "Denied"), None, "error: Denied", ""),
        (ValueError("too few"), "at step 3", 70, "error: too few\n"),
        (OSError(errno.EIO, "Input/output"), "at step 3", 70, "error: Input/output\n"),
        (ConnectionResetError(errno.ECONNRESET, "Reset"), None, 70, "error: Reset\n"),
        (RuntimeError("can't start new thread"), None, 70, "error: this process may"),
        (MemoryError(), "at step 3", 70, "error: this process gets no more memory: "),
        (OSError(errno.ENOSPC, "Full"), None, 70, "error: Full\n"),
        (MissingError("none came"), None, 70, "error: none came\n"),
        (RuntimeError("broken"), "at step 3", 70, "RuntimeError: broken\nat step 3\n"),
        (FloatingPointError("nan"), "at step 3", 71, "error: nan\n"),
    ],
)
def test_the_code_that_no_restart_mends(error, note, code, said, monkeypatch, capsys):
    """Of a run alone and of peers: a job of processes has its own end."""

    def fail(*_):
        if note:
            error.add_note(note)
        raise error

    monkeypatch.setattr("train.__main__._begin", fail)
    with pytest.raises(SystemExit) as ended:
        train_main(["quickstart"])
    assert ended.value.code == code
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("num is 3"), "num is 3"),
        (FloatingPointError("the loss is nan"), "the loss is nan"),
        (FileNotFoundError("there is no a.py"), "there is no a.py"),
        (OSError(errno.EROFS, "Read-only file system", "a/b"), "Read-only .*: 'a/b'"),
        (OSError(errno.ENOSPC, "No space left on device"), "No space left on device"),
        (ModuleNotFoundError("No module named 'x'", name="x.y"), r".* package x\.y"),
        (ImportError("`google-cloud-storage` must be"), "`google-cloud-storage` must"),
    ],
)
def test_an_error_of_a_user_is_a_sentence(error, text):
    assert re.match(f"error: {text}", ended(error))


@pytest.mark.parametrize(
    "error",
    [
        TypeError("bug"),
        KeyError("bug"),
        RuntimeError("bug"),
        ModuleNotFoundError("No module named 'train.x'", name="train.x"),
        BrokenPipeError(errno.EPIPE, "Broken pipe"),  # Not of the output.
    ],
)
def test_a_bug_of_ours_keeps_its_traceback(error):
    if isinstance(error, BrokenPipeError):
        assert ended(error) == "error: Broken pipe"
        return
    with pytest.raises(type(error)), command():
        raise error


def test_a_full_disk_and_memory_are_one_sentence():
    """As tensorstore says it below orbax, and jax."""
    path = "/disk/run/checkpoints/5.orbax-checkpoint-tmp"
    disk = ValueError(
        f'RESOURCE_EXHAUSTED: Error writing "key/0.0" in OCDBT database at local file '
        f'"{path}/": Failed writing: "{path}/ocdbt.process_0/d/d3ac": Failed to write '
        "384076 bytes to file 7: No space left on device [os_error_code='28']\n..."
    )
    assert sentence(disk) == f"No space left on device: '{path}/'"
    memory = RuntimeError("RESOURCE_EXHAUSTED: Out of memory on GPU.\nBuffers:\n1 GiB")
    assert sentence(memory) == "RESOURCE_EXHAUSTED: Out of memory on GPU."


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a = 1\nconfig = Config(", r"line 2: SyntaxError: '\(' was never closed"),
        (b"config = 1\0", "SyntaxError: source code .* null bytes"),
        (b"name = '\xe9'\n", r"SyntaxError: .*can't decode byte 0xe9"),
        ("def f():\n  1 / 0\nf()", "line 2: ZeroDivisionError: division by zero"),
        ("import os\nraise SystemExit(0)", "line 2: SystemExit: 0"),
        ("import nosuch", "line 1: ModuleNotFoundError: No module named 'nosuch'"),
        ("config = 3", r"must define `config = Config\(...\)`, got 3"),
        (f"{HEAD}config = Config(nam='x')", "field 'nam': did you mean 'name'\\?"),
        (f"{HEAD}config = Config(zz='x')", "no field 'zz': it has name, num_steps, ta"),
        (f"{HEAD}config = Config(name='x')", "Config needs the field 'num_steps'"),
        (f"{HEAD}config = Config('x')", "takes fields by name, such as name=..., got"),
        (
            f"{HEAD}config = Config(name='x', task=task, num_steps='12')",
            "line 6: ValueError: Config.num_steps must be an integer .*, got '12'",
        ),
    ],
)
@pytest.mark.parametrize("folder", ["", "."])
def test_a_broken_config_file_is_named(folder, text, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = Path(folder or tmp_path) / "broken.py"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError, match=f"^{re.escape(str(path))}.*{message}"):
        load_config(path)


def test_a_config_that_is_no_file_is_a_sentence(tmp_path):
    (tmp_path / "folder.py").mkdir()
    for path in (tmp_path / "none.py", tmp_path / "folder.py"):
        with pytest.raises(FileNotFoundError, match=f"no config file {path}"):
            load_config(path)
    with pytest.raises(OSError, match="File name too long"):
        load_config(tmp_path / f"{'n' * 300}.py")


def test_a_file_beside_a_name_is_meant(tmp_path, monkeypatch):
    (tmp_path / "quickstar.py").write_text(FAMILY)
    monkeypatch.chdir(tmp_path)
    for given in ("quickstar", "./quickstar", tmp_path / "quickstar"):
        with pytest.raises(FileNotFoundError, match=r"did you mean .*quickstar\.py\?$"):
            load_config(Path(given))


FAMILY = f"""{HEAD}import dataclasses
config = Config(name='own', task=task, num_steps=120)
longer = dataclasses.replace(config, name='own_longer', num_steps=240)
copied = dataclasses.replace(longer, num_steps=360)
"""


def test_a_config_of_a_family_is_given_by_its_name(tmp_path):
    path = tmp_path / "own.py"
    path.write_text(FAMILY)
    for given, num_steps in (
        (path, 120),
        (f"{path}:own", 120),
        (f"{path}:config", 120),
        (f"{path}:longer", 240),
        # Not of the one that has the name too.
        (f"{path}:copied", 360),
    ):
        assert load_config(Path(given)).num_steps == num_steps
    message = (
        f"^{path} has no `nosuch`: use {path}:own, or another of its configs own, o"
    )
    with pytest.raises(ValueError, match=message):
        load_config(Path(f"{path}:nosuch"))
    with pytest.raises(FileNotFoundError, match=r"no config file .*/none\.py$"):
        load_config(tmp_path / "none.py:own")


def test_a_family_without_a_config_of_its_own_says_what_it_has(tmp_path):
    path = tmp_path / "own.py"
    path.write_text(re.sub(r"\bconfig( =|,)", r"first\1", FAMILY))
    message = (
        f"^{path} has no `config`: use {path}:own, or another of its configs own, o"
    )
    with pytest.raises(ValueError, match=message):
        load_config(path)
    path.write_text(FAMILY + "config = 3")
    with pytest.raises(ValueError, match=r"define `config = Config\(...\)`, got 3"):
        load_config(path)


@pytest.mark.parametrize(
    ("given", "file", "name"),
    [
        ("quickstart", "quickstart.py", "quickstart"),
        ("quality_ring", "quality.py", "quality_ring"),
        ("wmt14_fr_dadam_aer", "wmt14.py", "wmt14_fr_dadam_aer"),
        ("numbers_allreduce", "number_words.py", "numbers_allreduce"),
        ("peers_adpsgd", "peers.py", "peers_adpsgd"),
    ],
)
def test_a_name_leads_to_its_family(given, file, name):
    assert find_config(Path(given)) == (ROOT / "configs" / file, name)


def test_a_file_that_is_now_in_a_family_is_hinted_at():
    message = "no config file configs/quality_ring.py: did you mean quality_ring, which"
    with pytest.raises(FileNotFoundError, match=message):
        load_config(Path("configs/quality_ring.py"))


def test_a_pattern_stands_for_the_names_that_it_matches():
    names = ["accumadam_aer", "accumadam_complete", "allreduce"]
    names += ["dadam_aer", "dadam_complete"]
    found = matching_configs(Path("digits_*"))
    assert found == [Path(f"digits_{name}") for name in names]
    assert matching_configs(Path("own.py")) == [Path("own.py")]
    with pytest.raises(FileNotFoundError, match=r"is like digitz_\*"):
        matching_configs(Path("digitz_*"))


def test_no_family_has_the_name_of_a_module_of_python():
    """In the folder `configs` it would be taken for it."""
    files = (ROOT / "configs").glob("*.py")
    assert {path.stem for path in files} & sys.stdlib_module_names == set()


MADE = [
    tiny.config,
    *(getattr(tiny.config, field.name) for field in dataclasses.fields(Config)),
    TranslationTask(data="corpus", model=TransformerConfig()),
    TranslationTask(data="corpus", model=TransformerConfig()).decoding,
    DigitsTask(model=ResNetConfig()),
    NumbersTask(model=TransformerConfig()),
    ImageNetTask(model=ResNetConfig(num_classes=1000)),
    ImageFolderTask(data="folder", model=ResNetConfig()),
    HubImagesTask(data="folder", model=ResNetConfig()),
    HubTextTask(data="folder", model=GPTConfig()),
    TextTask(data="folder", model=GPTConfig()),
    TransformerConfig(),
    ResNetConfig(),
    GPTConfig(),
    *(kind() for kinds in KINDS.values() for kind in kinds.values()),
]
CONFIGS = [config for config in MADE if dataclasses.is_dataclass(config)]


def test_configs_of_every_class_are_checked_here():
    """All dataclasses that a Config can hold."""
    kinds, open_kinds = set(), [Config, *map(shipped_task, MODULES)]
    while open_kinds:
        kinds.add(kind := open_kinds.pop())
        hints = typing.get_type_hints(kind).values()
        inner = {x for hint in hints for x in (hint, *typing.get_args(hint))}
        open_kinds += [x for x in inner - kinds if dataclasses.is_dataclass(x)]
    assert {type(config) for config in CONFIGS} == kinds


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: type(config).__name__)
def test_no_field_holds_what_its_annotation_does_not(config):
    hints = typing.get_type_hints(type(config))
    for name in (field.name for field in dataclasses.fields(config)):
        hint = hints[name]
        wrong = [object(), [1], {}, b"a", 1j, float("nan"), float("inf"), 1e39, 10**39]
        wrong += [None] if type(None) not in typing.get_args(hint) else []
        wrong += ["zz"] if hint is not str and str not in typing.get_args(hint) else []
        wrong += [True] if hint is not bool else [1]
        has_floats = float in (hint, *typing.get_args(hint))
        wrong += [] if has_floats else [2.5, 2**31]
        for value in wrong:
            with pytest.raises(ValueError, match=rf"^{type(config).__name__}\.{name} "):
                dataclasses.replace(config, **{name: value})
        dataclasses.replace(config, **{name: getattr(config, name)})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TopologyConfig(name="rign"), "got 'rign': did you mean 'ring'"),
        (lambda: StepConfig(message_dtype="bfloat32"), "got 'bfloat32': did you m"),
        (lambda: StepConfig(xla_options="xla_a=1"), "a tuple, each part a string"),
        (
            lambda: OptimizerConfig(decay_steps=(0, "1")),
            "decay_steps must be a tuple, each part an i",
        ),
        (lambda: WorkersConfig(num_workers=True), "num_workers must be an integer of "),
        (lambda: OptimizerConfig(learning_rate="1e-3"), "a number that float32 holds"),
        (lambda: OptimizerConfig(learning_rate=10**400), "a number that float32 holds"),
        (lambda: ResNetConfig(depth=34), "one of 8, 18, 20, 50, got 34"),
    ],
)
def test_a_wrong_type_says_what_was_wanted_and_what_came(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_an_integer_is_taken_for_a_float():
    assert OptimizerConfig(weight_decay=0, clip_norm=1).weight_decay == 0


def with_fields(**changes: object) -> str:
    return json.dumps({**json.loads(to_json(tiny.config)), **changes})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1, 2]", "must hold a JSON object, got list"),
        ("3", "got int"),
        ("[" * 100_000, "is not JSON: maximum recursion depth"),
        ("{", "is not JSON: Expecting property name"),
        (b"\xff", "is not JSON: 'utf-8' codec"),
        ("{}", ": the task must be one of StdlibTask, .*, got None"),
        (with_fields(task=3), ": the task must be one of StdlibTask, .*, got 3"),
        (with_fields(num_steps="99"), ": Config.num_steps must be an integer"),
        (with_fields(num_steps={}), ": Config.num_steps must be an integer"),
        (with_fields(step=[]), r": step must be an object, .*, got \[\]"),
        (with_fields(later={}), ": a config of another version: 'later'"),
        (with_fields(optimizer={"nesterov": 1}), ": .* another version.*nesterov"),
        (with_fields(task={"kind": "Unheard"}), ": .* must be .*got Unheard"),
    ],
)
def test_a_broken_config_of_a_run_is_a_sentence_with_its_name(text, message, tmp_path):
    path = tmp_path / "config.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "seconds": 1, "loss": 1}\n')
    with pytest.raises(ValueError, match=f"^{re.escape(str(path))}.*{message}"):
        read_config(path)
    if not message.startswith(":"):  # The report has no need of the others.
        with pytest.raises(ValueError, match=f"^{re.escape(str(path))}.*{message}"):
            read_history(tmp_path)


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_a_config_that_windows_has_saved_is_read_as_it_was(encoding, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(to_json(tiny.config), encoding=encoding, newline="\r\n")
    assert read_config(path) == tiny.config


def refused(main, *arguments: object) -> str:
    with pytest.raises(SystemExit) as exit:
        main(list(map(str, arguments)))
    return exit.value.code


def test_what_the_system_refuses_is_a_sentence_with_the_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "file"
    file.write_text("")
    long = tmp_path / ("n" * 300)
    at = re.escape(str(file))
    for folder, message in [
        (file, f"{at} is a file: a run needs a folder of its own"),
        (file / "run", f"Not a directory: '{at}/run"),
        (long, f"File name too long: '{long}"),
        ("/proc/run", "No such file or directory: '/proc/run"),
        ("gs://bucket/run", "a folder must be in a file system of this machine"),
        (os.fsdecode(b"runs/\xff"), "the folder of a run must have a name in UTF-8"),
    ]:
        message = f"error: {message}"
        said = refused(train_main, TINY, "--run-dir", folder)
        assert re.match(message, said)
        assert "is a file" in said or "gs:" in said or "give another path" in said
    text = ("text", TINY, "--vocabulary", 300, "--held-out-share", 0.5)
    assert refused(prepare_main, *text, "--out", file / "x").endswith(
        f"'{file}'; give another path"
    )
    assert "there is no file or folder" in refused(
        prepare_main, "text", tmp_path / "none", "--out", tmp_path / "out"
    )
    out = ("--out", "gs://bucket/corpus")
    assert "must be in a file system" in refused(prepare_main, "wmt14", *out)
    assert not Path("gs:").exists()


@pytest.mark.parametrize(
    ("option", "value"), [("--seed", 2**64), ("--num-steps", 10**18), ("--seed", 2**32)]
)
def test_numbers_that_jax_would_cut_are_refused(option, value):
    """The key of a seed is that of its last 32 bits."""
    wanted = rf"error: Config\..* an integer of at most 2,147,483,647, got {value}$"
    assert re.match(wanted, refused(train_main, TINY, option, value))


def start(*arguments: str, **options) -> subprocess.Popen[str]:
    buffered = {**os.environ, "PYTHONUNBUFFERED": "", **options.pop("env", {})}
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=buffered,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def test_a_command_whose_output_is_closed_ends_quietly():
    for arguments in (HELP, ("-c", SPEAKING), ("-c", PRINTING)):
        reader, writer = os.pipe()
        os.close(reader)
        with start(*arguments, stdout=writer) as process:
            os.close(writer)
            _, errors = process.communicate()
        assert (process.returncode, errors) == (141, "")


HELP = ("-m", "train.launch", "--help")
PRINTING = """
from train.cli.command import command
with command():
    print("a")  # Which Python keeps until the end.
"""
# rich ends the process by itself, with another code.
SPEAKING = """
from rich.console import Console
from train.cli.command import command
with command():
    for _ in range(10_000):
        Console().print("a")
"""


def test_a_full_output_is_a_sentence():
    for arguments in (HELP, ("-c", PRINTING)):
        with open("/dev/full", "w") as full, start(*arguments, stdout=full) as process:
            _, errors = process.communicate()
        assert process.returncode == 1
        assert errors == "error: No space left on device\n"


QUIET = """
import os, sys
from train.cli import plugins

def hidden_on(device, platforms):
    plugins.reveal_cuda_plugin()
    plugins._DEVICES, os.environ["JAX_PLATFORMS"] = (device,), platforms
    plugins.hide_cuda_plugin()
    return "jax_cuda12_plugin" in sys.modules

assert not hidden_on("/dev/null", "")  # A device that exists.
assert not hidden_on("/dev/none", "cuda,cpu")
assert hidden_on("/dev/none", "cpu")
assert hidden_on("/dev/none", "")
import jax
print(jax.devices())
"""


@pytest.mark.slow
def test_without_a_gpu_nothing_is_said_of_gpus():
    """Though the compiler for GPUs is installed; it prints when jax is imported."""
    with start("-c", QUIET, stdout=subprocess.PIPE) as process:
        assert process.communicate() == ("[CpuDevice(id=0)]\n", "")
    with start("-m", "train.evaluate", "nowhere") as process:
        _, errors = process.communicate()
    assert errors == "error: nowhere holds no run: it has no config.json\n"


@pytest.mark.slow
def test_ctrl_c_is_a_word_and_code_130_also_while_importing(tmp_path):
    # A signal just before a sleep is handled after it.
    waiting = "import time\nprint('now', flush=True)\nwhile True: time.sleep(0.1)\n"
    (tmp_path / "config.py").write_text(waiting)
    (tmp_path / "tyro.py").write_text(waiting)  # Instead of the package.
    path = {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    in_main = ("-m", "train.preflight", str(tmp_path / "config.py"))
    for arguments, env in ((in_main, {}), (("-m", "train.prepare"), path)):
        with start(*arguments, stdout=subprocess.PIPE, env=env) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "now\n"
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate()
        assert process.returncode == 130, errors
        assert errors.splitlines()[-1] == "interrupted"
        assert "Traceback" not in errors


@pytest.mark.slow
def test_a_config_that_ends_the_process_is_an_error(tmp_path):
    path = tmp_path / "exits.py"
    path.write_text("import sys\nsys.exit(0)\n")
    with start("-m", "train", str(path)) as process:
        _, errors = process.communicate()
    assert process.returncode == 1
    assert errors.endswith("exits.py, line 2: SystemExit: 0\n")


@pytest.mark.slow
@pytest.mark.parametrize("command", ["advise", "report"])
def test_a_command_without_a_task_loads_no_model(command):
    program = (
        "import sys; from decentjax import __main__\n"
        f"sys.argv = ['decentjax', {command!r}, '--help']\n"
        "try:\n    __main__.main()\nexcept SystemExit:\n    pass\n"
        "assert 'jax' in sys.modules and 'flax' not in sys.modules"
    )
    python("-c", program)


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("Unable to initialize backend 'cuda': INTERNAL: none", "JAX_PLATFORMS=cpu"),
        ("INTERNAL: invalid usage. Last NCCL warning: 'Duplicate GPU detected'", "own"),
    ],
)
def test_a_gpu_that_a_process_cannot_have_gets_a_sentence(text, advice):
    # As jax 0.11 says it on a machine with one GPU, to the second process of a job.
    said = sentence(RuntimeError(text))
    assert advice in said
    assert text.partition(". Last")[0] in said
    assert "Last NCCL" not in said
