"""ResNet: convolutions with batch norm, added to a shortcut connection.

Shapes: B images, H height, W width, C channels, N classes.

Sources: He et al. (2016), arXiv:1512.03385; the bottleneck has its stride in the 3x3
convolution, as Goyal et al. (2017), arXiv:1706.02677, and torchvision have it.
"""

from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from train.fields import checked
from train.models.sizes import check_positive

_NUM_BLOCKS = {8: (1, 1, 1), 18: (2, 2, 2, 2), 20: (3, 3, 3), 50: (3, 4, 6, 3)}


@checked
class ResNetConfig:
    """Sizes of a ResNet.

    With 1000 classes, three channels and the stem for ImageNet, depth 18 has
    11,689,512 parameters and depth 50 has 25,557,032, both 64 wide. Depth 20, 16 wide,
    has 269,722 with 10 classes: where a shortcut gains channels, those of depth 8 and
    20 are zeros (option A of the paper, without parameters), those of 18 and 50 come
    from a 1x1 convolution (option B).

    Args:
      depth: number of layers with weights. 18 and 50 are the networks for ImageNet,
        with four stages of basic and of bottleneck blocks; 20 is the network for CIFAR,
        with three stages, and 8 has one block per stage.
      num_classes: N.
      width: channels of the first stage; each later stage has twice as many.
      stem: "imagenet" divides height and width by four (a 7x7 convolution and a pool,
        2 each), "small" keeps them (a 3x3 convolution).
      in_channels: C of the images.
      last_scale: initial scale of the last norm of each block; 0 makes a block its
        shortcut at first, so that a deep network starts as a shallow one (Goyal et al.,
        section 5.1), torchvision has 1.
      convolution: "matmul" multiplies the shifted images, side by side, by the kernel.
        It is for models under `jax.vmap`, where "xla" becomes a grouped convolution:
        for 32 models of depth 8, with 4 images of 8x8 each, loss and gradient took
        21 ms instead of 45 on two CPU cores, and at depth 20 74 ms instead of 116.
      compute_dtype: dtype of activations; parameters and statistics are float32.
      remat: whether the backward pass recomputes each block's activations instead of
        keeping them.
    """

    depth: Literal[8, 18, 20, 50] = 20
    num_classes: int = 10
    width: int = 16
    stem: Literal["imagenet", "small"] = "small"
    in_channels: int = 3
    last_scale: float = 0.0
    convolution: Literal["xla", "matmul"] = "xla"
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    remat: bool = False

    def __post_init__(self):
        check_positive(self, "num_classes", "width", "in_channels")


class ResNet(nnx.Module):
    """Logits of the classes, float32 [B, N], from images [B, H, W, C].

    With `train` the norms use the mean and variance of the batch, and move their
    running statistics (`nnx.BatchStat`) a tenth of the way towards them; without, they
    use the running ones. Unlike torch's, the running variance is that of the batch
    itself, not n/(n-1) times it. To update the statistics under `jax.grad`, copy the
    variables into its trace, `model = nnx.merge(graph, params, stats, copy=True)`, and
    read them from `nnx.state(model, nnx.BatchStat)`.
    """

    def __init__(self, config: ResNetConfig, *, rngs: nnx.Rngs):
        size, stride = (7, 2) if config.stem == "imagenet" else (3, 1)
        self.config = config
        self.stem = NormedConv(
            config.in_channels, config.width, size, stride, config, rngs
        )
        self.blocks = nnx.List([])
        channels = config.width
        for stage, num_blocks in enumerate(_NUM_BLOCKS[config.depth]):
            for i in range(num_blocks):
                stride = 2 if stage and i == 0 else 1
                width = config.width * 2**stage
                block = ResidualBlock(channels, width, stride, config, rngs=rngs)
                self.blocks.append(block)
                channels = block.out_channels
        # Variance 1 / (3 channels), as torch initialises a linear layer.
        self.head = nnx.Linear(
            channels,
            config.num_classes,
            kernel_init=nnx.initializers.variance_scaling(1 / 3, "fan_in", "uniform"),
            dtype=config.compute_dtype,
            rngs=rngs,
        )

    def __call__(self, images_BxHxWxC: jax.Array, train: bool) -> jax.Array:
        x_BxHxWxC = jax.nn.relu(self.stem(images_BxHxWxC, train))
        if self.config.stem == "imagenet":
            padding: Any = ((1, 1), (1, 1))  # Flax takes pairs, which its types forbid.
            x_BxHxWxC = nnx.max_pool(x_BxHxWxC, (3, 3), (2, 2), padding)
        call = ResidualBlock.__call__
        if self.config.remat:
            call = nnx.remat(call, static_argnums=2)
        for block in self.blocks:
            x_BxHxWxC = call(block, x_BxHxWxC, train)
        # bfloat16 has too few digits for a sum over all pixels.
        pooled_BxC = x_BxHxWxC.astype(jnp.float32).mean((1, 2))
        return self.head(pooled_BxC).astype(jnp.float32)


class ResidualBlock(nnx.Module):
    """Two 3x3 convolutions, or at depth 50 a 1x1, a 3x3 and a 1x1, and a shortcut."""

    def __init__(
        self,
        in_channels: int,
        width: int,
        stride: int,
        config: ResNetConfig,
        *,
        rngs: nnx.Rngs,
    ):
        if config.depth == 50:
            layers = [(width, 1, 1), (width, 3, stride), (4 * width, 1, 1)]
        else:
            layers = [(width, 3, stride), (width, 3, 1)]
        self.out_channels = layers[-1][0]
        self.stride = stride
        self.layers = nnx.List([])
        channels = in_channels
        for out, size, step in layers:
            self.layers.append(NormedConv(channels, out, size, step, config, rngs))
            channels = out
        scale = self.layers[-1].norm.scale
        scale[...] = jnp.full_like(scale[...], config.last_scale)
        # Option B of the paper for ImageNet's networks, option A for CIFAR's.
        convolved = config.depth in (18, 50) and (stride > 1 or in_channels != channels)
        self.shortcut = (
            NormedConv(in_channels, channels, 1, stride, config, rngs)
            if convolved
            else None
        )

    def __call__(self, x_BxHxWxC: jax.Array, train: bool) -> jax.Array:
        out = x_BxHxWxC
        for layer in self.layers[:-1]:
            out = jax.nn.relu(layer(out, train))
        out = self.layers[-1](out, train)
        return jax.nn.relu(out + self._short(x_BxHxWxC, train))

    def _short(self, x_BxHxWxC: jax.Array, train: bool) -> jax.Array:
        if self.shortcut is not None:
            return self.shortcut(x_BxHxWxC, train)
        # Option A: every second pixel, and zeros for the channels that are missing.
        more = self.out_channels - x_BxHxWxC.shape[-1]
        fewer = x_BxHxWxC[:, :: self.stride, :: self.stride]
        return jnp.pad(fewer, ((0, 0), (0, 0), (0, 0), (0, more)))


class NormedConv(nnx.Module):
    """A convolution without bias, padded to keep the size at stride 1; batch norm."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        size: int,
        stride: int,
        config: ResNetConfig,
        rngs: nnx.Rngs,
    ):
        by_matmul = config.convolution == "matmul"
        self.conv = nnx.Conv(
            in_channels,
            out_channels,
            (size, size),
            stride,
            padding=size // 2,
            use_bias=False,
            kernel_init=nnx.initializers.variance_scaling(2.0, "fan_out", "normal"),
            conv_general_dilated=(
                conv_as_matmul if by_matmul else jax.lax.conv_general_dilated
            ),
            dtype=config.compute_dtype,
            rngs=rngs,
        )
        self.norm = nnx.BatchNorm(
            out_channels, momentum=0.9, epsilon=1e-5, dtype=jnp.float32, rngs=rngs
        )
        self.dtype = config.compute_dtype

    def __call__(self, x_BxHxWxC: jax.Array, train: bool) -> jax.Array:
        # The norm is in float32 at any dtype: its statistics move by small steps.
        out = self.norm(self.conv(x_BxHxWxC), use_running_average=not train)
        return out.astype(self.dtype)


def conv_as_matmul(images_BxHxWxC, kernel_KxKxCxD, strides, padding, **_):
    """Convolves as `jax.lax.conv_general_dilated` does, by one matrix product.

    out[b, h, w, d] = sum_ijc images[b, s h + i - p, s w + j - p, c] kernel[i, j, c, d]
    """
    # Patch (i, j) is the image shifted by (i, j), at every `strides`-th pixel: with a
    # 3x3 kernel and 8x8 pixels, padded to 10x10, nine images of 8x8, side by side.
    padded = jnp.pad(images_BxHxWxC, ((0, 0), *padding, (0, 0)))
    (rows, columns), (down, right) = kernel_KxKxCxD.shape[:2], strides
    height, width = padded.shape[1] - rows + 1, padded.shape[2] - columns + 1
    patches_BxHxWxKKC = jnp.concatenate(
        [
            padded[:, i : i + height : down, j : j + width : right]
            for i in range(rows)
            for j in range(columns)
        ],
        axis=-1,
    )
    return patches_BxHxWxKKC @ kernel_KxKxCxD.reshape(-1, kernel_KxKxCxD.shape[-1])
