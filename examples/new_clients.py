"""Clients that were not there: train without a fifth of them, then fit each from its own file.

Every method trains on 80 % of the clients. Each of the others writes its training rows into a file
of its own, from which the trained model is adapted, offline, and scored on its held-out rows.
Run it with: python examples/new_clients.py [SOURCE [SEEDS]] (digits, or mnist-writers).
"""

import sys
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from perfed import Config, Federation
from perfed.experiment.adapt import adapt, client_rows, load_model
from perfed.experiment.recording import Recording

DATA: dict[str, dict[str, Any]] = {
    "digits": {"source": "digits", "split": "shards", "clients": 40, "shards": 2},
    "mnist-writers": {"source": "mnist-writers", "min_examples": 40},
}
METHODS: dict[str, dict[str, Any]] = {
    "FedAvg + update": {
        "name": "fedavg", "lr": 0.05, "tau": 10, "batch": 20, "alpha": 0.1,
    },
    "Per-FedAvg (HF)": {
        "name": "per-fedavg", "variant": "hf", "alpha": 0.1, "beta": 0.05, "tau": 10, "batch": 20,
    },
    "pFedMe": {
        "name": "pfedme", "lam": 15.0, "eta": 0.03, "local_rounds": 20, "inner_lr": 0.05,
        "batch": 20,
    },
}  # fmt: skip


def part(data: Federation, clients: np.ndarray) -> Federation:
    """Some of the clients."""

    def side(which: str) -> list[tuple[Any, Any]]:
        return [getattr(data, which).client(i) for i in clients]

    some = Federation.of(side("train"), side("test"), classes=data.outputs)
    return replace(some, labels=data.labels, scaling=data.scaling)


def scores(config: Config, data: Federation, new: np.ndarray, folder: Path) -> np.ndarray:
    """Accuracy of the common and of the adapted model on each new client's held-out rows."""
    everyone = np.arange(data.clients)
    engine = config.build(part(data, np.setdiff1d(everyone, new)))
    recording = Recording(config, folder / "run", engine)
    recording.begin_folder()
    recording.run()
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


def main(source: str = "digits", seeds: int = 3) -> None:
    """Print the table."""
    print(f"| {source} | common model | adapted | worst adapted |\n| --- | ---: | ---: | ---: |")
    for label, method in METHODS.items():
        rows = []
        for seed in range(seeds):
            config = Config.checked({
                "seed": seed, "rounds": 200, "cohort": 10, "eval_every": 200,
                "data": DATA[source] | {"seed": seed},
                "model": {"name": "mlp", "hidden": [80, 60]}, "method": method,
            })  # fmt: skip
            data = config.build_federation()
            new = np.random.default_rng(seed).permutation(data.clients)[: data.clients // 5]
            with TemporaryDirectory() as folder:
                found = scores(config, data, np.sort(new), Path(folder))
            rows.append((*found.mean(axis=0), found[:, 1].min()))
        mean, spread = 100 * np.mean(rows, axis=0), 100 * np.std(rows, axis=0)
        cells = [f"{m:.1f} ± {s:.1f}" for m, s in zip(mean, spread, strict=True)]
        print(f"| {label} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:2], *map(int, sys.argv[2:3]))
