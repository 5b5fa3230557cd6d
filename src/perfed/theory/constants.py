"""The constants of the papers' assumptions, measured at a model, without ever forming a Hessian.

Assumptions 2 to 5 of Per-FedAvg, 1 to 3 of pFedMe, 1 to 4 of FedPAQ bound gradients, curvatures and
their spread for *all* models; what is measured here holds at one. Where examples or clients are
sampled there is an interval of 95 % confidence (for all clients together; the largest of noisy
numbers is itself on the high side); where an eigenvalue is approached from inside the spectrum,
one up to its residual.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, Int
from scipy import stats
from scipy.linalg import eigh_tridiagonal

from perfed.core.errors import DivergedError, require_count
from perfed.core.objective import Batch, Objective
from perfed.core.random import Purpose, permuted
from perfed.core.trees import Params
from perfed.simulation import EngineState, Simulator
from perfed.simulation.engine import ClientFunction
from perfed.simulation.experiment import HINT, NO_RECORD, ClientRecord, DeviceData, Experiment

# Clients that are measured at once, for each device: those of one group are of about one size, and
# go through as many blocks of examples as the largest of them.
_GROUP = 8

# What float32 products leave of an eigenvalue, relative to the largest.
_ROUNDING = 2e-6

Matvec = Callable[[Float[Array, " p"]], Float[Array, " p"]]


class Estimate(NamedTuple):
    """A number, and an interval it lies in."""

    value: float
    low: float
    high: float

    @classmethod
    def exact(cls, value: float) -> "Estimate":
        """A number that is known up to rounding."""
        return cls(float(value), float(value), float(value))

    def root(self) -> "Estimate":
        """The square root."""
        return Estimate(*(float(np.sqrt(max(part, 0.0))) for part in self))


@final
@dataclass(frozen=True)
class Effort:
    """How much is spent on measuring.

    Attributes:
        steps: Lanczos steps for a client's curvature.
        examples: examples of a client whose gradients are compared.
        hessian_examples: examples of a client whose Hessians are compared.
        hessian_clients: clients whose Hessians are compared with the average one.
        hessian_steps: Lanczos steps for a difference of Hessians.
        tensor_starts: directions from which the third derivative is climbed.
        tensor_steps: steps of each climb.
    """

    steps: int = 30
    examples: int = 256
    hessian_examples: int = 6
    hessian_clients: int = 16
    hessian_steps: int = 12
    tensor_starts: int = 3
    tensor_steps: int = 8

    def __post_init__(self) -> None:
        for field, value in vars(self).items():
            require_count(field, value)


USUAL = Effort()


@final
@dataclass(frozen=True)
class Constants:
    """What the theorems ask for, at one model.

    Attributes:
        B: largest |grad f_i|.
        L: largest |Hessian of f_i| (spectral norm): smoothness.
        mu: smallest eigenvalue of any client's Hessian; below 0, f_i is not convex there.
        rho: largest third derivative of f_i, the Hessian's Lipschitz constant nearby; found by
            climbing, so no less than this.
        sigma_G: root of the largest client's mean |grad l(z) - grad f_i|^2; pFedMe's gamma_f and
            FedPAQ's sigma.
        sigma_H: the same for Hessians of single examples.
        gamma_G: root of the mean over clients of |grad f_i - grad f|^2; pFedMe's sigma_f.
        gamma_H: the same for Hessians.
        q: the codec's (FedPAQ, Assumption 1); None: it is not unbiased.
        example_B: largest gradient of a single example that was looked at, for (14a).
        loss: f(w), the mean over clients of f_i.
        gradient: |grad f|, of the mean over clients.
        client_L: each client's L_i.
        client_B: each client's B_i.
        clients: n.
        parameters: how many the model has.
    """

    B: Estimate
    L: Estimate
    mu: Estimate
    rho: Estimate
    sigma_G: Estimate
    sigma_H: Estimate
    gamma_G: Estimate
    gamma_H: Estimate
    q: float | None
    example_B: float
    loss: float
    gradient: float
    client_L: Float[np.ndarray, " clients"]
    client_B: Float[np.ndarray, " clients"]
    clients: int
    parameters: int

    def joined(self, other: "Constants") -> "Constants":
        """What bounds both, at two models of one federation: this one first, then the other.

        `loss` stays that of the first, where a run begins; `gradient` is that of the last.
        """

        def larger(one: Estimate, two: Estimate) -> Estimate:
            return Estimate(*(max(pair) for pair in zip(one, two, strict=True)))

        both = {
            name: larger(getattr(self, name), getattr(other, name))
            for name in ("B", "L", "rho", "sigma_G", "sigma_H", "gamma_G", "gamma_H")
        }
        return Constants(
            **both,
            mu=Estimate(*(min(pair) for pair in zip(self.mu, other.mu, strict=True))),
            q=self.q,
            example_B=max(self.example_B, other.example_B),
            loss=self.loss,
            gradient=other.gradient,
            client_L=np.maximum(self.client_L, other.client_L),
            client_B=np.maximum(self.client_B, other.client_B),
            clients=self.clients,
            parameters=self.parameters,
        )


def measure(
    engine: Simulator,
    w: Params | None = None,
    effort: Effort = USUAL,
    log: Callable[[str], None] = lambda line: None,
) -> Constants:
    """The constants at a model; None: at the run's first one. `log` is told what comes next."""
    experiment = engine.experiment
    w = experiment.init_params() if w is None else w
    state = engine.init()._replace(params=w, server_state=None, clients=NO_RECORD)
    sizes = tuple(leaf.size for leaf in jax.tree.leaves(w))
    n, p = experiment.federation.clients, sum(sizes)

    log(f"gradients of {n} clients")
    first = _on_clients(engine, _gradients(effort.examples), state)
    gradient = np.asarray(first.gradient, np.float64)
    lost = np.flatnonzero(~np.isfinite(gradient).all(axis=1))
    if len(lost):
        raise DivergedError(
            f"nothing can be measured at this model: the gradient of client "
            f"{experiment.federation.names[lost[0]]} is not finite. {HINT}"
        )
    spread = gradient - gradient.mean(axis=0)
    gamma_G = Estimate.exact(float(np.mean(np.sum(spread**2, axis=1)))).root()
    B_i = np.linalg.norm(gradient, axis=1)
    used = np.arange(effort.examples) < np.asarray(experiment.federation.train.size)[:, None]

    log(f"curvature of {n} clients")
    L_i, mu_i = _curvature(*_on_clients(engine, _spectrum(min(effort.steps, p)), state))
    log("Hessians of single examples")
    noise = _hessian_noise(effort.hessian_examples, min(effort.hessian_steps, p))
    norms_H, most_H = _norms(*_on_clients(engine, noise, state))
    log("third derivatives")
    rho_i = np.asarray(
        _on_clients(engine, _third(effort.tensor_starts, effort.tensor_steps), state)
    )
    log("Hessians of clients against their average")
    gamma_H = _hessian_diversity(engine, state, effort)
    return Constants(
        B=Estimate.exact(B_i.max()),
        L=_largest(L_i),
        mu=Estimate(*(min(getattr(mu, end) for mu in mu_i) for end in Estimate._fields)),
        rho=Estimate(float(rho_i.max()), float(rho_i.max()), float("inf")),
        sigma_G=_largest(_means(np.asarray(first.squares), experiment)).root(),
        sigma_H=_largest(_means(norms_H**2, experiment, most_H**2)).root(),
        gamma_G=gamma_G,
        gamma_H=gamma_H,
        q=experiment.pipeline.variance(sizes),
        example_B=float(np.asarray(first.norms)[used].max()),
        loss=float(np.mean(first.loss)),
        gradient=float(np.linalg.norm(gradient.mean(axis=0))),
        client_L=np.array([L.value for L in L_i]),
        client_B=B_i,
        clients=n,
        parameters=p,
    )


class _Gradients(NamedTuple):
    """One client's: f_i, grad f_i, and of some examples |grad l - grad f_i|^2 and |grad l|."""

    loss: Float[Array, ""]
    gradient: Float[Array, " p"]
    squares: Float[Array, " examples"]
    norms: Float[Array, " examples"]


def _gradients(count: int) -> ClientFunction:
    def of_client(
        experiment: Experiment,
        data: DeviceData,
        state: EngineState,
        record: ClientRecord,
        client: Array,
    ) -> _Gradients:
        w, objective = state.params, experiment.objective(data.train, client)
        mean = flat(objective.grad(w))

        def of_example(z: Int[Array, ""]) -> tuple[Array, Array]:
            own = flat(objective.grad(w, Batch(z[None])))
            return jnp.sum((own - mean) ** 2), jnp.linalg.norm(own)

        squares, norms = jax.lax.map(
            of_example, _sample(experiment, objective, data.number[client], count)
        )
        return _Gradients(objective.loss(w), mean, squares, norms)

    return of_client


def _spectrum(steps: int) -> ClientFunction:
    """The tridiagonal matrix of a client's Hessian."""

    def of_client(
        experiment: Experiment,
        data: DeviceData,
        state: EngineState,
        record: ClientRecord,
        client: Array,
    ) -> tuple[Array, Array]:
        w, objective = state.params, experiment.objective(data.train, client)
        at, shaped = ravel_pytree(w)
        start = jax.random.normal(
            experiment.client_key(Purpose.THEORY, 0, data.number[client]), at.shape
        )
        return lanczos(lambda v: flat(objective.hvp(w, shaped(v))), start, steps)

    return of_client


def _hessian_noise(count: int, steps: int) -> ClientFunction:
    """The tridiagonal matrices of (Hessian of an example) - (Hessian of f_i), for some examples."""

    def of_client(
        experiment: Experiment,
        data: DeviceData,
        state: EngineState,
        record: ClientRecord,
        client: Array,
    ) -> tuple[Array, Array]:
        w, objective = state.params, experiment.objective(data.train, client)
        at, shaped = ravel_pytree(w)
        starts = jax.random.normal(
            experiment.client_key(Purpose.THEORY, 1, data.number[client]), (count, *at.shape)
        )

        def of_example(z: Int[Array, ""], start: Float[Array, " p"]) -> tuple[Array, Array]:
            def difference(v: Float[Array, " p"]) -> Float[Array, " p"]:
                one = objective.hvp(w, shaped(v), Batch(z[None]))
                return flat(one) - flat(objective.hvp(w, shaped(v)))

            return lanczos(difference, start, steps)

        some = _sample(experiment, objective, data.number[client], count)
        return jax.vmap(of_example)(some, starts)

    return of_client


def _third(starts: int, steps: int) -> ClientFunction:
    """Max over unit u of |D^3 f_i [u, u, u]|, the norm of the third derivative (Banach).

    Power iterations u <- D^3 f_i [u, u, .], from several directions; the largest value on the way.
    """

    def of_client(
        experiment: Experiment,
        data: DeviceData,
        state: EngineState,
        record: ClientRecord,
        client: Array,
    ) -> Float[Array, ""]:
        w, objective = state.params, experiment.objective(data.train, client)
        at, shaped = ravel_pytree(w)

        def climb(u: Float[Array, " p"]) -> Float[Array, ""]:
            def step(u: Float[Array, " p"], _: None) -> tuple[Array, Array]:
                u = _unit(u)
                v = shaped(u)
                third = jax.jvp(lambda at: objective.hvp(at, v), (w,), (v,))[1]
                along = flat(third)
                value = jnp.vdot(along, u)
                # Plain power iterations of an odd form may swing; with this shift they climb.
                return jnp.sign(value) * along + jnp.abs(value) * u, jnp.abs(value)

            return jnp.max(jax.lax.scan(step, u, length=steps)[1])

        key = experiment.client_key(Purpose.THEORY, 2, data.number[client])
        return jnp.max(jax.lax.map(climb, jax.random.normal(key, (starts, *at.shape))))

    return of_client


def _hessian_diversity(engine: Simulator, state: EngineState, effort: Effort) -> Estimate:
    """The root of (1/n) sum_i |Hessian of f_i - Hessian of f|^2, over sampled clients (13)."""
    experiment = engine.experiment
    n = experiment.federation.clients
    count = min(n, effort.hessian_clients)
    rng = np.random.default_rng(experiment.seed)
    chosen = np.sort(rng.choice(n, count, replace=False))
    at, shaped = ravel_pytree(state.params)

    def product(
        experiment: Experiment,
        data: DeviceData,
        state: EngineState,
        record: ClientRecord,
        client: Array,
    ) -> Float[Array, "vectors p"]:
        w, vectors = state.params
        objective = experiment.objective(data.train, client)
        of_vector = jax.vmap(lambda v: flat(objective.hvp(w, shaped(v))))
        products: Array = of_vector(vectors)
        return products

    run = engine.map_clients(product)
    by_size = np.argsort(np.asarray(experiment.federation.train.size), kind="stable")
    steps = min(effort.hessian_steps, at.size)
    start = rng.normal(size=(count, at.size)).astype(np.float32)

    def difference(vectors: Float[np.ndarray, "vectors p"]) -> Float[np.ndarray, "vectors p"]:
        total, own = np.zeros_like(vectors), np.zeros_like(vectors)
        for group in _groups(engine, by_size):
            found = np.asarray(run(state._replace(params=(state.params, vectors)), group))
            fresh = len(dict.fromkeys(group))  # a group that is short repeats its last client
            total += found[:fresh].sum(axis=0)
            for at, client in enumerate(group[:fresh]):
                for place in np.flatnonzero(chosen == client):
                    own[place] = found[at, place]
        return own - total / n

    alpha, beta = _lanczos_on_host(difference, start, steps)
    squares, most = (norms**2 for norms in _norms(alpha, beta))
    return Estimate(
        float(squares.mean()),
        float(squares.mean()) - _half(squares, n),
        float(most.mean()) + _half(most, n),
    ).root()


def lanczos(
    matvec: Matvec, start: Float[Array, " p"], steps: int
) -> tuple[Float[Array, " steps"], Float[Array, " steps"]]:
    """The diagonal and what is beside it of a symmetric operator's tridiagonal matrix.

    Three vectors are kept, whatever the number of steps. Without orthogonalizing against all of
    them eigenvalues may come twice, which does not matter for the extreme ones.
    """

    def step(
        carry: tuple[Array, Array, Array], _: None
    ) -> tuple[tuple[Array, Array, Array], tuple[Array, Array]]:
        before, v, beta = carry
        u = matvec(v) - beta * before
        alpha = jnp.vdot(u, v)
        u = u - alpha * v
        beta = jnp.linalg.norm(u)
        return (v, u / jnp.where(beta > 0, beta, 1.0), beta), (alpha, beta)

    first = (jnp.zeros_like(start), _unit(start), jnp.zeros(()))
    _, (alpha, beta) = jax.lax.scan(step, first, length=steps)
    return alpha, beta


def _lanczos_on_host(
    matvec: Callable[[np.ndarray], np.ndarray],
    start: Float[np.ndarray, "vectors p"],
    steps: int,
) -> tuple[Float[np.ndarray, "vectors steps"], Float[np.ndarray, "vectors steps"]]:
    """`lanczos` for several operators that one function applies, where clients work together."""
    v = start / np.linalg.norm(start, axis=1, keepdims=True)
    before, beta = np.zeros_like(v), np.zeros((len(v), 1), v.dtype)
    alphas, betas = [], []
    for _ in range(steps):
        u = matvec(v) - beta * before
        alpha = np.sum(u * v, axis=1, keepdims=True)
        u = u - alpha * v
        beta = np.linalg.norm(u, axis=1, keepdims=True)
        before, v = v, u / np.where(beta > 0, beta, 1.0)
        alphas.append(alpha[:, 0])
        betas.append(beta[:, 0])
    return np.stack(alphas, axis=1), np.stack(betas, axis=1)


class _Extremes(NamedTuple):
    """The outermost eigenvalues of a tridiagonal matrix, and how far true ones may be from them."""

    lowest: float
    highest: float
    low_residual: float
    high_residual: float


def _extremes(alpha: Float[np.ndarray, " steps"], beta: Float[np.ndarray, " steps"]) -> _Extremes:
    alpha, beta = np.asarray(alpha, np.float64), np.asarray(beta, np.float64)
    scale = max(np.abs(alpha).max(), beta.max())
    # Where beta vanishes all of the operator that the start reaches has been seen.
    ends = np.flatnonzero(beta <= 1e-6 * scale)
    size = int(ends[0]) + 1 if len(ends) else len(alpha)
    values, vectors = eigh_tridiagonal(alpha[:size], beta[: size - 1])
    residual = beta[size - 1] * np.abs(vectors[-1]) + _ROUNDING * scale
    return _Extremes(*(float(x) for x in (values[0], values[-1], residual[0], residual[-1])))


def _curvature(
    alpha: Float[np.ndarray, "clients steps"], beta: Float[np.ndarray, "clients steps"]
) -> tuple[list[Estimate], list[Estimate]]:
    """Each client's L_i and smallest eigenvalue."""
    L, mu = [], []
    for own in map(_extremes, np.asarray(alpha), np.asarray(beta)):
        rounding = _ROUNDING * max(abs(own.lowest), abs(own.highest))
        above, below = own.highest + own.high_residual, -own.lowest + own.low_residual
        value = max(own.highest, -own.lowest)
        L.append(Estimate(value, value - rounding, max(above, below)))
        mu.append(Estimate(own.lowest, own.lowest - own.low_residual, own.lowest + rounding))
    return L, mu


def _norms(
    alpha: Float[np.ndarray, "*many steps"], beta: Float[np.ndarray, "*many steps"]
) -> tuple[Float[np.ndarray, "*many"], Float[np.ndarray, "*many"]]:
    """The spectral norms as they were found, from inside the spectrum, and the most they may be."""
    alpha, beta = np.asarray(alpha), np.asarray(beta)
    flat = zip(alpha.reshape(-1, alpha.shape[-1]), beta.reshape(-1, beta.shape[-1]), strict=True)
    ends = [_extremes(a, b) for a, b in flat]
    found = [max(own.highest, -own.lowest) for own in ends]
    most = [max(own.highest + own.high_residual, -own.lowest + own.low_residual) for own in ends]
    shape = alpha.shape[:-1]
    return np.array(found).reshape(shape), np.array(most).reshape(shape)


def _means(
    values: Float[np.ndarray, "clients examples"],
    experiment: Experiment,
    most: Float[np.ndarray, "clients examples"] | None = None,
) -> list[Estimate]:
    """Each client's mean over its examples, from those that were looked at.

    `most` is how large each value may be, where that is not the value itself.
    """
    found = []
    most = values if most is None else most
    for own, top, n in zip(values, most, experiment.federation.train.size, strict=True):
        seen, highest = (
            np.asarray(part[: min(len(own), int(n))], np.float64) for part in (own, top)
        )
        # Of the largest client: so sure of each that all intervals hold together.
        doubt = 0.05 / len(values)
        mean = float(seen.mean())
        low = mean - _half(seen, int(n), doubt)
        found.append(Estimate(mean, low, float(highest.mean()) + _half(highest, int(n), doubt)))
    return found


def _half(seen: Float[np.ndarray, " some"], n: int, doubt: float = 0.05) -> float:
    """Half of the interval of a mean, from some of n values drawn without replacement."""
    k = len(seen)
    if k == n:
        return 0.0
    if k < 2:
        return float("inf")
    error = seen.std(ddof=1) / np.sqrt(k) * np.sqrt(1 - k / n)
    return float(stats.t.ppf(1 - doubt / 2, k - 1) * error)


def _largest(estimates: Sequence[Estimate]) -> Estimate:
    """The largest of several numbers, each in its interval."""
    return Estimate(*(max(getattr(e, end) for e in estimates) for end in Estimate._fields))


def _sample(
    experiment: Experiment, objective: Objective, number: Array, count: int
) -> Int[Array, " examples"]:
    """Positions of different examples; a client with fewer repeats them from its first on."""
    n = objective.examples.size
    key = experiment.client_key(Purpose.THEORY, 3, number)
    return permuted(key, jnp.arange(count) % n, n)


def _on_clients(engine: Simulator, function: ClientFunction, state: EngineState) -> Any:
    """A function of every client, group by group; the results stacked in the clients' order."""
    run = engine.map_clients(function)
    sizes = np.asarray(engine.experiment.federation.train.size)
    order = np.argsort(sizes, kind="stable")
    parts = [run(state, group) for group in _groups(engine, order)]
    place = np.empty(len(order), int)
    place[order] = np.arange(len(order))
    return jax.tree.map(lambda *leaves: np.concatenate(leaves)[: len(order)][place], *parts)


def _groups(engine: Simulator, clients: Int[np.ndarray, " clients"]) -> list[list[int]]:
    """Groups of one size, so that one program serves all; the last repeats its last client."""
    count = min(len(clients), _GROUP * jax.local_device_count())
    listed = [int(client) for client in clients]
    groups = [listed[i : i + count] for i in range(0, len(listed), count)]
    groups[-1] += groups[-1][-1:] * (count - len(groups[-1]))
    return groups


def flat(tree: Params) -> Float[Array, " p"]:
    """All entries in one vector."""
    return ravel_pytree(tree)[0]


def _unit(v: Float[Array, " p"]) -> Float[Array, " p"]:
    norm = jnp.linalg.norm(v)
    return v / jnp.where(norm > 0, norm, 1.0)
