"""Local steps, as methods take them."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, PRNGKeyArray

from perfed.core.objective import Batch, BatchSize, Objective
from perfed.core.trees import Params
from perfed.methods.optimizers import SGD, Optimizer

_PLAIN = SGD()


def take_steps(
    step: Callable[[Any, Any], Any],
    start: Any,
    batches: Any,
    steps: int,
    pick: Int[Array, ""] | None = None,
) -> tuple[Any, Any]:
    """Repeat w <- step(w, batches[t]), t = 0..steps-1; also give the w before step `pick`."""

    def body(carry: tuple[Any, Any], t_and_batch: tuple[Int[Array, ""], Any]) -> tuple[Any, None]:
        w, picked = carry
        t, batch = t_and_batch
        if pick is not None:
            picked = jax.tree.map(lambda new, old: jnp.where(t == pick, new, old), w, picked)
        return (step(w, batch), picked), None

    first = (start, None if pick is None else start)
    (w, picked), _ = jax.lax.scan(body, first, (jnp.arange(steps), batches))
    return w, picked


def local_sgd(
    objective: Objective,
    params: Params,
    lr: float | Array,
    steps: int,
    batch: BatchSize,
    key: PRNGKeyArray,
    optimizer: Optimizer = _PLAIN,
    gradient: Callable[[Params, Batch], Params] | None = None,
) -> Params:
    """Steps along grad f_i(w; D) on the client's own data, each on a fresh batch D.

    Args:
        objective: f_i.
        params: where they start.
        lr: the step size.
        steps: how many.
        batch: examples per step.
        key: what batches are drawn by.
        optimizer: the rule of a step; its state begins anew.
        gradient: what is followed instead of `objective.grad`.
    """
    grad = gradient or objective.grad

    def step(carry: tuple[Params, Any], d: Batch) -> tuple[Params, Any]:
        w, state = carry
        return optimizer.step(w, grad(w, d), state, lr)

    start = (params, optimizer.init(params))
    return take_steps(step, start, objective.batches(key, steps, batch), steps)[0][0]


def proximal_gradient(
    objective: Objective, weight: float | Array, anchor: Params
) -> Callable[[Params, Batch], Params]:
    """The gradient of f_i(w; D) + (weight/2) |w - anchor|^2."""

    def gradient(w: Params, d: Batch) -> Params:
        return jax.tree.map(
            lambda g, own, held: g + weight * (own - held), objective.grad(w, d), w, anchor
        )

    return gradient
