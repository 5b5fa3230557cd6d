"""What is measured of each client, as functions of its objective that engines run side by side."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, Int, PRNGKeyArray

from perfed.core.objective import Batch, Objective
from perfed.core.random import Purpose, permuted
from perfed.core.trees import Params
from perfed.simulation import EngineState, Simulator
from perfed.simulation.engine import ClientFunction
from perfed.simulation.experiment import ClientRecord, DeviceData, Experiment
from perfed.theory.lanczos import lanczos, unit

# Clients that are measured at once, for each device: those of one group have similar sizes, and
# take as many blocks of examples as the largest of them.
_GROUP = 8

# What a client's random numbers are for.
_LANCZOS, _DIFFERENCE, _TENSOR, _EXAMPLES = range(4)

Keys = Callable[[int], PRNGKeyArray]
ObjectiveFunction = Callable[[Objective, Any, Keys], Any]


class Gradients(NamedTuple):
    """One client's: f_i, grad f_i, and of some examples |grad l - grad f_i|^2 and |grad l|."""

    loss: Float[Array, ""]
    gradient: Float[Array, " p"]
    squares: Float[Array, " examples"]
    norms: Float[Array, " examples"]


def client_function(function: ObjectiveFunction) -> ClientFunction:
    """A function of a client's objective, the parameters and its random keys, for an engine."""

    def of_client(
        experiment: Experiment,
        data: DeviceData,
        state: EngineState,
        record: ClientRecord,
        client: Array,
    ) -> Any:
        def key(use: int) -> PRNGKeyArray:
            return experiment.client_key(Purpose.THEORY, use, data.number[client])

        return function(experiment.objective(data.train, client, data.frozen), state.params, key)

    return of_client


def gradients(count: int) -> ClientFunction:
    """A client's loss and gradient, and how gradients of so many examples differ from it."""

    def of_client(objective: Objective, w: Params, key: Keys) -> Gradients:
        mean = flat(objective.grad(w))

        def of_example(z: Int[Array, ""]) -> tuple[Array, Array]:
            own = flat(objective.grad(w, Batch(z[None])))
            return jnp.sum((own - mean) ** 2), jnp.linalg.norm(own)

        squares, norms = jax.lax.map(of_example, _sample(objective, key, count))
        return Gradients(objective.loss(w), mean, squares, norms)

    return client_function(of_client)


def spectrum(steps: int) -> ClientFunction:
    """The tridiagonal matrix of a client's Hessian."""

    def of_client(objective: Objective, w: Params, key: Keys) -> tuple[Array, Array]:
        at, shaped = ravel_pytree(w)
        start = jax.random.normal(key(_LANCZOS), at.shape)
        return lanczos(lambda v: flat(objective.hvp(w, shaped(v))), start, steps)

    return client_function(of_client)


def hessian_noise(count: int, steps: int) -> ClientFunction:
    """The tridiagonal matrices of (Hessian of an example) - (Hessian of f_i), for some examples."""

    def of_client(objective: Objective, w: Params, key: Keys) -> tuple[Array, Array]:
        at, shaped = ravel_pytree(w)
        starts = jax.random.normal(key(_DIFFERENCE), (count, *at.shape))

        def of_example(z: Int[Array, ""], start: Float[Array, " p"]) -> tuple[Array, Array]:
            def difference(v: Float[Array, " p"]) -> Float[Array, " p"]:
                one = objective.hvp(w, shaped(v), Batch(z[None]))
                return flat(one) - flat(objective.hvp(w, shaped(v)))

            return lanczos(difference, start, steps)

        return jax.vmap(of_example)(_sample(objective, key, count), starts)

    return client_function(of_client)


def third_derivative(starts: int, steps: int) -> ClientFunction:
    """Max over unit u of |D^3 f_i [u, u, u]|, the norm of the third derivative (Banach).

    Power iterations u <- D^3 f_i [u, u, .] from several starts; the largest value of all steps.
    """

    def of_client(objective: Objective, w: Params, key: Keys) -> Float[Array, ""]:
        at, shaped = ravel_pytree(w)

        def iterate(u: Float[Array, " p"]) -> Float[Array, ""]:
            def step(u: Float[Array, " p"], _: None) -> tuple[Array, Array]:
                u = unit(u)
                v = shaped(u)
                third = flat(jax.jvp(lambda at: objective.hvp(at, v), (w,), (v,))[1])
                value = jnp.vdot(third, u)
                # Plain power iterations of an odd form may oscillate; with this shift they ascend.
                return jnp.sign(value) * third + jnp.abs(value) * u, jnp.abs(value)

            return jnp.max(jax.lax.scan(step, u, length=steps)[1])

        start = jax.random.normal(key(_TENSOR), (starts, *at.shape))
        return jnp.max(jax.lax.map(iterate, start))

    return client_function(of_client)


def hessian_products(shaped: Callable[[Array], Params]) -> ClientFunction:
    """A client's Hessian times several vectors; the parameters come with them."""

    def of_client(
        objective: Objective, w_and_vectors: tuple[Params, Array], key: Keys
    ) -> Float[Array, "vectors p"]:
        w, vectors = w_and_vectors
        products: Array = jax.vmap(lambda v: flat(objective.hvp(w, shaped(v))))(vectors)
        return products

    return client_function(of_client)


def on_clients(engine: Simulator, function: ClientFunction, state: EngineState) -> Any:
    """A function of every client, group by group; the results stacked in the clients' order."""
    run = engine.map_clients(function)
    order = np.argsort(np.asarray(engine.experiment.federation.train.size), kind="stable")
    parts = [run(state, group) for group in groups_by_size(engine)]
    place = np.empty(len(order), int)
    place[order] = np.arange(len(order))
    return jax.tree.map(lambda *leaves: np.concatenate(leaves)[: len(order)][place], *parts)


def groups_by_size(engine: Simulator) -> list[list[int]]:
    """All clients by size, in groups of equal length; the last group repeats its last client."""
    sizes = np.asarray(engine.experiment.federation.train.size)
    clients = [int(client) for client in np.argsort(sizes, kind="stable")]
    count = min(len(clients), _GROUP * jax.local_device_count())
    groups = [clients[i : i + count] for i in range(0, len(clients), count)]
    groups[-1] += groups[-1][-1:] * (count - len(groups[-1]))
    return groups


def flat(tree: Params) -> Float[Array, " p"]:
    """All entries in one vector."""
    return ravel_pytree(tree)[0]


def _sample(objective: Objective, key: Keys, count: int) -> Int[Array, " examples"]:
    """Positions of different examples; a client with fewer repeats them from its first on."""
    n = objective.examples.size
    return permuted(key(_EXAMPLES), jnp.arange(count) % n, n)
