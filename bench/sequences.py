"""Rounds of models for texts, beside eager PyTorch and the arithmetic floor, in turns in one run.

An LSTM and a small transformer read 80 characters. Run it with `python -m bench.sequences`.
"""

from __future__ import annotations

import argparse
import copy
import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from statistics import median
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

import perfed
from bench.__main__ import spread, timed
from perfed import LSTM, Experiment, FedAvg, Federation, Task, Transformer, Vectorized, from_flax
from perfed.core.task import Model
from perfed.data.examples import FlatExamples

if TYPE_CHECKING:
    import torch

LENGTH, SYMBOLS = 80, 65
EMBEDDING, HIDDEN = 8, 64
WIDTH, HEADS, LAYERS = 64, 4, 2
COHORT, TAU, BATCH = 10, 10, 32
METHOD = FedAvg(lr=0.1, tau=TAU, batch=BATCH)


@dataclass(frozen=True)
class Contest:
    """One model, in all the ways there are to have it.

    Attributes:
        name: what it is called.
        ours: the built-in one.
        flax: the same as a Flax module,
        torch: and as a PyTorch module.
        flops: of the products of one example's outputs, as few as it can be.
    """

    name: str
    ours: Model
    flax: Callable[[], Any]
    torch: Callable[[], torch.nn.Module]
    flops: int


def contests() -> list[Contest]:
    """Both models."""
    lstm = 2 * LENGTH * (EMBEDDING + HIDDEN) * 4 * HIDDEN
    # Per place: keys and values; queries, what is mixed, and the perceptron. The last place of the
    # last layer is all that is read of it.
    seen, rest = 2 * 2 * WIDTH**2, 2 * (2 + 8) * WIDTH**2
    attention = 2 * 2 * LENGTH * WIDTH
    whole = LENGTH * (seen + rest + attention // 2)  # half of a causal attention is masked
    transformer = (LAYERS - 1) * whole + LENGTH * seen + rest + attention
    return [
        Contest(
            "LSTM", LSTM(SYMBOLS, SYMBOLS, EMBEDDING, HIDDEN), flax_lstm, torch_lstm, lstm
        ),
        Contest(
            "transformer",
            Transformer(LENGTH, SYMBOLS, SYMBOLS, WIDTH, LAYERS, HEADS),
            flax_transformer,
            torch_transformer,
            transformer,
        ),
    ]  # fmt: skip


def flax_lstm() -> Any:
    """As a user of Flax writes it."""
    from flax import linen as nn

    class Net(nn.Module):  # type: ignore[misc]
        @nn.compact  # type: ignore[untyped-decorator]
        def __call__(self, x: Any) -> Any:
            states = nn.RNN(nn.OptimizedLSTMCell(HIDDEN))(nn.Embed(SYMBOLS, EMBEDDING)(x))
            return nn.Dense(SYMBOLS)(states[:, -1])

    return Net()


def flax_transformer() -> Any:
    """As a user of Flax writes it."""
    from flax import linen as nn

    class Net(nn.Module):  # type: ignore[misc]
        @nn.compact  # type: ignore[untyped-decorator]
        def __call__(self, x: Any) -> Any:
            places = self.param("places", nn.initializers.normal(0.1), (LENGTH, WIDTH))
            mask = nn.make_causal_mask(x)
            x = nn.Embed(SYMBOLS, WIDTH)(x) + places
            for _ in range(LAYERS):
                x = x + nn.SelfAttention(HEADS)(nn.LayerNorm()(x), mask)
                x = x + nn.Dense(WIDTH)(nn.gelu(nn.Dense(4 * WIDTH)(nn.LayerNorm()(x))))
            return nn.Dense(SYMBOLS)(nn.LayerNorm()(x)[:, -1])

    return Net()


def torch_lstm() -> torch.nn.Module:
    """As a user of PyTorch writes it."""
    from torch import nn

    class Net(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(SYMBOLS, EMBEDDING)
            self.lstm = nn.LSTM(EMBEDDING, HIDDEN, batch_first=True)
            self.out = nn.Linear(HIDDEN, SYMBOLS)

        def forward(self, x: Any) -> Any:
            return self.out(self.lstm(self.embedding(x))[0][:, -1])

    return Net()


def torch_transformer() -> torch.nn.Module:
    """As a user of PyTorch writes it."""
    import torch
    from torch import nn

    class Net(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(SYMBOLS, WIDTH)
            self.places = nn.Parameter(0.1 * torch.randn(LENGTH, WIDTH))
            layer = nn.TransformerEncoderLayer(
                WIDTH, HEADS, 4 * WIDTH, 0.0, "gelu", batch_first=True, norm_first=True
            )
            self.layers = nn.TransformerEncoder(layer, LAYERS, nn.LayerNorm(WIDTH), False)
            self.out = nn.Linear(WIDTH, SYMBOLS)
            mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
            self.register_buffer("mask", mask)

        def forward(self, x: Any) -> Any:
            states = self.layers(self.embedding(x) + self.places, self.mask, is_causal=True)
            return self.out(states[:, -1])

    return Net()


def texts(clients: int = 20, size: int = 400) -> Federation:
    """Random symbols: what they are does not matter for time."""
    rng = np.random.default_rng(0)

    def side(n: int) -> FlatExamples:
        x = rng.integers(0, SYMBOLS, (clients * n, LENGTH)).astype(np.int32)
        return FlatExamples.from_rows(x, rng.integers(0, SYMBOLS, clients * n), [n] * clients)

    return Federation.from_examples(side(size), side(10), classes=SYMBOLS)


def perfed_rounds(model: Model, data: Federation, chunk: int | None) -> Callable[[int], float]:
    """Perfed's rounds: what it gives does so many and returns milliseconds a round."""
    engine = Vectorized(Experiment(data, Task(model), METHOD, COHORT), chunk=chunk)
    state = engine.advance(engine.init(), 1)

    def take(rounds: int) -> float:
        return timed(lambda: jax.block_until_ready(engine.advance(state, rounds))) / rounds

    take(1)
    return take


def eager_rounds(module: torch.nn.Module, data: Federation, threads: int) -> Callable[[int], float]:
    """The same rounds as a lean eager loop: one client after another, plain SGD, no data loader."""
    import torch

    from bench import eager

    parts = [data.train.client(i) for i in range(data.clients)]
    clients = eager.Clients(
        [torch.from_numpy(np.asarray(x)) for x, _ in parts],
        [torch.from_numpy(y.astype(np.int64)) for _, y in parts],
    )
    own = copy.deepcopy(module)
    leaves = list(own.parameters())
    weights = [leaf.detach().clone() for leaf in leaves]

    def local(clients: eager.Clients, client: int, w: eager.Weights) -> eager.Weights:
        with torch.no_grad():
            for leaf, value in zip(leaves, w, strict=True):
                leaf.copy_(value)
        for _ in range(METHOD.tau):
            x, y = clients.batch(client, BATCH)
            loss = torch.nn.functional.cross_entropy(own(x), y)
            grads = torch.autograd.grad(loss, leaves)
            with torch.no_grad():
                for leaf, grad in zip(leaves, grads, strict=True):
                    leaf.sub_(grad, alpha=METHOD.lr)
        return [leaf.detach().clone() for leaf in leaves]

    def take(rounds: int) -> float:
        torch.set_num_threads(threads)
        begun = time.perf_counter()
        for _ in range(rounds):
            eager.one_round(local, clients, weights, COHORT)
        return 1e3 * (time.perf_counter() - begun) / rounds

    take(1)
    return take


def products(side: int = 1024) -> Callable[[int], float]:
    """GFLOP/s of large products by the BLAS that NumPy has, on all cores."""
    a, b = np.random.default_rng(0).random((2, side, side), np.float32)

    def take(times: int) -> float:
        spent = timed(lambda: [a @ b for _ in range(10 * times)])
        return 10 * times * 2 * side**3 / spent / 1e6

    return take


def contestants(
    contest: Contest, data: Federation, chunk: int | None
) -> dict[str, Callable[[int], float]]:
    """All that take part, ready to be timed."""
    example = jnp.zeros((1, LENGTH), jnp.int32)
    found = {"built in": perfed_rounds(contest.ours, data, chunk)}
    if find_spec("flax"):
        found["Flax module"] = perfed_rounds(from_flax(contest.flax(), example), data, chunk)
    if find_spec("torch"):
        adapter = getattr(perfed, "from_torch", None)
        if adapter is not None:
            found["PyTorch module"] = perfed_rounds(adapter(contest.torch()), data, chunk)
        for threads in sorted({1, os.cpu_count() or 1}):
            name = f"eager PyTorch, {threads} thread(s)"
            found[name] = eager_rounds(contest.torch(), data, threads)
    return found


def measure(
    takes: dict[str, Callable[[int], float]], rounds: int, repeats: int
) -> dict[str, list[float]]:
    """Milliseconds a round, in turns."""
    times: dict[str, list[float]] = {name: [] for name in takes}
    for _ in range(repeats):
        for name, take in takes.items():
            time.sleep(0.05)  # until the threads of the one before have stopped spinning
            times[name].append(take(rounds))
    return times


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m bench.sequences", description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--rounds", type=int, default=2, help="of a turn")
    parser.add_argument("--chunk", type=int, help="clients at once on a core")
    parser.add_argument("--only", choices=[contest.name for contest in contests()])
    given = parser.parse_args()
    console, data = Console(width=120), texts()
    table = Table(box=box.SIMPLE_HEAD, title="Milliseconds a round: median (range)")
    table.title_justify = "left"
    for heading in ("model", "as", "a round", "to the best eager", "to built in", "of the floor"):
        table.add_column(heading, justify="left" if heading in ("model", "as") else "right")
    for contest in contests():
        if given.only in (None, contest.name):
            times = measure(
                {"GFLOP/s": products()} | contestants(contest, data, given.chunk),
                given.rounds,
                given.repeats,
            )
            rate = median(times.pop("GFLOP/s"))
            # Back to the weights and back to the inputs take as many products as the outputs.
            floor = 3 * contest.flops * BATCH * TAU * COHORT / rate / 1e6
            eager = [t for name, t in times.items() if name.startswith("eager")]
            best = min(eager, key=median) if eager else None
            for name, own in times.items():
                ratio = f"{median(best) / median(own):.2f}x" if best else ""
                to_ours = f"{median(own) / median(times['built in']):.2f}x"
                share = f"{100 * floor / median(own):.0f} %"
                table.add_row(contest.name, name, spread(own), ratio, to_ours, share)
            console.print(
                f"{contest.name}: {3 * contest.flops * BATCH * TAU * COHORT / 1e9:.0f} GFLOP a "
                f"round; large products {rate:.0f} GFLOP/s, so the floor is {floor:.0f} ms"
            )
    console.print(table)
    console.print(
        f"Cohort {COHORT}, {TAU} steps of batch {BATCH}, {LENGTH} characters; {os.cpu_count()} "
        f"cores, {platform.machine()}, JAX {jax.__version__}"
    )


if __name__ == "__main__":
    main()
