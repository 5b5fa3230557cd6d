"""Federations in files: written, read where they lie, and refused when they are not whole."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from perfed import DataError, load
from perfed.data import FederationWriter, store
from test_cli import perfed

ROWS = (np.zeros((3, 2), np.float32), np.array([0, 1, 1]))


def test_what_was_stored_comes_back(tmp_path: Path) -> None:
    for i, data in enumerate(
        (
            load("digits", clients=5, split="dirichlet"),
            load("digits", clients=4, standardize="feature"),
            load("synthetic", clients=6, sizes="fedprox"),
        )
    ):
        root = tmp_path / str(i)
        store(data, root)
        back = load("stored", root=str(root))
        assert (back.names, back.labels, back.clients) == (data.names, data.labels, data.clients)
        assert isinstance(back.train.x, np.memmap)
        for side in ("train", "test"):
            ours, theirs = getattr(back, side), getattr(data, side)
            for field in ("x", "y", "start", "size"):
                np.testing.assert_array_equal(getattr(ours, field), getattr(theirs, field))
        assert (back.scaling is None) == (data.scaling is None)
        if back.scaling is not None and data.scaling is not None:
            np.testing.assert_array_equal(back.scaling.scale, data.scaling.scale)
        if data.train.y.dtype == np.int32:
            assert back.checksum() == data.checksum()


def test_own_clients_with_names_and_a_regression(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    with FederationWriter(tmp_path / "w", target=(3.0, 2.0), features=["age", "dose"]) as writer:
        for name in ("north", "south"):
            writer.add(
                (rng.normal(size=(4, 2)), rng.normal(size=4)), (np.ones((1, 2)), [0.5]), name
            )
    back = load("stored", root=str(tmp_path / "w"))
    assert (back.names, back.labels, back.target) == (("north", "south"), None, (3.0, 2.0))
    assert back.features == ("age", "dose")
    assert back.train.x.dtype == np.float32
    assert back.test.client(1)[1].tolist() == [0.5]


@pytest.mark.parametrize(
    ("train", "test", "message"),
    [
        ((ROWS[0], [0, 1]), ROWS, "client 1 has 3 inputs but 2 labels"),
        (ROWS, (ROWS[0][:0], ROWS[1][:0]), "client 1 has no examples to be scored on"),
        ((ROWS[0] * np.nan, ROWS[1]), ROWS, "client 1: some inputs are not finite"),
        ((ROWS[0], [0, 1, 2]), ROWS, r"client 1: labels must be whole numbers from 0 to 1"),
        ((ROWS[0], [0.5, 1, 1]), ROWS, r"client 1: labels must be whole numbers"),
        ((ROWS[0], ROWS[0]), ROWS, r"client 1: labels have shape \(3, 2\)"),
        ((np.zeros((3, 4)), ROWS[1]), ROWS, "client 1: inputs to train on and held-out ones"),
        (
            (np.zeros((3, 4)), ROWS[1]),
            (np.zeros((3, 4)), ROWS[1]),
            r"client 1: train_x is float32 of shape \(4,\), but that of earlier clients",
        ),
    ],
)
def test_a_bad_client_is_refused_whole(tmp_path: Path, train: Any, test: Any, message: str) -> None:
    with FederationWriter(tmp_path / "f", labels=("a", "b")) as writer:
        writer.add(ROWS, ROWS)
        with pytest.raises(DataError, match=message):
            writer.add(train, test)
        writer.add(ROWS, ROWS)
    assert load("stored", root=str(tmp_path / "f")).clients == 2


def test_a_writer_that_fails_leaves_no_federation(tmp_path: Path) -> None:
    writer = FederationWriter(tmp_path / "a", labels=("a", "b"))

    def fail() -> None:
        with writer:
            writer.add(ROWS, ROWS)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    with pytest.raises(DataError, match=r"it is not a complete federation"):
        load("stored", root=str(tmp_path / "a"))
    with (
        pytest.raises(DataError, match="exists and is not an empty folder"),
        FederationWriter(tmp_path / "a"),
    ):
        pass
    with pytest.raises(DataError, match="no clients were added"), FederationWriter(tmp_path / "b"):
        pass
    some = FederationWriter(tmp_path / "c", labels=("a", "b"))

    def name_one() -> None:
        with some:
            some.add(ROWS, ROWS, "x")
            some.add(ROWS, ROWS)

    with pytest.raises(DataError, match="a name, or none"):
        name_one()


def test_inputs_are_numbers(tmp_path: Path) -> None:
    """What cannot be read again is refused before it is written."""
    y = np.array([0, 1])
    with FederationWriter(tmp_path / "a", labels=("a", "b")) as writer:
        writer.add((np.eye(2, dtype=bool), y), (np.eye(2, dtype=bool), y))
        with pytest.raises(DataError, match="client 1: inputs have type complex64; use numbers"):
            writer.add((np.eye(2, dtype=np.complex64), y), (np.eye(2), y))
    np.testing.assert_array_equal(load("stored", root=str(tmp_path / "a")).train.x, np.eye(2))


def damaged(root: Path, **changes: Any) -> None:
    facts = json.loads((root / "federation.json").read_text())
    (root / "federation.json").write_text(json.dumps(facts | changes))


def test_damage_is_named(tmp_path: Path) -> None:
    def fresh(name: str) -> Path:
        root = tmp_path / name
        with FederationWriter(root, labels=("a", "b")) as writer:
            writer.add(ROWS, ROWS)
        return root

    def refused(root: Path, message: str) -> None:
        with pytest.raises(DataError, match=message):
            load("stored", root=str(root))

    refused(tmp_path / "nowhere", "no such folder")
    short = fresh("short")
    (short / "train_y.bin").write_bytes(b"1234")
    refused(short, r"train_y\.bin has 4 bytes, but should have 12")
    gone = fresh("gone")
    (gone / "test_x.bin").unlink()
    refused(gone, "test_x cannot be read")
    old = fresh("old")
    damaged(old, format="perfed-federation-0")
    refused(old, "does not have the format")
    more = fresh("more")
    damaged(more, clients=2)
    refused(more, "the metadata say 2 clients")
    text = fresh("text")
    (text / "federation.json").write_text("{")
    refused(text, r"federation\.json is damaged")
    objects = fresh("objects")
    arrays = json.loads((objects / "federation.json").read_text())["arrays"]
    damaged(objects, arrays=arrays | {"train_x": arrays["train_x"] | {"dtype": "|O"}})
    refused(objects, "train_x cannot be read")
    none = fresh("none")
    (none / "train_size.bin").write_bytes(np.array([0], np.int32).tobytes())
    refused(none, "a client has 0 rows")


@pytest.mark.slow
def test_from_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text('[data]\nsource = "digits"\nclients = 6\n')
    done = perfed("data", "store", tmp_path / "c.toml", "--out", tmp_path / "stored")
    assert done.returncode == 0, done.stderr
    assert "6 clients" in done.stdout
    again = perfed("data", "store", tmp_path / "c.toml", "--out", tmp_path / "stored")
    assert again.returncode == 2
    assert "exists and is not an empty folder" in again.stderr
    (tmp_path / "r.toml").write_text(
        f'rounds = 1\ncohort = 2\neval_clients = 3\n[data]\nsource = "stored"\n'
        f'root = "{tmp_path / "stored"}"\n[model]\nname = "mlr"\n[method]\nname = "fedavg"\n'
    )
    ran = perfed("run", tmp_path / "r.toml", COLUMNS="100")
    assert ran.returncode == 0, ran.stderr
    assert "3 of 6 clients, at random" in ran.stdout
