"""Models computed by faster operations: the same outputs and gradients as by their own."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jaxtyping import Array

from perfed.core.jaxprs import contains
from perfed.core.rewriting import low_rank_sum, review, rewrite

SLOW = {"conv_general_dilated", "reduce_window_max", "reduce_window_min", "reduce_window_sum"}
FIRST = ("NCHW", "OIHW", "NCHW")
pool: Callable[..., Array] = lax.reduce_window
convolve: Callable[..., Array] = lax.conv_general_dilated


def random(*shape: int) -> Array:
    return jnp.asarray(np.random.default_rng(sum(shape)).normal(size=shape))


def rewritten(function: Callable[..., Any], *args: Any) -> Any:
    """What becomes of a function: checked to give the same, with the same slopes."""
    found = rewrite(function)

    def sized(own: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: jnp.sum(jnp.sin(own(*args)))

    np.testing.assert_allclose(found(*args), function(*args), rtol=1e-10, atol=1e-10)
    every = tuple(range(len(args)))
    slopes = jax.grad(sized(function), every)(*args)
    for own, wanted in zip(jax.grad(sized(found), every)(*args), slopes, strict=True):
        np.testing.assert_allclose(own, wanted, rtol=1e-9, atol=1e-9)
    return jax.make_jaxpr(found)(*args).jaxpr


@pytest.mark.parametrize("numbers", [FIRST, ("NHWC", "HWIO", "NHWC"), ("CNHW", "IOHW", "NHCW")])
@pytest.mark.parametrize(
    ("strides", "padding", "spread", "apart", "groups", "outputs"),
    [
        ((1, 1), "SAME", (1, 1), (1, 1), 1, 8),
        ((2, 3), "VALID", (1, 1), (2, 1), 1, 8),
        ((1, 2), ((2, 1), (0, 3)), (2, 3), (1, 1), 1, 5),  # as transposed convolutions are
        ((1, 1), ((-1, 2), (0, -1)), (1, 1), (1, 1), 1, 8),
        ((1, 1), "SAME", (1, 1), (1, 1), 2, 8),
        ((2, 1), "SAME", (1, 1), (1, 2), 4, 12),  # by channel, three from each
    ],
)
def test_convolutions(
    numbers: tuple[str, str, str],
    strides: tuple[int, int],
    padding: Any,
    spread: tuple[int, int],
    apart: tuple[int, int],
    groups: int,
    outputs: int,
) -> None:
    def convolved(x: Array, kernel: Array) -> Array:
        return convolve(
            x, kernel, strides, padding, spread, apart, numbers, feature_group_count=groups
        )

    with jax.enable_x64(True):
        x = random(2, 7, 6, 4).transpose(["NHWC".index(c) for c in numbers[0]])
        kernel = random(3, 2, 4 // groups, outputs).transpose(["HWIO".index(c) for c in numbers[1]])
        assert not contains(rewritten(convolved, x, kernel), SLOW)


@pytest.mark.parametrize(
    ("numbers", "sizes"),
    [
        (("NWC", "WIO", "NWC"), ((2, 9, 3), (3, 3, 5))),
        (("NCDHW", "OIDHW", "NCDHW"), ((2, 3, 4, 5, 6), (5, 3, 2, 3, 2))),
    ],
)
def test_convolutions_of_other_dimensions(numbers: Any, sizes: Any) -> None:
    def convolved(x: Array, kernel: Array) -> Array:
        strides = (2, 1, 2)[: x.ndim - 2]
        return convolve(x, kernel, strides, "SAME", dimension_numbers=numbers)

    with jax.enable_x64(True):
        assert not contains(rewritten(convolved, *(random(*size) for size in sizes)), SLOW)


@pytest.mark.parametrize(
    ("start", "combine"), [(-np.inf, lax.max), (np.inf, lax.min), (0.0, lax.add)]
)
@pytest.mark.parametrize(
    ("sizes", "strides", "padding"),
    [
        ((1, 2, 2, 1), (1, 2, 2, 1), "VALID"),
        ((1, 3, 3, 1), (1, 2, 1, 1), "SAME"),
        ((2, 1, 3, 1), (1, 1, 1, 1), ((0, 1), (0, 0), (2, 0), (0, 0))),
    ],
)
def test_pooling(start: float, combine: Any, sizes: Any, strides: Any, padding: Any) -> None:
    def pooled(x: Array) -> Array:
        return pool(x, start, combine, sizes, strides, padding)

    with jax.enable_x64(True):
        assert not contains(rewritten(pooled, random(2, 7, 6, 3)), SLOW)


def test_ties_of_pooling_and_what_is_no_number() -> None:
    def pooled(x: Array) -> Array:
        return pool(x, -jnp.inf, lax.max, (1, 2, 2), (1, 2, 2), "VALID")

    with jax.enable_x64(True):
        rewritten(pooled, jnp.round(random(2, 8, 8)))  # many are equal
    for entry in range(4):
        x = jnp.zeros((1, 2, 2)).reshape(-1).at[entry].set(jnp.nan).reshape(1, 2, 2)
        assert jnp.isnan(rewrite(pooled)(x)).all(), entry
    numbers = jnp.arange(16).reshape(1, 4, 4)
    least = jnp.iinfo(numbers.dtype).min

    def whole(x: Array) -> Array:
        return pool(x, least, lax.max, (1, 2, 2), (1, 1, 1), "SAME")

    np.testing.assert_array_equal(rewrite(whole)(numbers), whole(numbers))


def network(x: Array, k1: Array, b1: Array, k2: Array, w: Array) -> Array:
    """Channels first, with what stands between convolutions in networks."""
    y = convolve(x, k1, (1, 1), "SAME", dimension_numbers=FIRST)
    y = jax.nn.relu(y + b1[None, :, None, None])
    y = pool(y, -jnp.inf, lax.max, (1, 1, 2, 2), (1, 1, 2, 2), "VALID")
    grouped = y.reshape(len(y), 2, 4, *y.shape[2:])
    centered = grouped - grouped.mean((2, 3, 4), keepdims=True)
    normal = centered / jnp.sqrt((centered**2).mean((2, 3, 4), keepdims=True) + 1e-5)
    y = normal.reshape(y.shape)
    y = y + convolve(y, k2, (1, 1), "SAME", dimension_numbers=FIRST)
    y = jnp.concatenate([jax.nn.gelu(y), jnp.flip(y, 3)], axis=1)[:, 1:13]
    halves = jnp.split(jnp.pad(y, ((0, 0), (0, 0), (1, 1), (0, 0))), 2, axis=1)
    y = jnp.where(halves[0] > 0, halves[0], jnp.clip(halves[1], -1, 1))
    y = pool(y, 0.0, lax.add, (1, 1, 3, 3), (1, 1, 2, 2), "SAME")
    return y.max(2).reshape(len(y), -1) @ w


def test_a_network_stays_in_one_order() -> None:
    with jax.enable_x64(True):
        args = random(2, 3, 8, 8), random(8, 3, 3, 3), random(8), random(8, 8, 3, 3), random(12, 5)
        found = rewritten(network, *args)
        assert not contains(found, SLOW)
        # The images at first; else only kernels and biases.
        large = [
            eqn
            for eqn in found.eqns
            if eqn.primitive.name == "transpose"
            and eqn.invars[0].aval.shape[0] == 2  # a batch's
            and eqn.invars[0].aval.size >= 24
        ]
        assert len(large) == 1, large


def test_shapes_of_what_lies_in_another_order() -> None:
    def shaped(x: Array, kernel: Array) -> Array:
        y = convolve(x, kernel, (1, 1), "SAME", dimension_numbers=FIRST)
        b, c, h, w = y.shape
        found = [
            y.reshape(b, c, 1, h * w).squeeze(2),  # side by side in memory
            y.reshape(b, c * h, w),  # apart
            jnp.swapaxes(y.reshape(b, 2, c // 2, h, 2, w // 2), 1, 4),
            jnp.einsum("bchw,bcvw->bhvc", y, y),
            jnp.einsum("bchw,kc->bhkw", y, y[0, :, 0, :c].T),
        ]
        return jnp.concatenate([part.reshape(b, -1) for part in found], axis=1)

    with jax.enable_x64(True):
        rewritten(shaped, random(2, 3, 10, 8), random(6, 3, 3, 3))


def test_within_loops_and_checkpoints() -> None:
    def looped(x: Array, kernels: Array) -> Array:
        @jax.checkpoint
        def layer(x: Array, kernel: Array) -> Array:
            y = convolve(x, kernel, (1, 1), "SAME", dimension_numbers=FIRST)
            return jnp.tanh(y)

        def step(x: Array, kernel: Array) -> tuple[Array, Array]:
            x = layer(x, kernel)
            return x, x.sum(1)

        last, sums = lax.scan(step, x, kernels, reverse=True)
        return last.sum(1) + sums.sum(0)

    with jax.enable_x64(True):
        found = rewritten(looped, random(2, 3, 5, 5), random(4, 3, 3, 3, 3))
    assert not contains(found, SLOW)
    assert contains(found, {"scan"})
    # Memory is still given for time.
    assert contains(found, {"checkpoint", "remat2"})


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("axis", [0, 1])
def test_matrices_with_adapters_are_not_formed(side: str, axis: int) -> None:
    def product(x: Array, w: Array, p: Array, q: Array) -> Array:
        whole = low_rank_sum(w, p, q, 0.5)
        whole = whole if axis == 0 else whole.T.T.T
        rows = x[..., : whole.shape[0]]
        if side == "right":
            return jnp.tensordot(rows, whole, ((2,), (0,)))
        return jnp.tensordot(whole, rows, ((0,), (2,)))

    with jax.enable_x64(True):
        x, w, p, q = random(2, 3, 40), random(30, 40), random(30, 2), random(2, 40)
        found = rewritten(product, x, w, p, q)
        assert not contains(found, {"jit"})
        formed = [e for e in found.eqns if e.outvars[0].aval.shape in ((30, 40), (40, 30))]
        assert {e.primitive.name for e in formed} <= {"transpose"}
        # Where more than a product is asked of it, it is.
        rewritten(lambda w, p, q: jnp.sin(low_rank_sum(w, p, q, 2.0))[:3], w, p, q)


def test_what_stays_is_told() -> None:
    def convolved(x: Array, kernel: Array) -> Array:
        return convolve(x, kernel, (1, 1), "SAME", dimension_numbers=FIRST)

    x, kernel = random(2, 3, 8, 8), random(6, 3, 3, 3)
    assert review(rewrite(convolved), x, kernel).kept == ()

    def until(x: Array, kernel: Array) -> Array:
        return lax.while_loop(lambda y: y.sum() > 1e9, lambda y: convolved(y, kernel[:3]), x)

    ((name, operations),) = review(rewrite(until), x, kernel).kept
    assert name == "conv_general_dilated within while"
    assert operations == 2 * (2 * 3 * 8 * 8) * 27
    np.testing.assert_array_equal(rewrite(until)(x, kernel), until(x, kernel))

    def by_batch(x: Array, kernel: Array) -> Array:
        return convolve(x, kernel, (1, 1), "SAME", dimension_numbers=FIRST, batch_group_count=2)

    assert len(review(rewrite(by_batch), x, kernel).kept) == 1
    np.testing.assert_array_equal(rewrite(by_batch)(x, kernel), by_batch(x, kernel))


def test_a_model_is_traced_once_for_each_shape() -> None:
    times = []

    def model(params: dict[str, Array], x: Array, key: Any = None) -> Array:
        times.append(x.shape)
        return x @ params["w"] + (0.0 if key is None else jax.random.normal(key))

    found, params = rewrite(model), {"w": random(3, 2)}
    x, key = random(4, 3), jax.random.key(0)
    for _ in range(2):
        np.testing.assert_array_equal(found(params, x), model(params, x))
    with_key = jax.jit(jax.vmap(lambda key: found(params, x, key=key)))(key[None])[0]
    np.testing.assert_allclose(with_key, model(params, x, key=key), rtol=1e-6)
    assert times.count((4, 3)) == 1 + 2 + 1 + 1
    found(params, x[:2])
    assert times.count((2, 3)) == 1


def test_what_a_model_closes_over_may_change() -> None:
    def slope(scale: Array) -> Array:
        found: Callable[[Array], Array] = rewrite(lambda x: jnp.sin(x * scale))
        return found(jnp.ones(3)).sum() + found(jnp.ones(3)).sum()

    np.testing.assert_allclose(jax.jit(jax.grad(slope))(0.5), 6 * np.cos(0.5), rtol=1e-6)


def products(jaxpr: Any) -> list[tuple[int, ...]]:
    return [e.outvars[0].aval.shape for e in jaxpr.eqns if e.primitive.name == "dot_general"]


def attention(x: Array, own: Array) -> Array:
    query, key, value = jnp.split(x @ own[:, :18], 3, axis=-1)
    heads = [part.reshape(*part.shape[:2], 2, 3) for part in (query, key, value)]
    scores = jnp.einsum("bqhd,bkhd->bhqk", *heads[:2])
    scores = jnp.where(jnp.tri(x.shape[1], dtype=bool), scores, -1e30)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), heads[2])
    return mixed.reshape(*x.shape[:2], -1) @ own[:6, 18:24]


def text_model(x: Array, layers: Array, out: Array) -> Array:
    for own in layers:
        x = x + attention(x / jnp.sqrt((x * x).mean(-1, keepdims=True) + 0.1), own)
        x = x + jax.nn.relu(jax.nn.gelu(x @ own[:, 24:34])) @ own[:, 34:44].T
    ends = jnp.swapaxes(x - x.mean(-1, keepdims=True), 0, 1)
    return (ends @ out)[-1]


def test_what_nobody_reads_of_the_last_layer_is_not_computed() -> None:
    with jax.enable_x64(True):
        args = random(2, 5, 6), random(2, 6, 44), random(6, 4)
        found = products(rewritten(text_model, *args))
        # Keys, values and queries come from one product; of all that follows one place is left.
        whole = [(2, 5, 18), (2, 2, 5, 5), (2, 2, 3, 5), (2, 5, 6), (2, 5, 10), (2, 5, 6)]
        last = [(2, 5, 18), (2, 2, 1, 5), (2, 2, 3, 1), (2, 1, 6), (2, 1, 10), (2, 1, 6)]
        assert [sorted(shape) for shape in found] == [
            sorted(shape) for shape in [*whole, *last, (1, 2, 4)]
        ]


@pytest.mark.parametrize(
    "read",
    [
        lambda y: y[:, 1:3] + y[:, 2:4],  # two parts
        lambda y: y[:, -1] + y.sum(1),  # all of it, too
        lambda y: jnp.cumsum(y, axis=1)[:, -1],  # an operation that mixes places
        lambda y: y[:, ::2],
        lambda y: y[1:, :2],
        lambda y: y.reshape(-1, 2, 3)[-1],  # across two axes
        lambda y: lax.slice(y, (0, 0, 0), y.shape),
    ],
)
def test_what_is_read_stays(read: Callable[[Array], Array]) -> None:
    with jax.enable_x64(True):
        found = rewritten(lambda x, w: read(jnp.tanh(x @ w)), random(2, 4, 5), random(5, 6))
        assert products(found) == [(2, 4, 6)]


@pytest.mark.parametrize(
    ("read", "shape"),
    [
        (lambda y: y[:, 1:3] * 2 + y[:, 1:3], (2, 2, 6)),
        (lambda y: jnp.max(y, axis=0)[2:], (2, 2, 6)),
        (lambda y: y.reshape(2, 4, 2, 3)[:, :, :, 1:], (2, 4, 6)),  # within what were one axis
        (lambda y: y.reshape(2, 4, 2, 3)[:, 3:], (2, 1, 6)),
        (lambda y: jnp.where(y > 0, y, jnp.arange(6.0))[..., :5], (2, 4, 5)),
        (lambda y: jnp.einsum("btc,bsc->bts", y, y)[:, :, 3], (2, 4, 6)),
        (lambda y: (y[:, None] + jnp.ones((1, 3, 1, 1)))[:, 1:, :1].sum(1), (2, 4, 6)),
    ],
)
def test_cuts_move_up(read: Callable[[Array], Array], shape: tuple[int, ...]) -> None:
    with jax.enable_x64(True):
        found = rewritten(lambda x, w: read(jnp.tanh(x @ w)), random(2, 4, 5), random(5, 6))
        assert products(found)[0] == shape


def test_softmax_has_a_derivative_of_its_own() -> None:
    def models(x: Array) -> Array:
        raised = jnp.exp(x)
        near = raised / jnp.exp(x).sum(0, keepdims=True)  # no softmax: not the same exp
        other = raised / raised.sum(1)[:, None].sum() + raised / raised.sum(0)[:, None]
        by_two = jax.nn.softmax(x.reshape(2, 2, 4), axis=(0, 2)).reshape(4, 4)
        return near + other + by_two + jax.nn.softmax(x, axis=0)

    with jax.enable_x64(True):
        x = random(4, 4)
        found = rewritten(models, x)
        assert [eqn.primitive.name for eqn in found.eqns].count("custom_jvp_call") == 2

        def slope(own: Callable[..., Any]) -> Any:
            return jax.jvp(jax.grad(lambda x: jnp.sin(own(x)).sum()), (x,), (jnp.cos(x),))[1]

        np.testing.assert_allclose(slope(rewrite(models)), slope(models), rtol=1e-9, atol=1e-12)
