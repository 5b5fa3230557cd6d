"""Built-in models of published papers against PyTorch's own modules, with the same weights."""

from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from perfed import LSTM, FieldError, LeNet, PFLlibCNN, ResNet18, Transformer
from perfed.core.trees import tree_size

torch = pytest.importorskip("torch", reason="PyTorch is the reference: pip install perfed[torch]")
from torch import nn  # noqa: E402

RNG = np.random.default_rng(0)


def placed(module: Any, place: str, weight: Any, bias: Any | None = None) -> None:
    """Our weights in a layer of PyTorch's."""
    layer = module.get_submodule(place)
    with torch.no_grad():
        layer.weight.copy_(torch.from_numpy(np.array(weight)))
        if bias is not None:
            layer.bias.copy_(torch.from_numpy(np.array(bias)))


def kernel(w: Any, size: int) -> Any:
    """Ours as PyTorch's: outputs, inputs, rows, columns."""
    return np.asarray(w).reshape(len(w), size, size, -1).transpose(0, 3, 1, 2)


def flattened(kernel: Any) -> Any:
    """PyTorch's as ours."""
    return kernel.detach().numpy().transpose(0, 2, 3, 1).reshape(len(kernel), -1)


def assert_close(ours: Any, theirs: Any, what: str = "") -> None:
    theirs = theirs.detach().numpy() if isinstance(theirs, torch.Tensor) else np.asarray(theirs)
    scale = max(1.0, float(np.abs(theirs).max()))
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5 * scale, err_msg=what)


def gradients(model: Any, params: Any, x: Any, weight: Any) -> tuple[Any, Any]:
    """The outputs, and the gradient of their product with a weight."""

    def score(params: Any) -> tuple[Any, Any]:
        outputs = model.apply(params, jnp.asarray(x))
        return (outputs * weight).sum(), outputs

    grads, outputs = jax.jit(jax.grad(score, has_aux=True))(params)
    return outputs, grads


def compared(model: Any, params: Any, module: Any, x: Any, theirs: Any) -> tuple[Any, Any]:
    """Outputs alike; our gradients, and the module, which has its own."""
    weight = RNG.normal(size=(len(x), 10)).astype(np.float32)
    outputs, grads = gradients(model, params, x, weight)
    expected = module(theirs)
    (expected * torch.from_numpy(weight)).sum().backward()
    assert_close(outputs, expected, "outputs")
    return grads, module


def images(side: int, depth: int, count: int = 3) -> tuple[Any, Any]:
    x = RNG.normal(size=(count, side, side, depth)).astype(np.float32)
    return x, torch.from_numpy(x.transpose(0, 3, 1, 2).copy())


class Convolutional(nn.Module):  # type: ignore[misc]
    """Two 5x5 convolutions and dense layers, as PFLlib's network and LeNet are in PyTorch."""

    def __init__(self, depth: int, channels: tuple[int, int], dense: list[int]) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(depth, channels[0], 5)
        self.conv2 = nn.Conv2d(*channels, 5)
        self.dense = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(dense))

    def forward(self, x: Any) -> Any:
        for convolution in (self.conv1, self.conv2):
            x = nn.functional.max_pool2d(torch.relu(convolution(x)), 2)
        x = x.flatten(1)
        for layer in self.dense[:-1]:
            x = torch.relu(layer(x))
        return self.dense[-1](x)


@pytest.mark.parametrize("side", [28, 32])
@pytest.mark.parametrize("name", ["pfllib-cnn", "lenet"])
def test_convolutional_networks_are_pytorchs(name: str, side: int) -> None:
    depth, rows = (1, 4) if side == 28 else (3, 5)
    image, channels = (side, side, depth), ((32, 64) if name == "pfllib-cnn" else (6, 16))
    model: Any = PFLlibCNN(image, 10) if name == "pfllib-cnn" else LeNet(image, 10)
    hidden = {"dense": 512} if name == "pfllib-cnn" else {"dense1": 120, "dense2": 84}
    inputs = rows * rows * channels[1]
    module = Convolutional(depth, channels, [inputs, *hidden.values(), 10])
    params = model.init(jax.random.key(1))
    assert tree_size(params) == sum(p.numel() for p in module.parameters())
    for conv in ("conv1", "conv2"):
        placed(module, conv, kernel(params[conv]["w"], 5), params[conv]["b"])
    # Pixels of all channels one after another, there; here channels of all pixels.
    order = np.arange(inputs).reshape(rows, rows, -1).transpose(2, 0, 1).ravel()
    for i, dense in enumerate([*hidden, "out"]):
        w = params[dense]["w"] if i else params[dense]["w"][:, order]
        placed(module, f"dense.{i}", w, params[dense]["b"])
    grads, module = compared(model, params, module, *images(side, depth))
    for conv in ("conv1", "conv2"):
        own = module.get_submodule(conv)
        assert_close(grads[conv]["w"], flattened(own.weight.grad), conv)
        assert_close(grads[conv]["b"], own.bias.grad, conv)
    for i, dense in enumerate([*hidden, "out"]):
        w = grads[dense]["w"] if i else grads[dense]["w"][:, order]
        assert_close(w, module.dense[i].weight.grad, dense)
        assert_close(grads[dense]["b"], module.dense[i].bias.grad, dense)


@pytest.mark.parametrize("name", ["pfllib-cnn", "lenet"])
def test_small_images_are_refused(name: str) -> None:
    from perfed.models import MODELS

    with pytest.raises(FieldError, match=r'image = \(15, 28, 1\): has 15x28 pixels.*use "cnn"'):
        MODELS[name](image=(15, 28, 1), classes=10)
    assert MODELS[name](image=(16, 16, 1), classes=10) is not None


class Block(nn.Module):  # type: ignore[misc]
    def __init__(self, inputs: int, outputs: int, stride: int, groups: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1 = nn.GroupNorm(groups, outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = nn.GroupNorm(groups, outputs)
        self.short = stride > 1
        if self.short:
            self.conv3 = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.norm3 = nn.GroupNorm(groups, outputs)

    def forward(self, x: Any) -> Any:
        inside = self.norm2(self.conv2(torch.relu(self.norm1(self.conv1(x)))))
        return torch.relu(inside + (self.norm3(self.conv3(x)) if self.short else x))


class Residual(nn.Module):  # type: ignore[misc]
    def __init__(self, depth: int, width: int, groups: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(depth, width, 3, 1, 1, bias=False)
        self.norm = nn.GroupNorm(groups, width)
        blocks, before = [], width
        for i, after in enumerate((width, 2 * width, 4 * width, 8 * width)):
            blocks += [Block(before, after, 2 if i else 1, groups), Block(after, after, 1, groups)]
            before = after
        self.blocks = nn.ModuleList(blocks)
        self.out = nn.Linear(before, 10)

    def forward(self, x: Any) -> Any:
        x = torch.relu(self.norm(self.conv(x)))
        for block in self.blocks:
            x = block(x)
        return self.out(x.mean((2, 3)))


@pytest.mark.parametrize(("side", "groups", "remat"), [(10, 2, False), (9, 4, True)])
def test_resnet18_is_pytorchs(side: int, groups: int, remat: bool) -> None:
    model = ResNet18((side, side, 3), 10, 8, groups, remat)
    params = moved(model.init(jax.random.key(1)))
    module = Residual(3, 8, groups)
    assert tree_size(params) == sum(p.numel() for p in module.parameters())
    names = {"conv1": "1", "conv2": "2", "shortcut": "3"}
    pairs = [(params["stem"], "conv", "norm", 3)] + [
        (layer, f"blocks.{i}.conv{names[n]}", f"blocks.{i}.norm{names[n]}", 1 + 2 * (n[0] == "c"))
        for i, block in enumerate(params["blocks"])
        for n, layer in block.items()
    ]
    for layer, conv, norm, size in pairs:
        placed(module, conv, kernel(layer["w"], size))
        placed(module, norm, layer["norm"]["scale"], layer["norm"]["shift"])
    placed(module, "out", params["out"]["w"], params["out"]["b"])
    grads, module = compared(model, params, module, *images(side, 3, 4))
    theirs = [grads["stem"], *(layer for block in grads["blocks"] for layer in block.values())]
    for layer, (_, conv, norm, _) in zip(theirs, pairs, strict=True):
        own = module.get_submodule(norm)
        assert_close(layer["w"], flattened(module.get_submodule(conv).weight.grad), conv)
        assert_close(layer["norm"]["scale"], own.weight.grad, norm)
        assert_close(layer["norm"]["shift"], own.bias.grad, norm)
    assert_close(grads["out"]["w"], module.out.weight.grad)


def moved(params: Any) -> Any:
    """Parameters whose norms and biases are not what they begin with."""
    leaves, tree = jax.tree.flatten(params)
    return jax.tree.unflatten(
        tree, [leaf + 0.1 * RNG.normal(size=leaf.shape).astype(np.float32) for leaf in leaves]
    )


def test_a_resnet18_of_the_usual_width_has_its_size() -> None:
    """11.17 million with ten classes, as for CIFAR-10 everywhere."""
    shapes = jax.eval_shape(ResNet18((32, 32, 3), 10).init, jax.random.key(0))
    assert tree_size(shapes) == 11_173_962


def test_groups_divide_the_width() -> None:
    with pytest.raises(FieldError, match="groups = 3: must divide the width, 8"):
        ResNet18((32, 32, 3), 10, width=8, groups=3)


TEXTS = RNG.integers(0, 13, (5, 9)).astype(np.int32)


class Recurrent(nn.Module):  # type: ignore[misc]
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, 6)
        self.lstm = nn.LSTM(6, 8, layers, batch_first=True)
        self.out = nn.Linear(8, 10)

    def forward(self, x: Any) -> Any:
        return self.out(self.lstm(self.embedding(x))[0][:, -1])


@pytest.mark.parametrize(("layers", "remat"), [(1, False), (2, True)])
def test_an_lstm_is_pytorchs(layers: int, remat: bool) -> None:
    model = LSTM(13, 10, 6, 8, layers, remat)
    params = moved(model.init(jax.random.key(1)))
    module = Recurrent(layers)
    placed(module, "embedding", params["embedding"].T)
    placed(module, "out", params["out"]["w"], params["out"]["b"])
    with torch.no_grad():
        for i, layer in enumerate(params["layers"]):
            getattr(module.lstm, f"bias_hh_l{i}").zero_()
            for place, value in (
                (f"weight_ih_l{i}", layer["read"]["w"]),
                (f"bias_ih_l{i}", layer["read"]["b"]),
                (f"weight_hh_l{i}", layer["recall"]),
            ):
                getattr(module.lstm, place).copy_(torch.from_numpy(np.array(value)))
    grads, module = compared(model, params, module, TEXTS, torch.from_numpy(TEXTS))
    assert_close(grads["embedding"], module.embedding.weight.grad.T)
    assert_close(grads["out"]["w"], module.out.weight.grad)
    for i, layer in enumerate(grads["layers"]):
        assert_close(layer["read"]["w"], getattr(module.lstm, f"weight_ih_l{i}").grad)
        assert_close(layer["read"]["b"], getattr(module.lstm, f"bias_ih_l{i}").grad)
        assert_close(layer["recall"], getattr(module.lstm, f"weight_hh_l{i}").grad)


class Decoder(nn.Module):  # type: ignore[misc]
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.symbols = nn.Embedding(13, 8)
        self.places = nn.Parameter(torch.zeros(9, 8))
        one = nn.TransformerEncoderLayer(
            8, 2, 32, dropout=0.0, activation=nn.GELU("tanh"), batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(one, layers, nn.LayerNorm(8), False)
        self.out = nn.Linear(8, 10)

    def forward(self, x: Any) -> Any:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        states = self.layers(self.symbols(x) + self.places, mask, is_causal=True)
        return self.out(states[:, -1])


@pytest.mark.parametrize(("layers", "remat"), [(1, True), (3, False)])
def test_a_transformer_is_pytorchs(layers: int, remat: bool) -> None:
    """A transformer encoder that normalizes first, with a causal mask."""
    model = Transformer(9, 13, 10, 8, layers, 2, remat)
    params = moved(model.init(jax.random.key(1)))
    module = Decoder(layers)
    assert tree_size(params) == sum(p.numel() for p in module.parameters())
    placed(module, "symbols", params["symbols"].T)
    placed(module, "out", params["out"]["w"], params["out"]["b"])
    placed(module, "layers.norm", params["norm"]["scale"], params["norm"]["shift"])
    with torch.no_grad():
        module.places.copy_(torch.from_numpy(np.array(params["places"])))
    names = {"mix": "self_attn.out_proj", "widen": "linear1", "narrow": "linear2"}
    for i, layer in enumerate(params["layers"]):
        own = module.layers.layers[i]
        heads = [layer[name] for name in ("query", "key", "value")]
        with torch.no_grad():
            for place, part in (("in_proj_weight", "w"), ("in_proj_bias", "b")):
                value = np.concatenate([head[part] for head in heads])
                getattr(own.self_attn, place).copy_(torch.from_numpy(value))
        for name, place in names.items():
            placed(own, place, layer[name]["w"], layer[name]["b"])
        for norm in ("norm1", "norm2"):
            placed(own, norm, layer[norm]["scale"], layer[norm]["shift"])
    grads, module = compared(model, params, module, TEXTS, torch.from_numpy(TEXTS))
    assert_close(grads["symbols"], module.symbols.weight.grad.T)
    assert_close(grads["places"], module.places.grad)
    for i, layer in enumerate(grads["layers"]):
        own = module.layers.layers[i]
        theirs = np.concatenate([layer[name]["w"] for name in ("query", "key", "value")])
        assert_close(theirs, own.self_attn.in_proj_weight.grad, "heads")
        for name, place in names.items():
            assert_close(layer[name]["w"], own.get_submodule(place).weight.grad, name)
            assert_close(layer[name]["b"], own.get_submodule(place).bias.grad, name)
        for norm in ("norm1", "norm2"):
            assert_close(layer[norm]["scale"], own.get_submodule(norm).weight.grad, norm)


def test_what_comes_later_changes_nothing_before() -> None:
    """The states of a causal layer, place by place."""
    model = Transformer(6, 13, 10, 8, 1, 2)
    layer = model.init(jax.random.key(0))["layers"][0]
    states = jax.random.normal(jax.random.key(1), (2, 6, 8))
    changed = states.at[:, 4:].add(1.0)
    before, after = (model._layer(layer, s, s) for s in (states, changed))
    np.testing.assert_allclose(before[:, :4], after[:, :4], rtol=0, atol=1e-6)
    assert (np.abs(before[:, 4:] - after[:, 4:]) > 0.1).any()


def test_heads_divide_the_width() -> None:
    with pytest.raises(FieldError, match="heads = 3: must divide the width, 8"):
        Transformer(9, 13, 10, width=8, heads=3)


@pytest.mark.parametrize("name", ["embedding", "hidden", "layers"])
def test_an_lstm_has_sizes(name: str) -> None:
    sizes: Any = {name: 0}
    with pytest.raises(FieldError, match=f"{name} = 0: must be a whole number, at least 1"):
        LSTM(13, 10, **sizes)
