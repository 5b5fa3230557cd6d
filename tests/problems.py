"""Small federations whose losses, gradients and Hessians NumPy can write down."""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from perfed.core.objective import Examples, Objective
from perfed.core.random import Purpose, fold
from perfed.core.task import Task
from perfed.data import Federation, FlatExamples
from perfed.methods import Method, RoundContext
from perfed.pipeline import Pipeline
from perfed.simulation import Experiment

DIMENSION = 4
SIZES = (5, 9, 3, 12, 7)


@dataclass(frozen=True)
class Linear:
    """One number out, no bias: with the squared loss, every client is a quadratic."""

    dimension: int = DIMENSION

    def init(self, key: Any) -> Any:
        return jax.random.normal(key, (self.dimension,))

    def apply(self, params: Any, x: Any) -> Any:
        return x @ params


def half_squared(outputs: Any, y: Any) -> Any:
    return 0.5 * (outputs - y) ** 2


def logistic(outputs: Any, y: Any) -> Any:
    return jnp.logaddexp(0.0, outputs) - y * outputs


QUADRATIC = Task(Linear(), loss=half_squared)
LOGISTIC = Task(Linear(), loss=logistic)


def federation(seed: int = 0, sizes: tuple[int, ...] = SIZES, binary: bool = False) -> Federation:
    """Uneven clients, each with a problem of its own."""
    rng = np.random.default_rng(seed)

    def side() -> FlatExamples:
        parts = []
        for n in sizes:
            x = rng.normal(size=(n, DIMENSION))
            y = rng.normal(size=n) + x @ rng.normal(size=DIMENSION)
            parts.append((x.astype(np.float32), ((y > 0) if binary else y).astype(np.float32)))
        return FlatExamples.from_arrays(parts)

    names = tuple(f"client-{i}" for i in range(len(sizes)))
    return Federation(side(), side(), names, None)


@dataclass(frozen=True)
class Quadratic:
    """f(w) = 1/2 w'Aw - b'w + constant."""

    A: np.ndarray
    b: np.ndarray

    def grad(self, w: np.ndarray) -> np.ndarray:
        return np.asarray(self.A @ w - self.b)


def noisy(data: Federation) -> Federation:
    """The same, with noise for all that is held out."""
    rng = np.random.default_rng(9)
    x = rng.normal(size=data.test.x.shape).astype(data.test.x.dtype)
    y = rng.permutation(data.test.y)
    return replace(data, test=replace(data.test, x=x, y=y))


def quadratics(data: Federation) -> list[Quadratic]:
    """The clients of a federation, in closed form."""
    clients = []
    for i in range(data.clients):
        x, y = (part.astype(np.float64) for part in data.train.client(i))
        clients.append(Quadratic(x.T @ x / len(y), x.T @ y / len(y)))
    return clients


def objective(data: Federation, client: int, task: Task = QUADRATIC, **options: Any) -> Objective:
    """One client's objective, as the engines make it."""
    train = data.train
    rows = jnp.asarray(train.x), jnp.asarray(train.y)
    own = Examples(*rows, int(train.start[client]), int(train.size[client]))
    return Objective(task, own, **options)


def experiment(method: Method, data: Federation | None = None, **options: Any) -> Experiment:
    """All clients in every round, unless said otherwise; a codec stands for its pipeline."""
    data = data or federation()
    settings: dict[str, Any] = {"task": QUADRATIC, "cohort": data.clients} | options
    codec, feedback = settings.pop("codec", None), settings.pop("error_feedback", False)
    if codec is not None or feedback:
        settings["pipeline"] = Pipeline.of(codec, feedback)
    return Experiment(data, method=method, **settings)


def context(round: int = 0, key: Any = None) -> RoundContext:
    """A client's context in a round of five clients, all of whom take part."""
    own = fold(0, Purpose.LOCAL, 0, 0) if key is None else key
    return RoundContext(jnp.int32(round), own, jax.random.key(round), 5, 5)


def start(seed: int = 3) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=DIMENSION)


def f32(w: np.ndarray) -> Any:
    return jnp.asarray(w, jnp.float32)


KEY = fold(0, Purpose.LOCAL, 0, 0)
