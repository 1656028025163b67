"""GPTs in Hugging Face's layout, against transformers and its recorded logits."""

import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from tests import tiny
from tests.changes import changed
from tests.record_peers import SMALL_GPT, TOKENS, numbers, recorded
from train.checkpoint import main
from train.data.token_files import SEPARATOR, prepare_text
from train.models.gpt import GPT, GPTConfig
from train.models.gpt2 import read_gpt2, write_gpt2
from train.run.loop import train
from train.run.scores import read_trained
from train.store.log import read_metrics
from train.tasks.text import TextTask

SIZES = {**SMALL_GPT, "width": 16}
OURS = GPTConfig(**SIZES, init_std=0.5)
GPT2 = changed(OURS, bias=True, norm_epsilon=1e-2)
FIELDS = {
    **{"model_type": "gpt2", "vocab_size": 11, "n_positions": 8, "n_layer": 2},
    **{"n_head": 2, "n_embd": 16, "layer_norm_epsilon": 1e-2},
}
PARTS = {  # Of a block, [in, out].
    "ln_1": (16,),
    "attn.c_attn": (16, 48),
    "attn.c_proj": (16, 16),
    "ln_2": (16,),
    "mlp.c_fc": (16, 64),
    "mlp.c_proj": (64, 16),
}


def save(folder, fields=FIELDS, **changes):
    """Writes the model of `record_peers`, with other arrays for those of `changes`."""
    shapes = {"wte.weight": (11, 16), "wpe.weight": (8, 16)}
    parts = {f"h.{i}.{name}": shape for i in range(2) for name, shape in PARTS.items()}
    for name, shape in {**parts, "ln_f": (16,)}.items():
        shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[-1:]}
    arrays = {f"transformer.{name}": shape for name, shape in shapes.items()}
    arrays = {name: numbers(name, shape) for name, shape in arrays.items()} | changes
    folder.mkdir(exist_ok=True)
    kept = {name: x for name, x in arrays.items() if x is not None}
    save_file(kept, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


def read(folder, config=GPT2):
    return read_gpt2(folder, json.loads((folder / "config.json").read_text()), config)


def logits(config, params, tokens=TOKENS):
    model = nnx.eval_shape(lambda: GPT(config, rngs=nnx.Rngs(0)))
    nnx.update(model, params)
    return np.asarray(nnx.jit(GPT.__call__)(model, jnp.asarray(tokens)))


def drawn(config):
    """Parameters of which none is as at the start."""
    shapes = nnx.eval_shape(lambda: nnx.state(GPT(config, rngs=nnx.Rngs(0))))
    random = np.random.default_rng(0)
    return jax.tree.map(lambda x: random.normal(size=x.shape).astype("f4"), shapes)


def same(one, other):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    jax.tree.map(np.testing.assert_array_equal, one, other)


def test_a_gpt_2_is_read_with_its_biases(tmp_path):
    found = logits(GPT2, read(save(tmp_path)))
    np.testing.assert_allclose(found, recorded("gpt2"), rtol=1e-4, atol=1e-4)


def test_old_files_without_prefix_and_with_masks_are_read(tmp_path):
    wanted = read(save(tmp_path))
    arrays = load_file(tmp_path / "model.safetensors")
    old = {name.removeprefix("transformer."): x for name, x in arrays.items()}
    old |= {"h.0.attn.bias": np.ones((1, 1, 8, 8), np.float32)}
    old |= {
        "h.1.attn.masked_bias": np.float32([-1e4]),
        "lm_head.weight": old["wte.weight"],
    }
    save_file(old, tmp_path / "model.safetensors")
    same(read(tmp_path), wanted)


def test_half_precision_becomes_float32(tmp_path):
    name = "transformer.ln_f.weight"
    half = numbers(name, (16,)).astype(jnp.bfloat16)
    params = read(save(tmp_path, **{name: half}))
    found = params["norm"]["scale"][...]
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, half.astype(np.float32))


@pytest.mark.parametrize("config", [OURS, GPT2, changed(GPT2, mlp="exact_gelu")])
def test_what_is_written_is_read_bit_for_bit(config, tmp_path):
    params = drawn(config)
    names = load_file(save(tmp_path) / "model.safetensors").keys()
    write_gpt2(tmp_path, config, params, {}, end=None)
    same(read(tmp_path, config), params)
    assert load_file(tmp_path / "model.safetensors").keys() == names


@pytest.mark.parametrize(
    ("bias", "mlp"), [(False, "gelu"), (True, "gelu"), (True, "exact_gelu")]
)
def test_transformers_has_our_logits_and_we_have_its(bias, mlp, tmp_path):
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    import torch

    config = changed(GPT2, bias=bias, mlp=mlp)
    params = jax.tree.map(lambda x: x / 4, drawn(config))
    (tmp_path / "ours").mkdir()
    write_gpt2(tmp_path / "ours", config, params, {}, end=None)
    model = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "ours").eval()
    with torch.no_grad():
        theirs = model(torch.from_numpy(TOKENS)).logits.numpy()
    np.testing.assert_allclose(theirs, logits(config, params), rtol=1e-5, atol=1e-5)
    model.save_pretrained(tmp_path / "theirs")
    same(read(tmp_path / "theirs", config), params)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"model_type": "llama"}, "must say model_type = gpt2 for a GPT, got llama"),
        ({"activation_function": "relu"}, "must say activation_function = gelu_new"),
        ({"activation_function": "gelu"}, "set --task.model.mlp exact_gelu$"),
        ({"tie_word_embeddings": False}, "must say tie_word_embeddings = True"),
        ({"n_head": 4, "layer_norm_epsilon": 1e-6}, "set --task.model.num-heads 4"),
    ],
)
def test_another_kind_or_size_of_model_is_refused(fields, words, tmp_path):
    save(tmp_path, FIELDS | fields)
    with pytest.raises(ValueError, match=words):
        read(tmp_path)


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ({"norm": "rms"}, "models with norm = layer, got rms"),
        ({"positions": "rotary"}, "with positions = learned, got rotary"),
        ({"num_kv_heads": 1}, "with num_kv_heads = None, got 1"),
        ({"mlp": "swiglu"}, "with mlp = gelu, got swiglu"),
        ({"hidden": 8}, "with hidden = None, got 8"),
        ({"tied": False}, "with tied = True, got False"),
    ],
)
def test_parts_that_gpt_2_has_not_are_refused(part, words, tmp_path):
    with pytest.raises(ValueError, match=words):
        read(save(tmp_path), changed(GPT2, **part))


def test_biases_that_the_config_has_not_are_refused(tmp_path):
    config = changed(GPT2, bias=False)
    with pytest.raises(ValueError, match=r"set --task\.model\.bias$"):
        read(save(tmp_path), config)


def test_incomplete_files_get_a_sentence(tmp_path):
    save(tmp_path, **{"transformer.h.1.mlp.c_fc.weight": None})
    with pytest.raises(ValueError, match=r"lacks 1 arrays, such as h\.1\.mlp\.c_fc\.w"):
        read(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match="is not a whole safetensors file"):
        read(tmp_path)
    path.unlink()
    with pytest.raises(ValueError, match=r"has no model\.safetensors, the weights in"):
        read(tmp_path)


NORM = "transformer.ln_f.weight"
SHAPE = r"must have transformer\.ln_f\.weight as \(16,\) numbers of F16, .*, got "


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"data_offsets": [0, 10**9]}, "is not a whole safetensors file"),
        ({"data_offsets": [2**63, 2**64 - 1]}, "is not a whole safetensors file"),
        ({"data_offsets": [64, 128]}, "is not a whole safetensors file"),
        ({"shape": [2**62, 4]}, "is not a whole safetensors file: .* overflow"),
        ({"shape": [-16]}, "is not a whole safetensors file"),
        ({"shape": [4, 4]}, SHAPE + r"\(4, 4\) of F32"),
        ({"dtype": "I32"}, SHAPE + r"\(16,\) of I32"),
        ({"dtype": "F64"}, "is not a whole safetensors file"),
        ({"dtype": "Q8"}, "is not a whole safetensors file"),
    ],
)
def test_a_header_that_lies_gets_a_sentence(fields, words, tmp_path):
    path = save(tmp_path) / "model.safetensors"
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    header[NORM] |= fields
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[end:])
    with pytest.raises(ValueError, match=words):
        read(tmp_path)


@pytest.mark.parametrize("size", [0, 1, 10**8, 2**63, 2**64 - 1])
def test_a_header_of_another_length_gets_a_sentence(size, tmp_path):
    path = save(tmp_path) / "model.safetensors"
    path.write_bytes(size.to_bytes(8, "little") + path.read_bytes()[8:])
    with pytest.raises(ValueError, match="is not a whole safetensors file"):
        read(tmp_path)


def test_arrays_that_a_gpt_has_not_are_refused_and_not_read(tmp_path):
    one = np.ones(16, np.float32)
    save(tmp_path, **{"ln_f.weight": one})
    with pytest.raises(ValueError, match=r"two arrays ln_f\.weight, with and without"):
        read(tmp_path)
    save(tmp_path, **{"transformer.h.2.ln_1.weight": one})
    with pytest.raises(ValueError, match=r"has .*h\.2\.ln_1\.weight, which no GPT of"):
        read(tmp_path)
    size = 10**12  # It takes no place on the disk, and would take it in memory.
    fields = {"dtype": "F32", "shape": [size // 4], "data_offsets": [0, size]}
    text = json.dumps({"x": fields}).encode()
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + size)
    with pytest.raises(ValueError, match=r"model\.safetensors lacks 28 arrays"):
        read(tmp_path)


@pytest.mark.parametrize("name", ["n_layer", "vocab_size", "layer_norm_epsilon"])
@pytest.mark.parametrize(
    "value", [-1, 0, "2", None, True, [], {}, 10**39, float("nan"), float("inf")]
)
def test_wild_sizes_of_a_config_get_a_sentence(name, value, tmp_path):
    save(tmp_path, FIELDS | {name: value})
    with pytest.raises(ValueError, match=f"must have {name} as a.* above 0"):
        read(tmp_path)


@pytest.mark.parametrize("kind", ["FIFO", "device", "folder"])
def test_what_is_no_file_of_weights_is_not_waited_for(kind, tmp_path):
    path = save(tmp_path) / "model.safetensors"
    path.unlink()
    make = {"FIFO": os.mkfifo, "folder": os.mkdir}
    make.get(kind, lambda path: path.symlink_to("/dev/zero"))(path)
    with pytest.raises((OSError, ValueError), match=f"got a {kind}|has no model"):
        read(tmp_path)


@pytest.fixture(scope="module")
def text_run(tmp_path_factory):
    """A run on text with a vocabulary of its own."""
    folder = tmp_path_factory.mktemp("text")
    lines = [f"{a} and {b} and so on, née {a}\n" for a in "abcdef" for b in "xyz"]
    (folder / "text.txt").write_text(SEPARATOR.join(lines))
    prepare_text([folder / "text.txt"], folder / "data", 280, held_out_share=0.3)
    model = GPTConfig(vocabulary=280, context=8, num_layers=1, num_heads=2, width=8)
    task = TextTask(data=str(folder / "data"), model=model, sample_tokens=3)
    config = changed(tiny.config, task=task, num_steps=3)
    train(config, folder / "run")
    return config, folder / "run"


@pytest.mark.nightly
def test_a_run_is_exported_and_another_begins_with_it(text_run, tmp_path, capsys):
    config, run = text_run
    folder = tmp_path / "models" / "gpt2"
    assert main(["export", str(run), "--format", "gpt2", "--to", str(folder)]) == 0
    assert f"{folder}: mean of step 3, " in capsys.readouterr().out
    mean, _ = read_trained(run).mean()
    same(read(folder, config.task.model), mean)
    next_config = changed(
        config,
        optimizer=dict(learning_rate=0.0, final_learning_rate=0.0, weight_decay=0.0),
    )
    outcome = train(next_config, tmp_path / "next", init_from=folder)
    for got, wanted in zip(
        jax.tree.leaves(outcome.state.params), jax.tree.leaves(mean), strict=True
    ):
        np.testing.assert_allclose(got[1], wanted, rtol=1e-6)
    (row,) = (r for r in read_metrics(tmp_path / "next") if "init_from" in r)
    assert row["init_from"] == str(folder)
    shorter = changed(config.task.model, context=4)
    other = changed(config, task=dict(model=shorter))
    with pytest.raises(ValueError, match=r"set --task\.model\.context 8$"):
        train(other, tmp_path / "other", init_from=folder)


@pytest.mark.slow
def test_transformers_has_the_tokens_of_an_exported_run(text_run, tmp_path):
    transformers = pytest.importorskip("transformers")
    _, run = text_run
    folder = tmp_path / "gpt2"
    main(["export", str(run), "--worker", "2", "--format", "gpt2", "--to", str(folder)])
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.GPT2LMHeadModel.from_pretrained(folder)
    assert tokenizer.eos_token_id == model.config.eos_token_id == 0
    text = "née a and x"
    assert tokenizer.decode(tokenizer.encode(text)) == text
