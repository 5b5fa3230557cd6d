"""The same networks as users of each library write them, for `bench.models`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from perfed import (
    CNN,
    LSTM,
    MLP,
    PFLlibCNN,
    ResNet18,
    Transformer,
    from_flax,
    from_keras,
    from_nnx,
    from_torch,
)
from perfed.core.task import Model

if TYPE_CHECKING:
    import torch

LENGTH, SYMBOLS = 80, 65
EMBEDDING, HIDDEN = 8, 64
WIDTH, HEADS, LAYERS = 64, 4, 2
DENSE = (512, 256)
RESNET = ((64, 1), (64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), (512, 1))
CIFAR, MNIST = (32, 32, 3), (28, 28, 1)


@dataclass(frozen=True)
class Network:
    """One network, in all the ways there are to have it.

    Attributes:
        name: what it is called.
        shape: of an input; for texts, their length.
        classes: how many outputs.
        torch: as a PyTorch module, channels first.
        ours: the built-in one, and those of other libraries, converted.
        flops: of the products of one example's outputs, as few as it can be.
        cohort: clients per round.
        tau: local steps.
    """

    name: str
    shape: tuple[int, ...]
    classes: int
    torch: Callable[[], torch.nn.Module]
    ours: dict[str, Callable[[], Model]]
    flops: int
    cohort: int = 10
    tau: int = 10

    def converted(self) -> Model:
        """The PyTorch module as a model."""
        return from_torch(self.torch(), input_layout="channels-last")


def networks() -> list[Network]:
    """All of them."""
    lstm = 2 * LENGTH * (EMBEDDING + HIDDEN) * 4 * HIDDEN
    # Per place: keys and values; queries, what is mixed, and the perceptron. The last place of the
    # last layer is all that is read of it.
    seen, rest = 2 * 2 * WIDTH**2, 2 * (2 + 8) * WIDTH**2
    attention = 2 * 2 * LENGTH * WIDTH
    whole = LENGTH * (seen + rest + attention // 2)  # half of a causal attention is masked
    transformer = (LAYERS - 1) * whole + LENGTH * seen + rest + attention
    dense = 2 * (784 * DENSE[0] + DENSE[0] * DENSE[1] + DENSE[1] * 10)
    text = jnp.zeros((1, LENGTH), jnp.int32)
    return [
        Network(
            "MLP 784-512-256-10",
            (784,),
            10,
            torch_mlp,
            {"built in": lambda: MLP(784, 10, DENSE, "relu")},
            dense,
        ),
        *(
            _cnn(f"CNN (16, 32), {name}", shape)
            for name, shape in (("MNIST", MNIST), ("CIFAR", CIFAR))
        ),
        Network(
            "PFLlib's CNN, CIFAR",
            CIFAR,
            10,
            lambda: torch_pfllib(CIFAR),
            {
                "built in": lambda: PFLlibCNN(CIFAR, 10),
                "Flax": lambda: from_flax(flax_pfllib(), jnp.zeros((1, *CIFAR))),
            },
            2 * (28**2 * 75 * 32 + 10**2 * 800 * 64 + 1600 * 512 + 512 * 10),
        ),
        Network(
            "LSTM 64",
            (LENGTH,),
            SYMBOLS,
            torch_lstm,
            {
                "built in": lambda: LSTM(SYMBOLS, SYMBOLS, EMBEDDING, HIDDEN),
                "Flax": lambda: from_flax(flax_lstm(), text),
            },
            lstm,
        ),
        Network(
            "transformer",
            (LENGTH,),
            SYMBOLS,
            torch_transformer,
            {
                "built in": lambda: Transformer(LENGTH, SYMBOLS, SYMBOLS, WIDTH, LAYERS, HEADS),
                "Flax": lambda: from_flax(flax_transformer(), text),
            },
            transformer,
        ),
        Network(
            "ResNet-18 (GN), CIFAR",
            CIFAR,
            10,
            torch_resnet,
            {
                "built in": lambda: ResNet18(CIFAR, 10),
                "Flax": lambda: from_flax(flax_resnet(), jnp.zeros((1, *CIFAR))),
            },
            _resnet_flops(),
            cohort=4,
            tau=1,
        ),
    ]


def _cnn(name: str, shape: tuple[int, int, int]) -> Network:
    side, _, depth = shape
    half, quarter = side // 2, side // 4
    flops = side**2 * 9 * depth * 16 + half**2 * 9 * 16 * 32 + quarter**2 * 32 * 64 + 640
    return Network(
        name,
        shape,
        10,
        lambda: torch_cnn(shape),
        {
            "built in": lambda: CNN(shape, 10),
            "Flax": lambda: from_flax(flax_cnn(), jnp.zeros((1, *shape))),
            "NNX": lambda: from_nnx(nnx_cnn(shape)),
            "Keras": lambda: from_keras(keras_cnn(shape)),
        },
        2 * flops,
    )


def _resnet_flops() -> int:
    side, before = 32, 64
    total = side**2 * 27 * 64 + 512 * 10
    for width, stride in RESNET:
        side //= stride
        total += side**2 * 9 * (before * width + width * width)
        total += side**2 * before * width if stride > 1 else 0
        before = width
    return 2 * total


# PyTorch


def torch_mlp() -> torch.nn.Module:
    """A perceptron."""
    from torch import nn

    sizes, layers = (784, *DENSE), []
    for a, b in pairwise(sizes):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(sizes[-1], 10))


def torch_cnn(shape: tuple[int, int, int]) -> torch.nn.Module:
    """Two convolutions and a dense layer."""
    from torch import nn

    side, _, depth = shape
    return nn.Sequential(
        nn.Conv2d(depth, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * (side // 4) ** 2, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def torch_pfllib(shape: tuple[int, int, int]) -> torch.nn.Module:
    """PFLlib's FedAvgCNN."""
    from torch import nn

    side, _, depth = shape
    left = ((side - 4) // 2 - 4) // 2
    return nn.Sequential(
        nn.Conv2d(depth, 32, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * left**2, 512),
        nn.ReLU(),
        nn.Linear(512, 10),
    )


def torch_resnet() -> torch.nn.Module:
    """ResNet-18 for small images, with group normalization."""
    from torch import nn

    class Block(nn.Module):  # type: ignore[misc]
        def __init__(self, inputs: int, width: int, stride: int) -> None:
            super().__init__()
            self.conv1 = nn.Conv2d(inputs, width, 3, stride, 1, bias=False)
            self.norm1 = nn.GroupNorm(2, width)
            self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
            self.norm2 = nn.GroupNorm(2, width)
            self.shortcut = nn.Identity()
            if stride > 1:
                own = nn.Conv2d(inputs, width, 1, stride, bias=False)
                self.shortcut = nn.Sequential(own, nn.GroupNorm(2, width))

        def forward(self, x: Any) -> Any:
            inside = self.norm1(self.conv1(x)).relu()
            return (self.norm2(self.conv2(inside)) + self.shortcut(x)).relu()

    blocks, before = [], 64
    for width, stride in RESNET:
        blocks.append(Block(before, width, stride))
        before = width
    return nn.Sequential(
        nn.Conv2d(3, 64, 3, 1, 1, bias=False),
        nn.GroupNorm(2, 64),
        nn.ReLU(),
        *blocks,
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(512, 10),
    )


def torch_lstm() -> torch.nn.Module:
    """Reads characters."""
    from torch import nn

    class Net(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(SYMBOLS, EMBEDDING)
            self.lstm = nn.LSTM(EMBEDDING, HIDDEN, batch_first=True)
            self.out = nn.Linear(HIDDEN, SYMBOLS)

        def forward(self, x: Any) -> Any:
            return self.out(self.lstm(self.embedding(x))[0][:, -1])

    return Net()


def torch_transformer() -> torch.nn.Module:
    """Reads characters."""
    import torch
    from torch import nn

    class Net(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(SYMBOLS, WIDTH)
            self.places = nn.Parameter(0.1 * torch.randn(LENGTH, WIDTH))
            layer = nn.TransformerEncoderLayer(
                WIDTH, HEADS, 4 * WIDTH, 0.0, "gelu", batch_first=True, norm_first=True
            )
            self.layers = nn.TransformerEncoder(layer, LAYERS, nn.LayerNorm(WIDTH), False)
            self.out = nn.Linear(WIDTH, SYMBOLS)
            mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
            self.register_buffer("mask", mask)

        def forward(self, x: Any) -> Any:
            states = self.layers(self.embedding(x) + self.places, self.mask, is_causal=True)
            return self.out(states[:, -1])

    return Net()


# Flax


def flax_cnn() -> Any:
    """Two convolutions and a dense layer."""
    from flax import linen as nn

    class Net(nn.Module):  # type: ignore[misc]
        @nn.compact  # type: ignore[untyped-decorator]
        def __call__(self, x: Any) -> Any:
            for channels in (16, 32):
                x = nn.max_pool(nn.relu(nn.Conv(channels, (3, 3))(x)), (2, 2), (2, 2))
            x = nn.relu(nn.Dense(64)(x.reshape(len(x), -1)))
            return nn.Dense(10)(x)

    return Net()


def flax_pfllib() -> Any:
    """PFLlib's FedAvgCNN."""
    from flax import linen as nn

    class Net(nn.Module):  # type: ignore[misc]
        @nn.compact  # type: ignore[untyped-decorator]
        def __call__(self, x: Any) -> Any:
            for channels in (32, 64):
                x = nn.Conv(channels, (5, 5), padding="VALID")(x)
                x = nn.max_pool(nn.relu(x), (2, 2), (2, 2))
            x = nn.relu(nn.Dense(512)(x.reshape(len(x), -1)))
            return nn.Dense(10)(x)

    return Net()


def flax_resnet() -> Any:
    """ResNet-18 for small images, with group normalization."""
    from flax import linen as nn

    class Net(nn.Module):  # type: ignore[misc]
        @nn.compact  # type: ignore[untyped-decorator]
        def __call__(self, x: Any) -> Any:
            def convolve(x: Any, width: int, size: int, stride: int = 1) -> Any:
                x = nn.Conv(width, (size, size), stride, padding=size // 2, use_bias=False)(x)
                return nn.GroupNorm(2)(x)

            x = nn.relu(convolve(x, 64, 3))
            for width, stride in RESNET:
                inside = convolve(nn.relu(convolve(x, width, 3, stride)), width, 3)
                x = nn.relu(inside + (convolve(x, width, 1, stride) if stride > 1 else x))
            return nn.Dense(10)(x.mean((1, 2)))

    return Net()


def flax_lstm() -> Any:
    """Reads characters."""
    from flax import linen as nn

    class Net(nn.Module):  # type: ignore[misc]
        @nn.compact  # type: ignore[untyped-decorator]
        def __call__(self, x: Any) -> Any:
            states = nn.RNN(nn.OptimizedLSTMCell(HIDDEN))(nn.Embed(SYMBOLS, EMBEDDING)(x))
            return nn.Dense(SYMBOLS)(states[:, -1])

    return Net()


def flax_transformer() -> Any:
    """Reads characters."""
    from flax import linen as nn

    class Net(nn.Module):  # type: ignore[misc]
        @nn.compact  # type: ignore[untyped-decorator]
        def __call__(self, x: Any) -> Any:
            places = self.param("places", nn.initializers.normal(0.1), (LENGTH, WIDTH))
            mask = nn.make_causal_mask(x)
            x = nn.Embed(SYMBOLS, WIDTH)(x) + places
            for _ in range(LAYERS):
                x = x + nn.SelfAttention(HEADS)(nn.LayerNorm()(x), mask)
                x = x + nn.Dense(WIDTH)(nn.gelu(nn.Dense(4 * WIDTH)(nn.LayerNorm()(x))))
            return nn.Dense(SYMBOLS)(nn.LayerNorm()(x)[:, -1])

    return Net()


# NNX and Keras


def nnx_cnn(shape: tuple[int, int, int]) -> Any:
    """Two convolutions and a dense layer."""
    from flax import nnx

    side, _, depth = shape

    class Net(nnx.Module):  # type: ignore[misc]
        def __init__(self, rngs: Any) -> None:
            self.conv1 = nnx.Conv(depth, 16, (3, 3), rngs=rngs)
            self.conv2 = nnx.Conv(16, 32, (3, 3), rngs=rngs)
            self.dense = nnx.Linear(32 * (side // 4) ** 2, 64, rngs=rngs)
            self.out = nnx.Linear(64, 10, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            for convolution in (self.conv1, self.conv2):
                x = nnx.max_pool(nnx.relu(convolution(x)), (2, 2), (2, 2))
            return self.out(nnx.relu(self.dense(x.reshape(len(x), -1))))

    return Net(nnx.Rngs(0))


def keras_cnn(shape: tuple[int, int, int]) -> Any:
    """Two convolutions and a dense layer."""
    import keras

    return keras.Sequential(
        [
            keras.Input(shape),
            keras.layers.Conv2D(16, 3, padding="same", activation="relu"),
            keras.layers.MaxPooling2D(2),
            keras.layers.Conv2D(32, 3, padding="same", activation="relu"),
            keras.layers.MaxPooling2D(2),
            keras.layers.Flatten(),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(10),
        ]
    )
