"""PyTorch's operations as JAX computes them: torchax, and what it does otherwise than PyTorch."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any
from warnings import catch_warnings, filterwarnings

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from perfed.core.errors import FieldError


@cache
def load_torchax() -> None:
    """The import of torchax, which turns a fast path off for everybody: it stays as it was."""
    import torch

    fast_path = torch.backends.mha.get_fastpath_enabled()
    import torchax  # noqa: F401

    torch.backends.mha.set_fastpath_enabled(fast_path)


@cache
def environment() -> Any:
    """What computes PyTorch's operations by JAX: our own, so that nobody else's is changed."""
    import torch
    from torchax.tensor import Environment

    env = Environment()

    def random_key(generator: Any = None) -> PRNGKeyArray:
        if env.param.prng is None:
            raise FieldError(
                "model", "a random operation", "draws numbers in evaluation, too, as none may"
            )
        key: PRNGKeyArray = env.param.get_and_rotate_prng_key()
        return key

    env.get_and_rotate_prng_key = random_key
    env.override_op_definition(torch.nn.functional.batch_norm, _batch_norm)
    env.override_op_definition(torch.nn.functional.group_norm, _group_norm)
    for kind in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
        env.override_op_definition(getattr(torch, kind), _recurrent(env, kind))
    return env


@contextmanager
def computed_by_jax(key: PRNGKeyArray | None) -> Iterator[Any]:
    """Within, PyTorch's operations are computed by JAX; after it, nothing is changed.

    Args:
        key: what random numbers are drawn from; None: none may be drawn.
    """
    import torch

    env = environment()
    with jax.ensure_compile_time_eval():
        env.param  # noqa: B018  # a thread's first one holds an array, not one of a program
    fast_path = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # it would not be computed by JAX
    try:
        with catch_warnings(), env.override_property(prng=key), torch.no_grad():
            # PyTorch's indices have 64 bits, JAX's 32.
            filterwarnings("ignore", "Explicitly requested dtype", UserWarning)
            with env, torch.device("jax"):
                yield env
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_path)


def _batch_norm(
    x: Any,
    running_mean: Any,
    running_var: Any,
    weight: Any = None,
    bias: Any = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    """Batch normalization that renews the running statistics, which torchax leaves as they are."""
    import torch

    axes = [i for i in range(x.ndim) if i != 1]
    shape = [-1 if i == 1 else 1 for i in range(x.ndim)]
    if training:
        mean = x.mean(axes)
        centered = x - mean.reshape(shape)
        var = (centered * centered).mean(axes)  # a power's derivative has a logarithm
        if running_mean is not None:
            count = x.numel() // x.shape[1]
            if count < 2:
                raise FieldError(
                    "batch", count, "batch normalization needs more than one value per channel"
                )
            with torch.no_grad():
                unbiased = var.detach() * (count / (count - 1))
                running_mean.copy_((1 - momentum) * running_mean + momentum * mean.detach())
                running_var.copy_((1 - momentum) * running_var + momentum * unbiased)
    else:
        mean, var = running_mean, running_var
    scale = torch.rsqrt(var + eps)
    scale = scale if weight is None else scale * weight
    y = (x - mean.reshape(shape)) * scale.reshape(shape)
    return y if bias is None else y + bias.reshape(shape)


def _group_norm(
    x: Any, groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> Any:
    """Group normalization, with examples and groups on axes of their own.

    PyTorch's own has them on one, for which the whole array would have to be moved in memory.
    """
    import torch

    grouped = x.reshape(x.shape[0], groups, x.shape[1] // groups, *x.shape[2:])
    axes = list(range(2, grouped.ndim))
    centered = grouped - grouped.mean(axes, keepdim=True)
    normal = centered * torch.rsqrt((centered * centered).mean(axes, keepdim=True) + eps)
    y = normal.reshape(x.shape)
    shape = [-1 if i == 1 else 1 for i in range(x.ndim)]
    y = y if weight is None else y * weight.reshape(shape)
    return y if bias is None else y + bias.reshape(shape)


def _recurrent(env: Any, kind: str) -> Any:
    """The operation of recurrent layers as a loop; torchax writes every step out."""

    def run(
        x: Any,
        first: Any,
        weights: Any,
        has_biases: bool,
        layers: int,
        dropout: float,
        train: bool,
        both_ways: bool,
        batch_first: bool,
    ) -> Any:
        if not isinstance(weights, list | tuple) or (kind == "lstm") != isinstance(
            first, list | tuple
        ):
            raise FieldError("model", kind, "reads a PackedSequence; pad the sequences instead")
        inputs, state, leaves = env.t2j_iso((x, first, list(weights)))
        ways = 2 if both_ways else 1
        each = len(leaves) // (layers * ways)
        if each != (4 if has_biases else 2):
            raise FieldError("model", f"{kind} with proj_size", "cannot be converted; leave it out")
        states = tuple(state) if kind == "lstm" else (state,)
        y = jnp.swapaxes(inputs, 0, 1) if batch_first else inputs
        last = []
        for layer in range(layers):
            if layer and dropout and train:
                keep = jax.random.bernoulli(env.get_and_rotate_prng_key(), 1 - dropout, y.shape)
                y = jnp.where(keep, y / (1 - dropout), 0.0)
            outputs = []
            for way in range(ways):
                i = layer * ways + way
                start = tuple(part[i] for part in states)
                end, own = _layer(kind, y, start, leaves[i * each : (i + 1) * each], way == 1)
                outputs.append(own)
                last.append(end)
            y = jnp.concatenate(outputs, axis=-1)
        ends = tuple(jnp.stack(parts) for parts in zip(*last, strict=True))
        y = jnp.swapaxes(y, 0, 1) if batch_first else y
        return env.j2t_iso((y, *ends))

    return run


def _layer(
    kind: str,
    x: Float[Array, "length b inputs"],
    start: tuple[Array, ...],
    weights: Sequence[Array],
    backwards: bool,
) -> tuple[tuple[Array, ...], Float[Array, "length b hidden"]]:
    """One layer in one direction: its last state, and its outputs."""
    read_weight, recall_weight, *biases = weights
    read_bias, recall_bias = biases or (0.0, 0.0)

    def step(state: tuple[Array, ...], read: Array) -> tuple[tuple[Array, ...], Array]:
        recalled = state[0] @ recall_weight.T + recall_bias
        state = _CELLS[kind](state, read, recalled)
        return state, state[0]

    # All that does not wait for the state is one product for all steps.
    end, outputs = jax.lax.scan(step, start, x @ read_weight.T + read_bias, reverse=backwards)
    return end, outputs


def _lstm_cell(state: tuple[Array, ...], read: Array, recalled: Array) -> tuple[Array, ...]:
    into, forget, new, out = jnp.split(read + recalled, 4, axis=-1)
    memory = jax.nn.sigmoid(forget) * state[1] + jax.nn.sigmoid(into) * jnp.tanh(new)
    return jax.nn.sigmoid(out) * jnp.tanh(memory), memory


def _gru_cell(state: tuple[Array, ...], read: Array, recalled: Array) -> tuple[Array, ...]:
    reset, update, new = jnp.split(read, 3, axis=-1)
    reset_s, update_s, new_s = jnp.split(recalled, 3, axis=-1)
    gate = jax.nn.sigmoid(update + update_s)
    candidate = jnp.tanh(new + jax.nn.sigmoid(reset + reset_s) * new_s)
    return (gate * state[0] + (1 - gate) * candidate,)


_CELLS = {
    "lstm": _lstm_cell,
    "gru": _gru_cell,
    "rnn_tanh": lambda state, read, recalled: (jnp.tanh(read + recalled),),
    "rnn_relu": lambda state, read, recalled: (jax.nn.relu(read + recalled),),
}
