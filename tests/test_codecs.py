"""Codecs: the laws, the published quantizer, how long messages are, and ones not to be trusted."""

import tracemalloc
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfed import (
    BFloat16,
    Codec,
    CodecError,
    FieldError,
    Float16,
    Float32,
    LowPrecision,
    RandomK,
    Sign,
    TopK,
)
from perfed.pipeline import Pipeline
from perfed.pipeline.codecs import CODECS

ALL = [
    Float32(),
    Float16(),
    BFloat16(),
    LowPrecision(1),
    LowPrecision(4, norm="tensor"),
    LowPrecision(15, norm=7),
    LowPrecision(127),
    LowPrecision(5, code="fixed"),
    LowPrecision(1023),
    LowPrecision(65536),
    Sign(),
    TopK(0.1),
    TopK(0.3, LowPrecision(3)),
    RandomK(0.1),
    RandomK(0.5, Sign()),
    RandomK(0.2).with_feedback(),
]


def key(seed: int) -> Any:
    return jax.random.key(seed)


def vectors(seed: int, size: int, exponent: int, zeros: float) -> np.ndarray:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=size) * 10.0**exponent * (rng.random(size) >= zeros)
    return x.astype(np.float32)


@pytest.mark.parametrize("codec", ALL, ids=str)
@settings(max_examples=16, deadline=None)
@given(
    # Few sizes: every one is compiled anew.
    size=st.sampled_from([1, 250]),
    seed=st.integers(0, 10_000),
    exponent=st.sampled_from([-30, -8, 0, 3, 30]),
    zeros=st.sampled_from([0.0, 0.5, 0.98, 1.0]),
)
def test_the_laws(codec: Codec, size: int, seed: int, exponent: int, zeros: float) -> None:
    """decode(encode(k, x)) is compress(k, x) bit for bit, and bits is the length of encode."""
    x = {"a": vectors(seed, size, exponent, zeros), "b": vectors(seed + 1, 3, exponent, zeros)}
    message = codec.encode(key(seed), x)
    received = codec.decode(message, x)
    seen = codec.compress(key(seed), x)
    for name in x:
        assert received[name].dtype == jnp.float32
        a, b = (np.asarray(tree[name]) for tree in (received, seen))
        np.testing.assert_array_equal(a.view(np.uint32), b.view(np.uint32))
        assert np.isfinite(a).all()
    assert 8 * len(message) == codec.bits(key(seed), x)
    if zeros == 1.0:
        assert all(not np.any(received[name]) for name in x)


@pytest.mark.parametrize("codec", ALL, ids=str)
def test_a_single_number(codec: Codec) -> None:
    for value in (2.5, -1e-20, 0.0):
        x = np.array([value], np.float32)
        message = codec.encode(key(0), x)
        np.testing.assert_array_equal(codec.decode(message, x), codec.compress(key(0), x))
        assert 8 * len(message) == codec.bits(key(0), x)


@pytest.mark.parametrize("norm", ["whole", 1, 3, 200])
@pytest.mark.parametrize("s", [1, 300, 50_000, 65536])
def test_extreme_levels(s: int, norm: Any) -> None:
    """Few entries at the highest levels: no number is too large for its code."""
    codec = LowPrecision(s, norm=norm)
    lone = np.zeros(100, np.float32)
    lone[3] = 1.0
    for x in (lone, np.ones(100, np.float32), -lone * 1e-3 + 1e-7):
        message = codec.encode(key(0), x)
        np.testing.assert_array_equal(codec.decode(message, x), codec.compress(key(0), x))
        assert 8 * len(message) == codec.bits(key(0), x)


def test_lengths_that_an_int32_cannot_hold_are_never_chosen() -> None:
    """Small buckets at high levels: sums of levels overflow, the message is plain bits."""
    x = np.random.default_rng(0).normal(size=200_000).astype(np.float32)
    for codec in (LowPrecision(65536, norm=1), LowPrecision(65536, norm=16)):
        message = codec.encode(key(0), x)
        assert len(message) <= 20 + 4 * 200_000 + 18 * 200_000 / 8
        assert 8 * len(message) == codec.bits(key(0), x)
        np.testing.assert_array_equal(codec.decode(message, x), codec.compress(key(0), x))


@pytest.mark.parametrize("scale", [1e-35, 1e-20, 1e20, 8e37, 1.5e38])
def test_changes_of_any_size_are_quantized(scale: float) -> None:
    """The levels are those of the same change at scale 1."""
    x = np.array([1.0, -0.5, 0.0, 0.25, 0.01], np.float32)
    codec = LowPrecision(4)
    plain, large = (np.asarray(codec.compress(key(0), x * np.float32(f))) for f in (1.0, scale))
    np.testing.assert_allclose(large / np.float32(scale), plain, rtol=1e-5)


def test_changes_too_large_for_a_codec_are_refused() -> None:
    x = np.full(4, 3e38, np.float32)
    with pytest.raises(CodecError, match="too large for low-precision"):
        LowPrecision(2).encode(key(0), x)
    with pytest.raises(CodecError, match="too large for random-k"):
        RandomK(0.3).encode(key(0), x)


def test_trees_of_any_shape() -> None:
    """Scalars, empty dimensions of one, other types of float: all come back in their own shape."""
    x = [jnp.float32(2.0), jnp.ones((1, 3, 1)), (jnp.ones(4, jnp.bfloat16), jnp.ones((2, 2)))]
    for codec in ALL:
        back = codec.decode(codec.encode(key(0), x), x)
        for a, b in zip(jax.tree.leaves(back), jax.tree.leaves(x), strict=True):
            assert a.shape == b.shape


def reference(x: np.ndarray, s: int, uniform: np.ndarray) -> np.ndarray:
    """FedPAQ (4), entry by entry, in double precision."""
    norm = np.sqrt(sum(float(v) ** 2 for v in x))
    out = []
    for value, u in zip(x, uniform, strict=True):
        ratio = abs(float(value)) * s / norm
        level = int(ratio)
        level += u < ratio - level
        out.append(norm * np.sign(value) * level / s)
    return np.array(out)


@pytest.mark.parametrize("s", [1, 3, 50])
def test_the_quantizer_is_the_published_one(s: int) -> None:
    from perfed.core.random import quick_uniform

    x = np.random.default_rng(s).normal(size=200).astype(np.float32)
    found = LowPrecision(s).compress(key(3), x)
    expected = reference(x, s, np.asarray(quick_uniform(key(3), 200)))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("s", [1, 3])
def test_a_tree_has_one_norm(s: int) -> None:
    """(4) on two tensors of very different sizes: one norm for both, or one each if one asks."""
    tree = {"a": jnp.array([[3.0, -1.0], [0.5, 0.0]]), "b": jnp.array([300.0, -20.0, 0.0])}
    x = np.array([3.0, -1.0, 0.5, 0.0, 300.0, -20.0, 0.0])
    whole, apart = (LowPrecision(s, norm=n) for n in ("whole", "tensor"))
    keys = jax.random.split(jax.random.key(0), 3000)

    def received(codec: Any) -> np.ndarray:
        found = jax.jit(jax.vmap(lambda key: codec.send(key, tree).received))(keys)
        return np.concatenate([np.asarray(found["a"]).reshape(3000, 4), found["b"]], axis=1)

    norm = np.linalg.norm(x)
    for codec, norms in (
        (whole, np.full(7, norm)),
        (apart, np.repeat([np.linalg.norm(x[:4]), np.linalg.norm(x[4:])], [4, 3])),
    ):
        draws = received(codec)
        y = s * np.abs(x) / norms
        low = np.floor(y)
        # Each entry becomes one of the two levels next to it, the upper one with what is left over.
        levels = np.abs(draws) * s / norms
        assert np.all(np.abs(levels - np.round(levels)) < 1e-4)
        assert np.all((np.round(levels) == low) | (np.round(levels) == low + (y > low)))
        share = (np.round(levels) > low).mean(axis=0)
        assert np.all(np.abs(share - (y - low)) < 5 * np.sqrt(0.25 / 3000))
        assert np.all((np.sign(draws) == np.sign(x)) | (draws == 0))


def test_norms_of_tensors_and_buckets() -> None:
    """Each part is quantized by its own norm, the last bucket too."""
    x = {"a": np.full(6, 5.0, np.float32), "b": np.full(4, 1e-3, np.float32)}
    flat = np.concatenate([x["a"], x["b"]])
    for norm, parts in (("tensor", [(0, 6), (6, 10)]), (4, [(0, 4), (4, 8), (8, 10)])):
        codec = LowPrecision(2, norm=norm)  # type: ignore[arg-type]
        found = np.concatenate(jax.tree.leaves(codec.compress(key(0), x)))
        for begin, end in parts:
            unit = np.linalg.norm(flat[begin:end]) / 2
            levels = found[begin:end] / unit
            np.testing.assert_allclose(levels, np.rint(levels), atol=1e-5)


DRAWS = 20_000


@pytest.mark.parametrize("s", [1, 2, 7])
def test_unbiased_with_the_published_variance(s: int) -> None:
    """E Q(x) = x and E|Q(x) - x|^2 <= q |x|^2 with q = min(p/s^2, sqrt(p)/s).

    Of 20,000 draws each entry's mean may be 5 standard errors off (all 60 of them within that with
    a confidence of 1 - 4e-5), and the mean squared error 5 of its own above the bound.
    """
    p = 60
    x = np.random.default_rng(0).normal(size=p).astype(np.float32)
    codec = LowPrecision(s)
    keys = jax.random.split(key(1), DRAWS)
    draws = np.asarray(jax.jit(jax.vmap(lambda k: codec.send(k, x).received))(keys), np.float64)
    unit = np.linalg.norm(x) / s
    part = np.abs(x) / unit % 1
    error = np.sqrt(part * (1 - part) / DRAWS) * unit
    assert np.all(np.abs(draws.mean(axis=0) - x) <= 5 * error + 1e-6)
    squares = ((draws - x) ** 2).sum(axis=1)
    q = min(p / s**2, np.sqrt(p) / s)
    assert squares.mean() <= q * np.sum(x**2) + 5 * squares.std() / np.sqrt(DRAWS)
    exact = np.sum(part * (1 - part)) * unit**2
    assert abs(squares.mean() - exact) <= 5 * squares.std() / np.sqrt(DRAWS)


@pytest.mark.parametrize(
    "codec",
    [
        LowPrecision(1),
        LowPrecision(3, norm=7),
        LowPrecision(2, norm="tensor"),
        RandomK(0.2),
        RandomK(0.5, LowPrecision(2)),
        Float32(),
    ],
    ids=str,
)
def test_the_variance_that_is_said_holds(codec: Any) -> None:
    """E|Q(x) - x|^2 <= q |x|^2 over 4,000 draws, up to five standard errors; for entries drawn
    at random it is an equation."""
    sizes = (20, 40)
    rng = np.random.default_rng(3)
    for x in (rng.normal(size=60), np.ones(60), np.eye(60)[0] + 0.01):
        tree = [jnp.asarray(x[:20], jnp.float32), jnp.asarray(x[20:], jnp.float32)]
        keys = jax.random.split(key(5), 4000)
        send = jax.jit(jax.vmap(lambda k, t: codec.send(k, t).received, in_axes=(0, None)))
        error = np.concatenate(jax.tree.map(jnp.subtract, send(keys, tree), tree), axis=1)
        squares = (error.astype(np.float64) ** 2).sum(axis=1)
        q = codec.variance(sizes)
        slack = 5 * squares.std() / np.sqrt(len(squares))
        assert squares.mean() <= q * np.sum(x**2) * (1 + 1e-5) + slack
        if codec == RandomK(0.2):
            assert abs(squares.mean() - q * np.sum(x**2)) <= slack


def test_codecs_with_a_bias_have_no_variance_constant() -> None:
    for codec in (
        TopK(0.1),
        Sign(),
        Float16(),
        RandomK(0.1).with_feedback(),
        RandomK(0.1, Sign()),
    ):
        assert codec.variance((50,)) is None
    for biased in (Pipeline.of(LowPrecision(2), True), Pipeline.of(clip=1.0)):
        assert biased.variance((50,)) is None
    assert Pipeline.of(LowPrecision(2)).variance((50,)) == LowPrecision(2).variance((50,))


def test_rounding_of_one_entry_says_nothing_of_another() -> None:
    """Entries, and draws with other keys, are rounded independently of each other."""
    from perfed.core.random import quick_uniform

    keys = jax.random.split(key(0), 2000)
    draws = np.asarray(jax.vmap(lambda k: quick_uniform(k, 50))(keys)) < 0.5
    correlation = np.corrcoef(draws.T) - np.eye(50)
    assert np.abs(correlation).max() < 5.5 / np.sqrt(2000)
    across = np.corrcoef(draws[:50]) - np.eye(50)
    assert np.abs(across).max() < 1  # no two keys draw the same


def test_random_k_is_unbiased_and_top_k_takes_the_largest() -> None:
    x = np.random.default_rng(0).normal(size=40).astype(np.float32)
    keys = jax.random.split(key(2), DRAWS)
    codec = RandomK(0.25)
    draws = np.asarray(jax.jit(jax.vmap(lambda k: codec.send(k, x).received))(keys), np.float64)
    assert np.all(np.count_nonzero(draws, axis=1) == 10)
    error = np.abs(x) * np.sqrt(3 / DRAWS)  # each is 4x with probability 1/4
    assert np.all(np.abs(draws.mean(axis=0) - x) <= 5 * error)
    kept = RandomK(0.25).with_feedback().compress(key(0), x)
    assert set(np.asarray(kept)[np.asarray(kept) != 0]) <= set(x)
    top = np.asarray(TopK(0.25).compress(key(0), x))
    largest = np.argsort(-np.abs(x))[:10]
    np.testing.assert_array_equal(np.flatnonzero(top), np.sort(largest))
    np.testing.assert_array_equal(top[largest], x[largest])


def entropy_bytes(levels: np.ndarray) -> float:
    """The empirical entropy of levels and signs, as one alphabet."""
    counts = np.unique(levels, return_counts=True)[1]
    part = counts / counts.sum()
    return float(-(part * np.log2(part)).sum() * counts.sum() / 8)


@pytest.mark.parametrize("s", [1, 2, 4, 15, 63, 127, 255, 1023, 65536])
def test_messages_are_near_the_entropy(s: int) -> None:
    """100,000 Gaussian entries: at most 1.35 times the entropy of what is said."""
    x = np.random.default_rng(5).normal(size=100_000).astype(np.float32)
    codec = LowPrecision(s)
    message = codec.encode(key(0), x)
    levels = np.asarray(codec.symbols(key(0), jnp.asarray(x), (100_000,)).level)
    assert len(message) <= 1.35 * entropy_bytes(levels)
    if s == 1:
        assert len(message) <= 0.002 * x.nbytes
    if s == 15:
        assert 8 * len(message) <= 0.5 * len(x)


def test_a_dense_message_is_packed_in_fixed_width() -> None:
    """Entries of one size have levels near s: no code is shorter than plain bits."""
    x = np.ones(4, np.float32)
    for s, width in ((15, 5), (255, 9)):
        message = LowPrecision(s).encode(key(0), x)
        assert len(message) <= 6 + 3 + 4 + 1 + -(-4 * width // 8)


@pytest.mark.parametrize(("s", "width"), [(1, 2), (5, 4), (10, 5)])
def test_the_fixed_code_has_the_same_length_for_every_change(s: int, width: int) -> None:
    """1 + ceil(log2(s + 1)) bits an entry, also where nearly all are zero; its values are those of
    the shortest code, and either receiver reads it."""
    codec, short = LowPrecision(s, code="fixed"), LowPrecision(s)
    lengths = set()
    for seed in range(3):
        x = vectors(seed, 1000, 0, zeros=0.3 * seed)
        message = codec.encode(key(seed), x)
        lengths.add(len(message))
        for receiver in (codec, short):
            np.testing.assert_array_equal(receiver.decode(message, x), short.compress(key(seed), x))
        assert len(short.encode(key(seed), x)) < len(message)
    (length,) = lengths
    head = len(LowPrecision(s, code="fixed").encode(key(0), np.zeros(0, np.float32)))
    assert length - head in (1000 * width // 8, 1000 * width // 8 + 1)  # the number of entries


def test_changes_that_are_not_finite_are_refused() -> None:
    for bad in (np.nan, np.inf):
        for codec in ALL:
            with pytest.raises(CodecError, match="not finite"):
                codec.encode(key(0), np.array([1.0, bad], np.float32))


def test_half_floats_do_not_overflow() -> None:
    x = np.array([1e30, -1e30, 70000.0, 1.0], np.float32)
    np.testing.assert_allclose(Float16().compress(key(0), x), [65504, -65504, 65504, 1])
    np.testing.assert_allclose(BFloat16().compress(key(0), x), x, rtol=0.01)


LIKE = {"w": np.zeros((12, 9), np.float32), "b": np.zeros(5, np.float32)}


def good_message(codec: Codec, seed: int = 0) -> bytes:
    rng = np.random.default_rng(seed)
    tree = {name: rng.normal(size=leaf.shape).astype(np.float32) for name, leaf in LIKE.items()}
    return codec.encode(key(seed), tree)


@pytest.mark.parametrize("codec", ALL, ids=str)
def test_other_messages_are_refused(codec: Codec) -> None:
    message = good_message(codec)
    for cut in range(len(message)):
        with pytest.raises(CodecError):
            codec.decode(message[:cut], LIKE)
    with pytest.raises(CodecError, match=r"3 bytes too long|longer than the plainest code"):
        codec.decode(message + b"abc", LIKE)
    with pytest.raises(CodecError, match="the message has 113 numbers, expected 108"):
        codec.decode(message, {"w": LIKE["w"]})
    for place, what in ((0, "mark"), (1, "version"), (2, "codec")):
        wrong = bytearray(message)
        wrong[place] ^= 0x40
        with pytest.raises(CodecError, match=f"the message's {what} is"):
            codec.decode(bytes(wrong), LIKE)


def test_a_message_of_other_levels_is_refused() -> None:
    with pytest.raises(CodecError, match="the message has 4 levels, expected 5"):
        LowPrecision(5).decode(good_message(LowPrecision(4)), LIKE)


def test_crafted_positions_are_refused() -> None:
    """Numbers that would wrap around in 32 bits, or stand after the end of their stream."""
    codec = LowPrecision(3)
    good = good_message(codec)
    head = good[: good.index(b"\x03\x00", 4) + 2 + 4]  # up to the norm
    for width, low, upper in ((30, 5, 0x20), (30, 2**30 - 1, 0x10), (30, 5, 0x08), (6, 5, 0x01)):
        low_bytes = (low << (8 * (-(-width // 8)) - width)).to_bytes(-(-width // 8), "big")
        message = head + bytes([0x40, 1, width]) + low_bytes + bytes([upper]) + b"\x00" * 2
        for length in range(len(head), len(message) + 1):
            with pytest.raises(CodecError):
                codec.decode(message[:length], LIKE)


def test_other_settings_are_refused() -> None:
    """A message of another inner codec, other norms or other shapes means something else."""
    pairs: list[tuple[Codec, Codec, str]] = [
        (TopK(0.1, Float16()), TopK(0.1, BFloat16()), "the values go by codec 1, not 3"),
        (RandomK(0.1, Float16()), RandomK(0.1, BFloat16()), "the values go by codec 1, not 3"),
        (LowPrecision(4, norm="tensor"), LowPrecision(4, norm=60), "norms are of other parts"),
    ]
    for sender, receiver, message in pairs:
        with pytest.raises(CodecError, match=message):
            receiver.decode(good_message(sender), LIKE)
    turned = {"w": LIKE["w"].T, "b": LIKE["b"]}
    for codec in ALL:
        with pytest.raises(CodecError, match="for a model of other shapes"):
            codec.decode(good_message(codec), turned)


FUZZED = 10_000


@pytest.mark.slow
@pytest.mark.parametrize("codec", ALL, ids=str)
def test_fuzzed_messages(codec: Codec) -> None:
    """10,000 in all: random bytes, and good messages with bytes changed, cut out or put in.

    Nothing but `CodecError` comes of them, or a change of the right shape; and decoding never holds
    more than 4 times what an honest message and its change take, beside a few pages.
    """
    rng = np.random.default_rng(1)
    honest = max(len(good_message(codec, seed)) for seed in range(5)) + 4 * 113
    codec.decode(good_message(codec), LIKE)  # compiled before memory is watched
    tracemalloc.start()
    for i in range(FUZZED // len(ALL) + 1):
        message = bytearray(good_message(codec, i % 5))
        if i % 3 == 0:  # a good header, and anything after it
            message[4:] = rng.bytes(int(rng.integers(0, 400)))
        for _ in range(rng.integers(1, 4)):
            place = int(rng.integers(0, len(message))) if message else 0
            match rng.integers(0, 3):
                case 0 if message:
                    message[place] = rng.integers(0, 256)
                case 1:
                    del message[place : place + int(rng.integers(1, 9))]
                case _:
                    message[place:place] = rng.bytes(int(rng.integers(1, 9)))
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        try:
            tree = codec.decode(bytes(message), LIKE)
        except CodecError:
            pass
        else:
            assert [leaf.shape for leaf in jax.tree.leaves(tree)] == [(5,), (12, 9)]
        peak = tracemalloc.get_traced_memory()[1] - before
        assert peak <= 4 * max(honest, len(message)) + 2**15
    tracemalloc.stop()


@pytest.mark.parametrize(
    "codec", [LowPrecision(1), LowPrecision(15), LowPrecision(1023), TopK(0.5), Sign()], ids=str
)
def test_decoding_a_large_message_needs_little_memory(codec: Codec) -> None:
    """No more than 4 times the change itself, whatever the code."""
    x = np.random.default_rng(0).normal(size=1_000_000).astype(np.float32)
    message = codec.encode(key(0), x)
    codec.decode(message, x)
    tracemalloc.start()
    codec.decode(message, x)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak <= 4 * x.nbytes


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: LowPrecision(0), "levels"),
        (lambda: LowPrecision(70_000), "levels"),
        (lambda: LowPrecision(1.5), "levels"),  # type: ignore[arg-type]
        (lambda: LowPrecision(1, code="elias"), "code"),  # type: ignore[arg-type]
        (lambda: LowPrecision(1, norm="layer"), "norm"),  # type: ignore[arg-type]
        (lambda: LowPrecision(1, norm=0), "norm"),
        (lambda: TopK(0.0), "fraction"),
        (lambda: RandomK(1.5), "fraction"),
        (lambda: TopK(0.1, TopK(0.1)), "inner"),
        (lambda: TopK(0.1, 3), "inner"),  # type: ignore[arg-type]
    ],
)
def test_bad_settings_name_themselves(make: Any, field: str) -> None:
    with pytest.raises(FieldError) as caught:
        make()
    assert caught.value.field == field


def test_codecs_have_numbers_of_their_own() -> None:
    assert len({codec.number for codec in CODECS.values()}) == len(CODECS)
    assert {type(codec) for codec in ALL} == set(CODECS.values())
