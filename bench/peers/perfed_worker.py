"""Perfed: one host device per core, as it comes. A round is one turn of the compiled loop."""

from importlib.metadata import version

import jax
import numpy as np

from bench.peers import common
from perfed import MLP, Experiment, FedAvg, Federation, Task, Vectorized
from perfed.data import FlatExamples


def build(x: common.Floats, y: common.Labels) -> common.Contestant:
    """The vectorized engine; N rounds are one call, as in a run."""
    sizes = [common.SIZE] * common.CLIENTS
    train = FlatExamples.from_rows(x.reshape(-1, common.SIZES[0]), y.reshape(-1), sizes)
    # Nothing is evaluated: what is held out is never looked at.
    data = Federation.from_examples(train, train, classes=common.SIZES[-1])
    method = FedAvg(lr=common.RATE, tau=common.TAU, batch=common.BATCH)
    model = MLP(common.SIZES[0], common.SIZES[-1], common.SIZES[1:-1], "elu")
    engine = Vectorized(Experiment(data, Task(model), method, common.COHORT))
    state = engine.init()
    leaves, tree = jax.tree.flatten(state.params)
    order = [by_shape(leaf.shape) for leaf in leaves]
    first = common.first_weights()
    placed = [
        jax.device_put(first[i], leaf.sharding) for i, leaf in zip(order, leaves, strict=True)
    ]
    state = state._replace(params=jax.tree.unflatten(tree, placed))

    def rounds(n: int) -> None:
        nonlocal state
        state = jax.block_until_ready(engine.advance(state, n))

    def weights() -> common.Weights:
        found = jax.tree.leaves(state.params)
        return [np.asarray(found[order.index(i)]) for i in range(len(order))]

    versions = f"{version('perfed')}, JAX {jax.__version__}"
    return common.Contestant(versions, rounds, weights)


def by_shape(shape: tuple[int, ...]) -> int:
    """Which of the shared weights has this shape; no two of them have the same."""
    return [w.shape for w in common.first_weights()].index(shape)


if __name__ == "__main__":
    common.serve("perfed", build, jax.device_count())
