"""Federations of real processes on loopback, with keys and encryption unless it is said."""

import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from federations import (
    NAMES,
    distance,
    federation,
    params,
    simulated,
    write_clients,
)
from perfed.federation.client.client_dir import STATE
from perfed.federation.server.plan import PLAN
from perfed.runs.run_dir import read_run

FEDAVG = {"name": "fedavg", "lr": 0.1, "tau": 3, "batch": 5}
METHODS = [
    FEDAVG,
    {"name": "per-fedavg", "variant": "hf", "alpha": 0.05, "beta": 0.1, "tau": 3},
    {"name": "pfedme", "lam": 15.0, "eta": 0.05, "local_rounds": 3, "batch": 5, "beta": 1.5},
    {"name": "fedpaq", "lr": 0.1, "tau": 3, "batch": 5, "s": 2, "r": 3},
]


@pytest.mark.parametrize(
    "method",
    [
        # CI has time for one of them.
        pytest.param(m, marks=pytest.mark.slow if m["name"] == "fedpaq" else pytest.mark.federation)
        for m in METHODS
    ],
    ids=[str(m["name"]) for m in METHODS],
)
def test_a_federation_ends_where_the_simulation_ends(
    tmp_path: Path, method: dict[str, Any]
) -> None:
    with federation(tmp_path, method) as run:
        run.serve()
        for name in NAMES:
            run.join(name)
        run.finish()
    due = simulated(run.values)
    assert distance(run.model(), due.global_model) < 1e-6
    for i, name in enumerate(NAMES):
        assert distance(run.own_model(name), due.personal_model(i)) < 1e-6
    recorded, summary = read_run(run.run), run.summary()
    assert recorded.rounds.tolist() == [0, 3]
    for kind, scores in due.scores.items():
        for name, values in scores.values.items():
            np.testing.assert_allclose(recorded.scores[kind][name][-1], values, rtol=2e-5)
    assert summary["uplink_bytes"] == due.costs.uplink_bytes[-1]
    assert summary["downlink_bytes"] == due.costs.downlink_bytes[-1]


class Relay:
    """A port that passes everything on to another one, and keeps or counts it."""

    def __init__(self, keep: bool = False) -> None:
        self.up, self.down, self.kept = 0, 0, bytearray()
        self._keep, self._lock = keep, threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.to = 0

    def start(self) -> None:
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:  # closed
                return
            try:
                far = socket.create_connection(("127.0.0.1", self.to))
            except OSError:  # nobody listens there yet
                near.close()
                continue
            for source, sink, up in ((near, far, True), (far, near, False)):
                threading.Thread(target=self._pass, args=(source, sink, up), daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket, up: bool) -> None:
        try:
            while data := source.recv(1 << 16):
                with self._lock:
                    self.up, self.down = self.up + up * len(data), self.down + (not up) * len(data)
                    if up and self._keep:
                        self.kept += data
                sink.sendall(data)
        except OSError:
            pass
        finally:
            for end in (source, sink):
                end.close()


@contextmanager
def relay(to: int, keep: bool = False) -> Iterator[Relay]:
    made = Relay(keep)
    made.to = to
    made.start()
    try:
        yield made
    finally:
        made.close()


@pytest.mark.federation
def test_the_server_receives_changes_and_scores_and_nothing_else(tmp_path: Path) -> None:
    """All that clients send is kept on its way (in plain), and searched for what must not be there.

    pFedMe's theta, the client's own model, its rows: none of them, in any alignment.
    """
    method = METHODS[2]
    with (
        federation(tmp_path, method, plain=True) as run,
        relay(run.port, keep=True) as wire,
    ):
        run.serve()
        for name in NAMES:
            run.join(name, port=wire.port)
        run.finish()
    said = bytes(wire.kept)
    assert b'"kind":"train-reply"' in said  # it was not encrypted
    assert "without encryption" in (tmp_path / "server.log").read_text()
    for name in NAMES:
        kept = (run.home(name) / STATE).read_bytes()
        tensors = kept.split(b"\n", 1)[1]
        arrays = _tensors(tensors, tmp_path) | run.own_model(name)
        rows = np.load(tmp_path / "data" / f"{name}.npz")
        arrays |= {"x": rows["x"][:1], "x_test": rows["x_test"][:1]}
        for label, array in arrays.items():
            if np.ptp(array) > 0:
                assert array.astype("<f4").tobytes()[:12] not in said, (name, label)
    due = simulated(run.values)
    assert distance(run.model(), due.global_model) < 1e-6


def _tensors(contents: bytes, folder: Path) -> dict[str, np.ndarray]:
    file = folder / "kept.safetensors"
    file.write_bytes(contents)
    return {k: v for k, v in load_file(file).items() if k.startswith("after.")}


@pytest.mark.federation
def test_bytes_on_the_wire_are_the_payload_and_a_stated_overhead(tmp_path: Path) -> None:
    """One client's traffic, encrypted as always, for a model of a million parameters.

    An exchange (a question and its answer) costs 5 to 20 kB more than what is in it, up as well as
    down; the docs say so.
    """
    rounds, uplink = 4, {}
    for name, method in {
        "float32": FEDAVG | {"tau": 1},
        "s=1": {"name": "fedpaq", "lr": 0.1, "tau": 1, "batch": 5, "s": 1, "r": 3},
    }.items():
        path = tmp_path / name
        more: dict[str, Any] = {"rounds": rounds, "eval_every": rounds}
        model = {"name": "mlp", "hidden": [1000]}
        with federation(path, method, model=model, **more) as run, relay(run.port) as wire:
            write_clients(path / "data", (1000,))
            run.serve()
            run.join(NAMES[0], port=wire.port)
            for other in NAMES[1:]:
                run.join(other)
            run.finish(400)
        traffic = run.summary()["traffic"]
        payload = traffic["client_uplink_bytes"][0]
        exchanges = 1 + rounds + 2  # joining, training, and two evaluations
        assert 5e3 < (wire.up - payload) / exchanges < 20e3, (name, wire.up, payload)
        scoring = 2 * 4_016_000  # the model itself
        overhead = (wire.down - traffic["client_downlink_bytes"][0] - scoring) / exchanges
        assert 1e3 < overhead < 20e3, (name, wire.down)
        uplink[name] = wire.up
    assert sum(v.size for v in run.model().values()) > 1_000_000
    assert uplink["s=1"] < uplink["float32"] / 100


@pytest.mark.slow
def test_the_trial_does_what_production_does(tmp_path: Path) -> None:
    run = tmp_path / "trial run"  # a space, for whoever forgets to quote
    command = [sys.executable, "-P", "-m", "perfed"]
    done = subprocess.run(
        [*command, "federate", "--clients", "3", "--out", str(run)],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert "personalized" in done.stdout
    assert (run / "report.html").stat().st_size > 100_000
    plan = json.loads((run / PLAN).read_text())
    assert plan["names"] == list(NAMES)
    assert min(plan["wire"]) > 50_000
    assert plan["wire"][0] > json.loads((run / "summary.json").read_text())["uplink_bytes"]
    home = run / "trial" / "clients" / NAMES[1] / plan["experiment"]
    rows = run / "trial" / "data" / f"{NAMES[1]}.npz"
    said = subprocess.run(
        [*command, "predict", str(home), "--data", str(rows)],
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert said.returncode == 0, said.stderr
    predicted = said.stdout.split()
    assert predicted[0] == "prediction"
    assert set(predicted[1:]) <= {str(digit) for digit in range(10)}
    assert params(home / "model.safetensors").keys() == params(run / "model.safetensors").keys()
    again = subprocess.run(
        [*command, "federate", "--out", str(run)], capture_output=True, text=True, check=False
    )
    assert again.returncode == 2
    assert "holds results already" in again.stderr
