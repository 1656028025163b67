"""GPTs in the layout of Hugging Face's GPT-2: model.safetensors and config.json.

`transformers.GPT2LMHeadModel.from_pretrained` reads what is written here, and what its
`save_pretrained` writes is read here.
"""

import dataclasses
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from train.fields import fits, words
from train.models.gpt import GPT, GPTConfig
from train.plain_files import check_plain

WEIGHTS, CONFIG = "model.safetensors", "config.json"
DTYPES = "F16", "BF16", "F32", "F64"
# The names of GPT-2's parts for those of a GPT. Kernels are [in, out] in both.
NAMES = {
    "tokens": "wte",
    "positions": "wpe",
    "blocks": "h",
    "attention_norm": "ln_1",
    "qkv": "attn.c_attn",
    "out": "attn.c_proj",
    "mlp_norm": "ln_2",
    "up": "mlp.c_fc",
    "down": "mlp.c_proj",
    "norm": "ln_f",
    "embedding": "weight",
    "kernel": "weight",
    "scale": "weight",
}
# Fields of a GPTConfig, by what GPT-2's config calls them and has by default.
SIZES = {
    "vocabulary": ("vocab_size", 50257),
    "context": ("n_positions", 1024),
    "num_layers": ("n_layer", 12),
    "num_heads": ("n_head", 12),
    "width": ("n_embd", 768),
    "norm_epsilon": ("layer_norm_epsilon", 1e-5),
}
# Names of the activation by the kind of a GPT's perceptron, the default first.
ACTIVATIONS = {"gelu": ("gelu_new", "gelu_pytorch_tanh"), "exact_gelu": ("gelu",)}
# What a GPT has no other form of, the default first.
FORMS = {
    "tie_word_embeddings": (True,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
}
# The causal mask, of old files, and the tied head, which is the embedding again.
NO_WEIGHTS = re.compile(r"h\.\d+\.attn\.(masked_)?bias|lm_head\.weight")


def write_gpt2(
    folder: Path, config: Any, params: Any, facts: dict[str, str], end: int | None
) -> None:
    """Writes a model; biases that it does not have are zeros.

    Args:
      folder: folder to write to.
      config: config of the model.
      params: parameters of the model.
      facts: what else the file of the weights says.
      end: number of the token between two documents, if the text has one.

    Raises:
      ValueError: if the model is no GPT.
    """
    config = _check_gpt(config)
    given = dict(_named(params))
    shapes = _shapes(dataclasses.replace(config, bias=True))
    arrays = {
        f"transformer.{name}": np.asarray(given.get(name, np.zeros(x.shape, x.dtype)))
        for name, x in _named(shapes)
    }
    save_file(arrays, folder / WEIGHTS, metadata={**facts, "format": "pt"})
    fields = {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        **{name: getattr(config, field) for field, (name, _) in SIZES.items()},
        **{name: values[0] for name, values in FORMS.items()},
        "activation_function": ACTIVATIONS[config.mlp][0],
        "resid_pdrop": config.dropout,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "initializer_range": config.init_std,
        "bos_token_id": end,
        "eos_token_id": end,
    }
    (folder / CONFIG).write_text(json.dumps(fields, indent=2) + "\n")


def read_gpt2(folder: Path, fields: dict[str, Any], config: Any) -> nnx.State:
    """Returns the parameters of a model, float32.

    Args:
      folder: folder with the model.
      fields: its config.json.
      config: config of the model that they are for.

    Raises:
      ValueError: if the two are of other kinds or sizes, with the options that set the
        sizes.
    """
    config = _check_gpt(config)
    _check_form(folder, fields)
    _check_activation(folder, fields, config)
    _check_sizes(folder, fields, config)
    shapes, whole = _shapes(config), _shapes(dataclasses.replace(config, bias=True))
    needed = [name for name, _ in _named(shapes)]
    arrays = _read_arrays(folder, dict(_named(whole)), needed)
    # A GPT without biases is one whose biases are zero.
    if any(np.any(x) for name, x in arrays.items() if name not in needed):
        raise ValueError(
            f"the model of {folder} has biases, and the config none: set "
            "--task.model.bias"
        )
    leaves = [arrays[name].astype(np.float32) for name in needed]
    return jax.tree.unflatten(jax.tree.structure(shapes), leaves)


def _named(params: Any) -> list[tuple[str, Any]]:
    """The arrays of a GPT, each with GPT-2's name for it, such as h.0.ln_1.weight."""
    found = []
    for path, x in jax.tree.leaves_with_path(params):
        parts = jax.tree_util.keystr(path, simple=True, separator=".").split(".")
        # Some versions of flax name the value of a parameter.
        names = [NAMES.get(part, part) for part in parts if part != "value"]
        found.append((".".join(names), x))
    return found


def _shapes(config: GPTConfig) -> nnx.State:
    return nnx.eval_shape(lambda: nnx.state(GPT(config, rngs=nnx.Rngs(0))))


def _check_gpt(config: Any) -> GPTConfig:
    if not isinstance(config, GPTConfig):
        kind = type(config).__name__
        raise ValueError(f"GPT-2's layout is one for GPTs, got a model of {kind}")
    default = GPTConfig()
    for name in ("norm", "positions", "num_kv_heads", "mlp", "hidden", "tied"):
        wanted, got = getattr(default, name), getattr(config, name)
        if got != wanted and got not in ACTIVATIONS:
            raise ValueError(
                f"GPT-2's layout is one for models with {name} = {wanted}, got {got}"
            )
    return config


def _read_arrays(
    folder: Path, wanted: dict[str, Any], needed: Sequence[str]
) -> dict[str, np.ndarray]:
    """The weights by name, without the prefix that a model with a head gives them.

    Args:
      folder: folder with the model.
      wanted: shapes of all that it may have: nothing else is read.
      needed: names of those that must be there.
    """
    path = folder / WEIGHTS
    check_plain(path)
    if not path.is_file():
        raise ValueError(
            f"{folder} has no {WEIGHTS}, the weights in one file: write it with "
            "transformers' save_pretrained"
        )
    try:
        with safe_open(path, framework="np") as file:
            kinds = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            names = _check_arrays(path, kinds, wanted, needed)
            return {short: file.get_tensor(name) for short, name in names.items()}
    except (SafetensorError, MemoryError) as error:
        raise ValueError(f"{path} is not a whole safetensors file: {error}") from error


def _check_arrays(
    path: Path, kinds: dict[str, Any], wanted: dict[str, Any], needed: Sequence[str]
) -> dict[str, str]:
    """The names in a file by those without prefix, once its header is that of a GPT."""
    names: dict[str, str] = {}
    for name in kinds:
        short = name.removeprefix("transformer.")
        if short in names:
            raise ValueError(f"{path} has two arrays {short}, with and without prefix")
        if not NO_WEIGHTS.fullmatch(short):
            names[short] = name
    if missing := [name for name in needed if name not in names]:
        raise ValueError(f"{path} lacks {len(missing)} arrays, such as {missing[0]}")
    for short, name in names.items():
        if short not in wanted:
            raise ValueError(
                f"{path} has an array {name}, which no GPT of its sizes has"
            )
        shape, dtype = tuple(kinds[name].get_shape()), kinds[name].get_dtype()
        if shape != wanted[short].shape or dtype not in DTYPES:
            raise ValueError(
                f"{path} must have {name} as {wanted[short].shape} numbers of "
                f"{', '.join(DTYPES)}, got {shape} of {dtype}"
            )
    return names


def _check_form(folder: Path, fields: dict[str, Any]) -> None:
    for name, default in SIZES.values():
        got = fields.get(name, default)
        if not (fits(got, type(default)) and got > 0):
            raise ValueError(
                f"{folder / CONFIG} must have {name} as {words(type(default))}, above "
                f"0, got {got!r}"
            )
    forms = {"model_type": ("gpt2",), **FORMS}
    for name, values in forms.items():
        if (got := fields.get(name, values[0])) not in values:
            raise ValueError(
                f"{folder / CONFIG} must say {name} = {values[0]} for a GPT, got {got}"
            )


def _check_activation(folder: Path, fields: dict[str, Any], config: GPTConfig) -> None:
    known = {name: mlp for mlp, names in ACTIVATIONS.items() for name in names}
    got = fields.get("activation_function", next(iter(known)))
    if got not in known:
        raise ValueError(
            f"{folder / CONFIG} must say activation_function = {' or '.join(known)} "
            f"for a GPT, got {got}"
        )
    if known[got] != config.mlp:
        raise ValueError(
            f"the model of {folder} has another perceptron than the config: set "
            f"--task.model.mlp {known[got]}"
        )


def _check_sizes(folder: Path, fields: dict[str, Any], config: GPTConfig) -> None:
    sizes = {field: fields.get(*named) for field, named in SIZES.items()}
    options = [
        f"--task.model.{field.replace('_', '-')} {size}"
        for field, size in sizes.items()
        if getattr(config, field) != size
    ]
    if options:
        raise ValueError(
            f"the model of {folder} has other sizes than the config: set "
            f"{' '.join(options)}"
        )
