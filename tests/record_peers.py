"""Records what torch and transformers compute, for the tests of the models.

    python tests/record_peers.py

writes peers.npz beside this file. It needs torch and transformers, the tests do not:
they make the same weights again, from `numbers`, and compare the logits.
"""

import math
import zlib
from pathlib import Path

import numpy as np

PEERS = Path(__file__).with_name("peers.npz")

TOKENS = np.array([[3, 1, 4, 1, 5, 9], [2, 6, 5, 3, 5, 8]])
SOURCE = np.array([[3, 1, 4, 1, 5], [9, 2, 6, 0, 0], [5, 3, 0, 0, 0]])
TARGET = np.array([[1, 5, 8, 9], [1, 7, 9, 0], [1, 3, 2, 3]])
SMALL_GPT = {"vocabulary": 11, "context": 8, "num_layers": 2, "num_heads": 2}
SMALL_TRANSFORMER = {"vocabulary": 11, "num_layers": 2, "num_heads": 2, "hidden": 24}
SIZES = {  # Of the paper's Transformers: width, heads, hidden, vocabulary.
    "base": (512, 8, 2048, 37120),
    "big": (1024, 16, 4096, 32000),
}


def numbers(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Random float32 numbers, of the name and the shape alone.

    Vectors are in [0.5, 1.5), matrices and kernels [out, in, ...] normal over sqrt(in).
    """
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    if len(shape) == 1:
        return rng.uniform(0.5, 1.5, shape).astype(np.float32)
    fan_in = np.prod(shape[1:])
    return (rng.standard_normal(shape) / np.sqrt(fan_in)).astype(np.float32)


def images() -> np.ndarray:
    """Three images, [B, C, H, W]; no two dims, and no two halves of one, are equal."""
    return np.random.default_rng(0).standard_normal((3, 2, 40, 56), np.float32)


def recorded(name: str) -> np.ndarray:
    with np.load(PEERS) as file:
        return file[name]


def _fill(module, zero: tuple[str, ...] = ()):
    """Gives all parameters and statistics of a torch module their numbers."""
    import torch

    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.dtype == torch.float32:
            values = numbers(name, tuple(tensor.shape))
            if name.endswith(zero):
                values = np.zeros_like(values)
            tensor.data.copy_(torch.from_numpy(values))
    return module


def _gpt(epsilon: float, zero: tuple[str, ...]) -> np.ndarray:
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=SMALL_GPT["vocabulary"],
        n_positions=SMALL_GPT["context"],
        n_layer=SMALL_GPT["num_layers"],
        n_head=SMALL_GPT["num_heads"],
        n_embd=16,
        activation_function="gelu_new",
        layer_norm_epsilon=epsilon,
    )
    model = _fill(GPT2LMHeadModel(config), zero).eval()
    return model(torch.from_numpy(TOKENS)).logits.numpy()


def _transformer() -> np.ndarray:
    import torch

    width, num_layers = 16, SMALL_TRANSFORMER["num_layers"]
    body = torch.nn.Transformer(
        width,
        SMALL_TRANSFORMER["num_heads"],
        num_layers,
        num_layers,
        SMALL_TRANSFORMER["hidden"],
        dropout=0.0,
        batch_first=True,
    )
    _fill(body)
    vocabulary = SMALL_TRANSFORMER["vocabulary"]
    table = torch.from_numpy(numbers("embedding", (vocabulary, width)))

    def embed(tokens):
        places = torch.tensor(
            [
                [
                    wave(t / 10000 ** (2 * i / width))
                    for i in range(width // 2)
                    for wave in (math.sin, math.cos)
                ]
                for t in range(tokens.shape[1])
            ]
        )
        return table[tokens] * width**0.5 + places

    source, target = torch.from_numpy(SOURCE), torch.from_numpy(TARGET)
    length = target.shape[1]
    out = body(
        embed(source),
        embed(target),
        tgt_mask=torch.triu(torch.ones(length, length, dtype=torch.bool), 1),
        src_key_padding_mask=source == 0,
        tgt_key_padding_mask=target == 0,
        memory_key_padding_mask=source == 0,
    )
    return (out @ table.T).numpy()


def _num_parameters(size: str) -> int:
    import torch

    width, num_heads, hidden, vocabulary = SIZES[size]
    with torch.device("meta"):
        body = torch.nn.Transformer(width, num_heads, 6, 6, hidden)
        embedding = torch.nn.Embedding(vocabulary, width)
    return sum(p.numel() for part in (body, embedding) for p in part.parameters())


def _resnet(depth: int) -> dict[str, np.ndarray]:
    import torch
    from transformers import ResNetConfig, ResNetForImageClassification

    factor = 4 if depth == 50 else 1
    config = ResNetConfig(
        num_channels=2,
        embedding_size=4,
        hidden_sizes=[factor * width for width in (4, 8, 16, 32)],
        depths={18: [2, 2, 2, 2], 50: [3, 4, 6, 3]}[depth],
        layer_type={18: "basic", 50: "bottleneck"}[depth],
        downsample_in_bottleneck=False,
        num_labels=5,
    )
    model = _fill(ResNetForImageClassification(config))
    inputs = torch.from_numpy(images())
    out = {f"resnet{depth}_eval": model.eval()(inputs).logits.numpy()}
    out[f"resnet{depth}_train"] = model.train()(inputs).logits.numpy()
    norm = model.resnet.embedder.embedder.normalization
    out[f"resnet{depth}_mean"] = norm.running_mean.numpy()
    out[f"resnet{depth}_var"] = norm.running_var.numpy()
    return out


def _resnet20(train: bool) -> np.ndarray:
    """The network for CIFAR, from section 4.2 of the paper, with shortcuts A."""
    import torch
    from torch.nn import functional

    def normed(x, name, out, stride):
        kernel = torch.from_numpy(numbers(f"{name}.kernel", (out, x.shape[1], 3, 3)))
        mean, var, scale, bias = (
            torch.from_numpy(numbers(f"{name}.{part}", (out,)))
            for part in ("mean", "var", "scale", "bias")
        )
        x = functional.conv2d(x, kernel, stride=stride, padding=1)
        return functional.batch_norm(x, mean, var, scale, bias, training=train)

    x = torch.relu(normed(torch.from_numpy(images()), "stem", 4, 1))
    for i in range(9):
        width, stride = 4 * 2 ** (i // 3), 2 if i in (3, 6) else 1
        out = torch.relu(normed(x, f"{i}.0", width, stride))
        out = normed(out, f"{i}.1", width, 1)
        short = torch.zeros_like(out)
        short[:, : x.shape[1]] = x[:, :, ::stride, ::stride]
        x = torch.relu(out + short)
    head, bias = numbers("head.kernel", (5, 16)), numbers("head.bias", (5,))
    return x.mean((2, 3)).numpy() @ head.T + bias


def main():
    import torch

    with torch.no_grad():
        values = {
            "gpt": _gpt(1e-6, zero=("bias",)),
            "gpt2": _gpt(1e-2, zero=()),
            "transformer": _transformer(),
            "resnet20_eval": _resnet20(train=False),
            "resnet20_train": _resnet20(train=True),
            **_resnet(18),
            **_resnet(50),
        }
    for size in SIZES:
        values[f"transformer_{size}_parameters"] = np.array(_num_parameters(size))
    np.savez_compressed(PEERS, **values)


if __name__ == "__main__":
    main()
