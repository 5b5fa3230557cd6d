"""PyTorch modules as models: what torch computes, and what torch would learn."""

import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from perfed import FedAvg, FieldError, PerFedAvg, PFedMe, Task, from_torch, load, simulate
from perfed.core.task import cross_entropy
from perfed.core.trees import leaf_paths, leaves_where, path_name

pytest.importorskip("torch", reason='needs "perfed[torch]"')
pytest.importorskip("torchax", reason='needs "perfed[torch]"')
import torch
from torch import nn

Key = jax.random.key


class Flat(nn.Module):  # type: ignore[misc]
    """PFLlib's CNN."""

    def __init__(self, channels: int = 1, side: int = 28, classes: int = 10) -> None:
        super().__init__()
        self.conv1 = nn.Sequential(nn.Conv2d(channels, 32, 5), nn.ReLU(True), nn.MaxPool2d(2))
        self.conv2 = nn.Sequential(nn.Conv2d(32, 64, 5), nn.ReLU(True), nn.MaxPool2d(2))
        self.fc1 = nn.Sequential(nn.Linear(64 * ((side - 4) // 2 // 2 - 2) ** 2, 512), nn.ReLU())
        self.fc = nn.Linear(512, classes)

    def forward(self, x: Any) -> Any:
        return self.fc(self.fc1(torch.flatten(self.conv2(self.conv1(x)), 1)))


class Block(nn.Module):  # type: ignore[misc]
    def __init__(self, norm: Callable[[int], Any], into: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(into, out, 3, stride, 1, bias=False), norm(out)
        self.conv2, self.bn2 = nn.Conv2d(out, out, 3, 1, 1, bias=False), norm(out)
        self.shortcut = nn.Sequential()
        if stride != 1 or into != out:
            self.shortcut = nn.Sequential(nn.Conv2d(into, out, 1, stride, bias=False), norm(out))

    def forward(self, x: Any) -> Any:
        y = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(self.bn2(self.conv2(y)) + self.shortcut(x))


class Pooled(nn.Module):  # type: ignore[misc]
    """Some layers, of whose outputs the mean over each channel is taken."""

    def __init__(self, layers: Any) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: Any) -> Any:
        return self.layers(x).mean((2, 3))


class ResNet(nn.Module):  # type: ignore[misc]
    def __init__(self, norm: Callable[[int], Any], widths: tuple[int, ...], blocks: int) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, widths[0], 3, 1, 1, bias=False), norm(widths[0])
        layers, into = [], widths[0]
        for i, width in enumerate(widths):
            for j in range(blocks):
                layers.append(Block(norm, into, width, 2 if i and not j else 1))
                into = width
        self.layers, self.fc = nn.Sequential(*layers), nn.Linear(into, 10)

    def forward(self, x: Any) -> Any:
        x = self.layers(torch.relu(self.norm(self.stem(x))))
        return self.fc(nn.functional.adaptive_avg_pool2d(x, 1).flatten(1))


class Reader(nn.Module):  # type: ignore[misc]
    """A recurrent network for texts; its first state is made in `forward`, on no device."""

    def __init__(self, kind: Any, layers: int = 2) -> None:
        super().__init__()
        self.embedding, ways = nn.Embedding(20, 8), layers
        self.rnn = kind(8, 12, num_layers=layers, bidirectional=ways == 2, batch_first=True)
        self.fc = nn.Linear(12 * ways, 20)

    def forward(self, x: Any) -> Any:
        ways = 2 if self.rnn.bidirectional else 1
        shape = (self.rnn.num_layers * ways, len(x), 12)
        first = torch.zeros(shape)
        pair = (first, torch.zeros(shape)) if isinstance(self.rnn, nn.LSTM) else first
        return self.fc(self.rnn(self.embedding(x), pair)[0][:, -1])


class Encoder(nn.Module):  # type: ignore[misc]
    """A small transformer with learned positions."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(20, 16), nn.Embedding(9, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, "gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.register_buffer("order", torch.arange(9))
        self.fc = nn.Linear(16, 20)

    def forward(self, x: Any) -> Any:
        x = self.embedding(x) + self.positions(self.order[: x.shape[1]])
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.fc(self.encoder(x, mask=mask, is_causal=True).mean(1))


def group(channels: int) -> Any:
    return nn.GroupNorm(2, channels)


def mlp(inputs: int = 64) -> Any:
    layers = [nn.Flatten(), nn.Linear(inputs, 32), nn.ELU(), nn.Linear(32, 10)]
    return nn.Sequential(*layers)


def made(build: Callable[[], Any]) -> Any:
    torch.manual_seed(3)
    return build()


def images(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def texts(length: int = 9) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 20, (5, length)).astype(np.int32)


CASES = {
    "cnn": (Flat, lambda: images(4, 1, 28, 28)),
    "resnet-group": (lambda: ResNet(group, (8,), 1), lambda: images(4, 3, 8, 8)),
    "resnet-batch": (lambda: ResNet(nn.BatchNorm2d, (4, 8), 1), lambda: images(4, 3, 8, 8)),
    "lstm": (lambda: Reader(nn.LSTM), texts),
    "gru": (lambda: Reader(nn.GRU), texts),
    "rnn": (lambda: Reader(nn.RNN), texts),
    "transformer": (Encoder, texts),
    "depthwise": (
        lambda: nn.Sequential(
            nn.Conv2d(4, 8, 3, padding=2, dilation=2, groups=4),
            nn.GELU(),
            nn.ConvTranspose2d(8, 3, 3, stride=2, output_padding=1),
            nn.AvgPool2d(2),
            nn.Flatten(),
            nn.LayerNorm(243),
            nn.Linear(243, 10),
        ),
        lambda: images(3, 4, 8, 8),
    ),
    "one-dimension": (
        lambda: nn.Sequential(
            nn.Conv1d(3, 6, 5, stride=2), nn.BatchNorm1d(6), nn.ELU(), nn.AdaptiveAvgPool1d(1),
            nn.Flatten(), nn.Linear(6, 4), nn.BatchNorm1d(4, affine=False),
        ),
        lambda: images(6, 3, 15),
    ),
}  # fmt: skip


def torch_input(x: np.ndarray) -> Any:
    return torch.from_numpy(x).long() if x.dtype == np.int32 else torch.from_numpy(x)


def written(model: Any, params: Any) -> Any:
    """The user's module with these weights."""
    return model.write_back(params)


def close(a: Any, b: Any) -> None:
    a, b = np.asarray(a), np.asarray(b)
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * max(1.0, float(np.abs(b).max())))


def by_name(params: Any) -> dict[str, Any]:
    leaves = jax.tree.leaves(params)
    return dict(zip(map(path_name, leaf_paths(params)), leaves, strict=True))


def check_against_torch(module: Any, x: np.ndarray) -> None:
    """Outputs in evaluation and training, gradients, and the statistics after a step."""
    model = from_torch(module.eval())
    params = model.init(Key(0))
    expected = module(torch_input(x))
    close(jax.jit(model.apply)(params, x), expected.detach())

    y = np.arange(len(x), dtype=np.int32) % 4
    module.train().zero_grad()
    loss = nn.functional.cross_entropy(module(torch_input(x)), torch.from_numpy(y).long())
    loss.backward()

    def training_loss(params: Any) -> Any:
        outputs = model.apply(params, x, key=Key(1))
        outputs, renewed = outputs if model.is_state else (outputs, params)
        return cross_entropy(outputs, jnp.asarray(y)).mean(), renewed

    (own, renewed), grads = jax.jit(jax.value_and_grad(training_loss, has_aux=True))(params)
    close(own, loss.item())
    found = by_name(grads)
    for name, p in module.named_parameters():
        close(found[name], p.grad)
    buffers = {n: b for n, b in module.named_buffers() if b.is_floating_point()}
    assert set(by_name(params)) == set(buffers) | {n for n, _ in module.named_parameters()}
    for name, buffer in buffers.items():
        assert model.is_state is not None
        assert model.is_state(tuple(name.split(".")))
        close(by_name(renewed)[name], buffer)


@pytest.mark.parametrize("case", CASES)
def test_it_computes_what_torch_computes(case: str) -> None:
    build, x = CASES[case]
    check_against_torch(made(build), x())


@pytest.mark.slow
@pytest.mark.parametrize("norm", [group, nn.BatchNorm2d], ids=["group", "batch"])
def test_resnet_18(norm: Any) -> None:
    torch.manual_seed(0)
    check_against_torch(ResNet(norm, (64, 128, 256, 512), 2), images(4, 3, 32, 32))


SMALL = {
    "group": (lambda: Pooled(Block(group, 4, 6, 2)), lambda: images(4, 4, 4, 4)),
    "batch": (lambda: Pooled(Block(nn.BatchNorm2d, 4, 6, 2)), lambda: images(4, 4, 4, 4)),
    "lstm": (lambda: Reader(nn.LSTM, 1), lambda: texts(4)),
    "transformer": (lambda: Encoder(1), lambda: texts(4)),
}


@pytest.mark.parametrize("case", SMALL)
def test_clients_at_once_and_second_derivatives(case: str) -> None:
    """Hessian-vector products under vmap, against torch one client at a time."""
    build, x = SMALL[case]
    module, inputs = made(build).eval(), x()
    model, y = from_torch(module), np.arange(len(inputs), dtype=np.int32) % 4
    params = model.init(Key(0))
    clients = jax.tree.map(lambda p: jnp.stack([p, 1.1 * p]), params)

    def loss(params: Any) -> Any:
        return cross_entropy(model.apply(params, inputs), jnp.asarray(y)).mean()

    state = model.is_state or (lambda path: False)

    def product(params: Any) -> Any:
        direction = leaves_where(lambda path: not state(path), params)
        return jax.jvp(jax.grad(loss), (params,), (direction,))[1]

    found = jax.jit(jax.vmap(product))(clients)
    # The reference: torch's own double backward, whose attention has one only without fusing.
    own = written(model, jax.tree.map(lambda leaf: leaf[1], clients)).eval()
    weights = list(own.parameters())
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        value = nn.functional.cross_entropy(own(torch_input(inputs)), torch.from_numpy(y).long())
        grads = torch.autograd.grad(value, weights, create_graph=True)
        dot = sum((g * w.detach()).sum() for g, w in zip(grads, weights, strict=True))
        expected = torch.autograd.grad(dot, weights, allow_unused=True)
    largest = max(float(e.abs().max()) for e in expected)
    for (name, _), e in zip(own.named_parameters(), expected, strict=True):
        np.testing.assert_allclose(by_name(found)[name][1], e, atol=1e-4 * largest)


def test_weights_go_in_and_out() -> None:
    module = made(lambda: ResNet(nn.BatchNorm2d, (4,), 1))
    before = {name: t.clone() for name, t in module.state_dict().items()}
    model = from_torch(module)
    params = jax.tree.map(lambda leaf: leaf + 1, model.init(Key(0)))
    back = written(model, params)
    assert type(back) is ResNet
    assert back is not module
    fresh = ResNet(nn.BatchNorm2d, (4,), 1)
    fresh.load_state_dict(back.state_dict())
    for name, tensor in fresh.state_dict().items():
        counted = name.endswith("num_batches_tracked")
        close(tensor, before[name] if counted else before[name] + 1)
        assert torch.equal(module.state_dict()[name], before[name])
    x = images(2, 3, 8, 8)
    close(model.apply(params, x), back.eval()(torch.from_numpy(x)).detach())
    with pytest.raises(FieldError, match=r"fc\.bias.*shape \(3,\) here and \(10,\)"):
        written(model, {**params, "fc": {**params["fc"], "bias": jnp.ones(3)}})


def test_the_users_module_may_change_later() -> None:
    module = made(mlp)
    model = from_torch(module)
    before = jax.tree.map(np.array, model.init(Key(0)))
    with torch.no_grad():
        module[1].weight.zero_()
    jax.tree.map(np.testing.assert_array_equal, model.init(Key(0)), before)


def test_shared_weights_are_one_leaf() -> None:
    class Tied(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = nn.Embedding(20, 6), nn.Linear(6, 20, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, x: Any) -> Any:
            return self.head(self.embedding(x).mean(1))

    module = made(Tied)
    model = from_torch(module)
    params = model.init(Key(0))
    assert list(by_name(params)) == ["embedding.weight"]
    doubled = jax.tree.map(lambda leaf: 2 * leaf, params)
    back = written(model, doubled)
    assert back.head.weight is back.embedding.weight
    close(model.apply(doubled, texts()), back(torch_input(texts())).detach())


def test_what_is_not_trained_is_frozen() -> None:
    class Base(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.base, self.head = nn.Linear(4, 6), nn.Linear(6, 3)
            self.base.requires_grad_(False)
            self.register_buffer("scale", torch.full((6,), 3.0))

        def forward(self, x: Any) -> Any:
            return self.head(torch.tanh(self.base(x)) * self.scale)

    module, x = made(Base), images(5, 4)
    model = from_torch(module)
    params = model.init(Key(0))
    assert set(by_name(params)) == {"head.weight", "head.bias"}
    assert set(by_name(model.frozen)) == {"base.weight", "base.bias", "scale"}
    close(model.apply(params, x), module(torch.from_numpy(x)).detach())
    zero = jax.tree.map(jnp.zeros_like, model.frozen)
    close(model.apply(params, x, frozen=zero), np.tile(module.head.bias.detach(), (5, 1)))
    back = written(model, params)
    close(back.base.weight.detach(), module.base.weight.detach())
    assert not back.base.weight.requires_grad


DROPOUTS = {
    "dropout": (lambda: nn.Dropout(0.5), (64, 8)),
    "lstm": (lambda: nn.LSTM(8, 8, 2, dropout=0.5), (5, 16, 8)),
    "attention": (lambda: nn.TransformerEncoderLayer(8, 2, 16, 0.5), (5, 16, 8)),
}


@pytest.mark.parametrize("case", DROPOUTS)
def test_a_key_drives_dropout(case: str) -> None:
    build, shape = DROPOUTS[case]
    first = (lambda outputs: outputs[0]) if case == "lstm" else None
    model = from_torch(made(build), output=first)
    params, x = model.init(Key(0)), images(*shape)
    out = jax.jit(lambda key: model.apply(params, x, key))
    a, again, b = out(Key(1)), out(Key(1)), out(Key(2))
    np.testing.assert_array_equal(a, again)
    assert not np.allclose(a, b)
    assert not np.allclose(a, jax.jit(model.apply)(params, x))
    keys = jax.random.split(Key(3), 3)
    vmapped = jax.jit(jax.vmap(lambda key: model.apply(params, x, key)))(keys)
    scanned = jax.jit(lambda: jax.lax.map(lambda key: model.apply(params, x, key), keys))()
    for i, key in enumerate(keys):
        close(vmapped[i], out(key))
        close(scanned[i], out(key))


def test_dropout_keeps_the_mean_and_whole_channels() -> None:
    model = from_torch(nn.Dropout2d(0.25))
    out = np.asarray(model.apply({}, jnp.ones((100, 40, 3, 3)), Key(0)))
    assert np.all(out == out[:, :, :1, :1])
    np.testing.assert_allclose(np.unique(out), [0, 4 / 3], rtol=1e-6)
    assert abs((out == 0).mean() - 0.25) < 4 * (0.25 * 0.75 / 4000) ** 0.5


def test_a_layer_that_is_in_evaluation_mode_stays_so() -> None:
    module = nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(0.5))
    module[0].eval()
    model = from_torch(module)
    params = model.init(Key(0))
    _, renewed = model.apply(params, 5 + jnp.ones((4, 3)), Key(0))
    jax.tree.map(np.testing.assert_array_equal, renewed, params)


def test_a_function_draws_by_the_seed() -> None:
    model, before = from_torch(mlp), torch.random.get_rng_state()
    a, again, b = (model.init(Key(seed)) for seed in (1, 1, 2))
    assert torch.equal(torch.random.get_rng_state(), before)
    jax.tree.map(np.testing.assert_array_equal, a, again)
    assert not np.allclose(a["1"]["weight"], b["1"]["weight"])
    jax.tree.map(np.testing.assert_array_equal, jax.jit(model.init)(Key(2)), b)
    both = jax.vmap(model.init)(jnp.stack([Key(1), Key(2)]))
    np.testing.assert_array_equal(both["1"]["weight"][1], b["1"]["weight"])
    assert jax.eval_shape(model.init, Key(0))["3"]["bias"].shape == (10,)
    close(written(model, b)[1].weight.detach(), b["1"]["weight"])


def test_images_of_perfed_have_channels_last() -> None:
    module = made(lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(64, 2)))
    x = images(5, 6, 6, 3)
    model = from_torch(module, input_layout="channels-last")
    expected = module(torch.from_numpy(np.moveaxis(x, -1, 1).copy())).detach()
    close(model.apply(model.init(Key(0)), x), expected)
    with pytest.raises(FieldError, match="input_layout"):
        from_torch(module, input_layout="nhwc")  # type: ignore[arg-type]
    as_is = from_torch(module)
    with pytest.raises((TypeError, ValueError, RuntimeError), match=r"channel|feature") as raised:
        as_is.apply(as_is.init(Key(0)), x)
    assert any("channels-last" in note for note in raised.value.__notes__)


@pytest.mark.parametrize("output", ["logits", lambda outputs: outputs["logits"]])
def test_one_of_many_outputs(output: Any) -> None:
    class Many(nn.Module):  # type: ignore[misc]
        def forward(self, x: Any) -> Any:
            return {"logits": 2 * x, "hidden": x, "cache": None}

    model = from_torch(Many(), output=output)
    close(model.apply({}, jnp.ones((2, 3))), 2 * np.ones((2, 3)))
    everything = from_torch(Many()).apply({}, jnp.ones((2, 3)))
    assert set(everything) == {"logits", "hidden"}
    task = Task(from_torch(Many()), output=output)
    close(task.scored(task.outputs({}, jnp.ones((2, 3)))), 2 * np.ones((2, 3)))
    with pytest.raises(FieldError, match="'logits', 'hidden'"):
        from_torch(Many(), output="scores").apply({}, jnp.ones((2, 3)))


def test_torch_is_as_before() -> None:
    """Nothing of the conversion stays in torch, even after an error."""
    fast = torch.backends.mha.get_fastpath_enabled()

    class Broken(nn.Module):  # type: ignore[misc]
        def forward(self, x: Any) -> Any:
            raise RuntimeError("by the user")

    for module in (mlp(4), Broken()):
        model = from_torch(module)
        expected = pytest.raises(RuntimeError, match="by the user")
        with expected if isinstance(module, Broken) else nullcontext():
            model.apply(model.init(Key(0)), jnp.ones((2, 4)), Key(1))
        assert torch.get_default_device().type == "cpu"
        assert type(torch.zeros(2)) is torch.Tensor
        assert torch.is_grad_enabled()
        assert torch.backends.mha.get_fastpath_enabled() is fast
    eager = mlp(4)
    eager(torch.ones(2, 4)).sum().backward()
    assert eager[1].weight.grad is not None


def test_converting_leaves_torchs_fast_path_as_it_was() -> None:
    """In a process of its own: importing torchax turns it off, once."""
    code = (
        "import torch, perfed\n"
        "before = torch.backends.mha.get_fastpath_enabled()\n"
        "perfed.from_torch(torch.nn.Linear(3, 2))\n"
        "print(before, torch.backends.mha.get_fastpath_enabled())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "True"]


def refused(forward: Callable[[Any, Any], Any], match: str) -> None:
    class Refused(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.mask = torch.ones(4)

    Refused.forward = forward
    with pytest.raises(FieldError, match=match):
        jax.jit(from_torch(Refused()).apply)({}, jnp.ones((2, 4)))


def test_what_cannot_be_converted_is_named() -> None:
    def lost(self: Any, x: Any) -> Any:
        return nn.functional.ctc_loss(x[:, None], torch.ones(1, 2).long(), [2], [2])

    def by_value(self: Any, x: Any) -> Any:
        return x if x.sum() > 0 else -x

    refused(lost, "Refused.*aten::_ctc_loss")
    refused(by_value, rf"depends on a tensor's value|{__file__}")
    refused(lambda self, x: x * self.mask, "no buffers: mask; use register_buffer")
    refused(lambda self, x: x + torch.randn(4), "draws numbers in evaluation")
    refused(lambda self, x: x[x > 0], "depends on a tensor's value")


def test_what_is_refused_at_once() -> None:
    with pytest.raises(FieldError, match="momentum=None"):
        from_torch(nn.BatchNorm1d(3, momentum=None))
    with pytest.raises(FieldError, match="track_running_stats=False"):
        from_torch(nn.InstanceNorm2d(3, track_running_stats=True))
    with pytest.raises(FieldError, match=r"1 .LazyLinear.*pass a batch"):
        from_torch(nn.Sequential(nn.ReLU(), nn.LazyLinear(3)))
    with pytest.raises(FieldError, match=r"torch\.jit"):
        from_torch(torch.jit.script(nn.Linear(2, 2)))
    with pytest.raises(FieldError, match="function without arguments"):
        from_torch(lambda: 3)
    with pytest.raises(FieldError, match="must be a torch"):
        from_torch(3)


def test_a_buffer_that_changes_is_refused() -> None:
    class Counter(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(3)
            self.register_buffer("seen", torch.zeros(1))

        def forward(self, x: Any) -> Any:
            if self.training:
                self.seen += 1
            return self.norm(x)

    model = from_torch(Counter())
    params = model.init(Key(0))
    model.apply(params, jnp.ones((2, 3)))
    with pytest.raises(FieldError, match=r"seen of Counter.*changes in training"):
        model.apply(params, jnp.ones((2, 3)), Key(0))


def test_fedavg_learns_a_torch_module() -> None:
    data, method = load("digits", clients=4), FedAvg(lr=0.2, tau=20, batch=32)
    result = simulate(data, from_torch(mlp), method, rounds=15, cohort=4)
    first, last = (e.scores["global"].accuracy.mean() for e in result.history)
    assert last > max(0.8, first + 0.3)
    x, _ = result.experiment.federation.test.client(1)
    predicted = result.predict(1, x)
    assert len(predicted) == len(x)


METHODS = {
    "exact": PerFedAvg(alpha=0.01, beta=0.01, tau=1, variant="exact"),
    "hf": PerFedAvg(alpha=0.01, beta=0.01, tau=1, variant="hf"),
    "fo": PerFedAvg(alpha=0.01, beta=0.01, tau=1, variant="fo"),
    "pfedme": PFedMe(lam=5.0, eta=0.01, local_rounds=1, inner_lr=0.01, inner_steps=2),
}


@pytest.mark.parametrize(
    "method",
    [pytest.param(name, marks=() if name == "exact" else pytest.mark.slow) for name in METHODS],
)
def test_methods_run(method: str) -> None:
    module = made(lambda: nn.Sequential(nn.Conv2d(1, 2, 3, 2), nn.ELU(), mlp(18)))
    model = from_torch(module, input_layout="channels-last")
    result = simulate(load("digits", clients=4), model, METHODS[method], rounds=1, cohort=2)
    before, after = model.init(Key(0)), result.global_model
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(after))
    assert not np.allclose(before["0"]["weight"], after["0"]["weight"])
