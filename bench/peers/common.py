"""What all contestants share: the task, and how a worker talks. Needs nothing but NumPy.

A worker is a process that prints one line of JSON when it is ready, and then one for every line "N"
it reads: the milliseconds a round of N rounds. It stops when its input ends.
"""

import json
import math
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Labels = npt.NDArray[np.int64]
Weights = list[Floats]

CLIENTS, SIZE, COHORT = 100, 980, 10
SIZES = (784, 80, 60, 10)
TAU, BATCH, RATE = 10, 40, 0.01
GRADIENTS = COHORT * TAU
# How far a round moves the model differs by under 1 % (standard deviation) between draws of cohorts
# and batches; a local step more or less makes 11 %.
TOLERANCE = 0.05


@dataclass(frozen=True)
class Contestant:
    """A contestant, ready to go.

    Attributes:
        version: of what is measured.
        rounds: does so many rounds, and returns when they are done.
        weights: the global model now: (outputs, inputs) and biases, layer by layer.
        gradients: how many gradients of one batch were computed so far, where it can be counted.
        close: ends what else it has started.
    """

    version: str
    rounds: Callable[[int], None]
    weights: Callable[[], Weights]
    gradients: Callable[[], int] | None = None
    close: Callable[[], None] = lambda: None


def clients() -> tuple[Floats, Labels]:
    """The training examples of `bench.__main__.mnist_like`: clients, examples, features."""
    rng = np.random.default_rng(0)
    x = rng.random((CLIENTS * SIZE, SIZES[0]), np.float32)
    y = rng.integers(0, 10, CLIENTS * SIZE)
    return x.reshape(CLIENTS, SIZE, -1), y.reshape(CLIENTS, SIZE)


def first_weights() -> Weights:
    """Where all begin: uniform in +-1/sqrt(fan-in), and sure that everything is a 0.

    With random labels a fair start would go nowhere but with the noise, and how far it went would
    say little about the number of steps. From here it is called back to fairness, at a known pace.
    """
    rng, weights = np.random.default_rng(2), []
    for a, b in pairwise(SIZES):
        weights.append(rng.uniform(-(a**-0.5), a**-0.5, (b, a)).astype(np.float32))
        weights.append(np.zeros(b, np.float32))
    weights[-1][0] = 6
    return weights


def gradient(w: Weights, x: Floats, y: Labels) -> Weights:
    """Of the mean cross-entropy of the ELU network, by hand."""
    layers = list(zip(w[::2], w[1::2], strict=True))
    outputs = [x]
    for i, (a, b) in enumerate(layers):
        z = outputs[-1] @ a.T + b
        outputs.append(np.where(z > 0, z, np.expm1(z)) if i < len(layers) - 1 else z)
    p = np.exp(outputs[-1] - outputs[-1].max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    p[np.arange(len(y)), y] -= 1
    back, found = p / len(y), []
    for (a, _), out in zip(reversed(layers), reversed(outputs[:-1]), strict=True):
        found += [back.sum(0), back.T @ out]
        back = (back @ a) * np.where(out > 0, 1, out + 1)
    return found[::-1]


def moved(before: Weights, after: Weights) -> float:
    """How far a model has gone."""
    return math.sqrt(sum(float(np.sum((a - b) ** 2)) for a, b in zip(before, after, strict=True)))


def expected_move(w: Weights, x: Floats, y: Labels) -> float:
    """How far one round of FedAvg goes from here, by NumPy and with its own draws."""
    rng = np.random.default_rng(1)
    ends = []
    for client in rng.choice(len(x), COHORT, replace=False):
        mine = w
        for _ in range(TAU):
            rows = rng.integers(0, len(y[client]), BATCH)
            steps = gradient(mine, x[client][rows], y[client][rows])
            mine = [a - RATE * g for a, g in zip(mine, steps, strict=True)]
        ends.append(mine)
    return moved(w, [np.mean(parts, axis=0) for parts in zip(*ends, strict=True)])


def threads() -> int:
    """How many threads this worker is to use."""
    return int(os.environ.get("BENCH_THREADS", "1"))


def serve(name: str, build: Callable[[Floats, Labels], Contestant], threads: int = 1) -> None:
    """Build a contestant, see that it does the work, and time rounds as asked.

    The first round's time is that of building and of one round, compilation included, with the data
    in memory and all imports done that the file makes at its top.
    """
    try:
        _serve(name, build, threads)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # now, and not when all threads that a library has started have ended


def _serve(name: str, build: Callable[[Floats, Labels], Contestant], threads: int) -> None:
    # What a library prints must not end up between the lines of JSON.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    x, y = clients()
    begun = time.perf_counter()
    contestant = build(x, y)
    built = time.perf_counter() - begun
    before = [np.array(w) for w in contestant.weights()]
    begun = time.perf_counter()
    contestant.rounds(1)
    first = built + time.perf_counter() - begun
    check(contestant, before, x, y)
    ready = {"name": name, "version": contestant.version, "threads": threads}
    print(json.dumps(ready | {"first_round_s": first}), file=answers)
    for line in sys.stdin:
        n = int(line)
        begun = time.perf_counter()
        contestant.rounds(n)
        spent = time.perf_counter() - begun
        print(json.dumps({"ms_per_round": 1e3 * spent / n}), file=answers)
    contestant.close()


def check(contestant: Contestant, before: Weights, x: Floats, y: Labels) -> None:
    """That a round was 10 clients' 10 steps of 40 examples, by what it did to the model."""
    shapes = [s for a, b in pairwise(SIZES) for s in ((b, a), (b,))]
    after = contestant.weights()
    assert [w.shape for w in after] == shapes, [w.shape for w in after]
    assert all(w.dtype == np.float32 for w in after)
    went, expected = moved(before, after), expected_move(before, x, y)
    assert abs(went / expected - 1) < TOLERANCE, f"moved {went:.4f}, expected {expected:.4f}"
    if contestant.gradients is not None:
        assert contestant.gradients() == GRADIENTS, contestant.gradients()
