"""Clients that were not there: train without a fifth of them, then fit each from its own file.

Every method trains on 80 % of the clients, with settings chosen on a part of their training data.
Each of the others writes its rows into a file of its own, from which the trained model is adapted,
offline, and scored on its held-out rows.
Run it with: python examples/new_clients.py [SOURCE [SEEDS]] (mnist-writers, or digits).
"""

import sys
from dataclasses import replace
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from perfed import Config, Federation
from perfed.runs.adapt import adapt, client_rows, load_model
from perfed.runs.recording import Recording
from perfed.training import Result, Run, Trainer, TrainOptions

DATA: dict[str, dict[str, Any]] = {
    "digits": {"source": "digits", "split": "shards", "clients": 40, "shards_per_client": 2},
    "mnist-writers": {"source": "mnist-writers", "min_examples": 40},
}
METHODS: dict[str, tuple[dict[str, Any], dict[str, list[Any]]]] = {
    "FedAvg + update": (
        {"name": "fedavg", "tau": 10, "batch": 20},
        {"lr": [0.1, 0.2, 0.4], "alpha": [0.1, 0.3, 1.0]},
    ),
    "Per-FedAvg (FO)": (
        {"name": "per-fedavg", "variant": "fo", "tau": 10, "batch": 20},
        {"beta": [0.1, 0.2, 0.4], "alpha": [0.1, 0.3, 1.0]},
    ),
    "pFedMe": (
        {"name": "pfedme", "local_rounds": 20, "inner_lr": 0.05, "batch": 20},
        {"lam": [15.0, 25.0], "eta": [0.03, 0.06], "beta": [1.0, 2.0]},
    ),
}


def part(data: Federation, clients: np.ndarray) -> Federation:
    """Some of the clients."""

    def side(which: str) -> list[tuple[Any, Any]]:
        return [getattr(data, which).client(i) for i in clients]

    some = Federation.from_arrays(side("train"), side("test"), classes=data.outputs)
    return replace(some, labels=data.labels, scaling=data.scaling)


def scores(config: Config, data: Federation, new: np.ndarray, folder: Path) -> np.ndarray:
    """Accuracy of the common and of the adapted model on each new client's held-out rows."""
    everyone = np.arange(data.clients)
    engine = config.build(part(data, np.setdiff1d(everyone, new)))
    recording = Recording(config, folder / "run", engine)
    recording.begin_folder()
    recording.train()
    model = load_model(folder / "run" / "model.safetensors")
    found = []
    for client in new:
        (x, y), (x_test, y_test) = data.train.client(client), data.test.client(client)
        names = np.array(data.labels)
        file = folder / f"{client}.npz"
        np.savez(file, x=x, y=names[y], x_test=x_test, y_test=names[y_test])
        adapted = adapt(model, client_rows(model.uses, file))
        found.append((adapted.before["accuracy"], adapted.after["accuracy"]))
    return np.array(found)


def configured(source: str, method: dict[str, Any], seed: int, **more: Any) -> Config:
    """A run of a method."""
    return Config.checked({
        "seed": seed, "rounds": 200, "cohort": 10, "eval_every": 200,
        "data": DATA[source] | {"seed": seed}, "model": {"name": "mlp", "hidden": [80, 60]},
        "method": method, **more,
    })  # fmt: skip


def new_clients(data: Federation, seed: int) -> np.ndarray:
    """A fifth of the clients."""
    return np.sort(np.random.default_rng(seed).permutation(data.clients)[: data.clients // 5])


def chosen(source: str, base: dict[str, Any], grid: dict[str, list[Any]]) -> dict[str, Any]:
    """The settings that serve the clients that are there best, on a part of their training data."""
    methods = [base | dict(zip(grid, values, strict=True)) for values in product(*grid.values())]
    configs = [configured(source, method, 0, validation=0.25) for method in methods]
    data = configs[0].build_federation()
    there = np.setdiff1d(np.arange(data.clients), new_clients(data, 0))
    known = configs[0].scored(part(data, there))
    # They differ in numbers only, so one program trains them all.
    trainer = Trainer(TrainOptions(configs[0].rounds))
    results = trainer.train_all([Run(config.build(known)) for config in configs])
    tried = [
        (result.scores["personalized"].accuracy.mean(), i)
        for i, result in enumerate(results)
        if isinstance(result, Result)
    ]
    return methods[max(tried)[1]]


def main(source: str = "mnist-writers", seeds: int = 3) -> None:
    """Print the table."""
    print(f"| {source} | settings | common model | adapted | worst adapted |")
    print("| --- | --- | ---: | ---: | ---: |")
    for label, (base, grid) in METHODS.items():
        method = chosen(source, base, grid)
        rows = []
        for seed in range(seeds):
            config = configured(source, method, seed)
            data = config.build_federation()
            with TemporaryDirectory() as folder:
                found = scores(config, data, new_clients(data, seed), Path(folder))
            rows.append((*found.mean(axis=0), found[:, 1].min()))
        mean, spread = 100 * np.mean(rows, axis=0), 100 * np.std(rows, axis=0)
        cells = [f"{m:.1f} ± {s:.1f}" for m, s in zip(mean, spread, strict=True)]
        settings = ", ".join(f"{k} {method[k]:g}" for k in grid)
        print(f"| {label} | {settings} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:2], *map(int, sys.argv[2:3]))
