"""Own data from file to prediction, and the commands that look at data."""

import csv
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from safetensors.numpy import load_file

from perfed import Config, load
from perfed.data.describe import Description, remarks
from perfed.report.figures import label_picture
from perfed.runs.adapt import load_model
from real_data import REAL, needs_real_data
from test_cli import here, perfed

WARDS = ("north", "south", "west")


def ward(i: int) -> dict[str, list[Any]]:
    """Patients of one ward: who is ill depends on the dose, from a level of the ward's own."""
    rng = np.random.default_rng(i)
    dose = rng.normal(50 + 20 * i, 10, 80).round(4)
    age = rng.integers(20, 90, 80)
    state = np.where(dose > 50 + 20 * i, "ill", "well")
    return {"dose": dose.tolist(), "age": age.tolist(), "state": state.tolist()}


def write_csv(path: Path, columns: dict[str, list[Any]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(zip(*columns.values(), strict=True))


def config_for(path: Path, data: str) -> Path:
    path.write_text(
        f'rounds = 30\ncohort = 3\n[data]\n{data}\nstandardize = "client"\n[model]\nname = "mlr"\n'
        '[method]\nname = "pfedme"\nlam = 5.0\neta = 0.1\ninner_lr = 0.1\nbatch = 20\n'
    )
    return path


@pytest.fixture
def own(tmp_path: Path) -> dict[str, Path]:
    """The same wards in four forms, each with its configuration."""
    configs = {}
    for form in ("csv", "parquet", "npz"):
        folder = tmp_path / form
        folder.mkdir()
        for i, name in enumerate(WARDS):
            columns = ward(i)
            if form == "csv":
                write_csv(folder / f"{name}.csv", columns)
            elif form == "parquet":
                pyarrow.parquet.write_table(pa.table(columns), folder / f"{name}.parquet")
            else:
                x = np.column_stack([columns["dose"], columns["age"]])
                np.savez(folder / f"{name}.npz", x=x, y=np.array(columns["state"]))
        source = f'source = "folder"\nroot = "{folder}"\nlabel = "state"'
        configs[form] = config_for(tmp_path / f"{form}.toml", source)
    whole: dict[str, list[Any]] = {"ward": [name for name in WARDS for _ in range(80)]}
    for column in ward(0):
        whole[column] = [value for i in range(3) for value in ward(i)[column]]
    write_csv(tmp_path / "all.csv", whole)
    source = f'source = "table"\npath = "{tmp_path / "all.csv"}"\nclient = "ward"\nlabel = "state"'
    configs["table"] = config_for(tmp_path / "table.toml", source)
    return configs


@pytest.mark.slow
def test_every_form_of_the_same_clients_trains_to_the_same_model(own: dict[str, Path]) -> None:
    models = []
    for path in own.values():
        config = Config.load(path)
        result = config.train(config.build())
        models.append(result)
    for other in models[1:]:
        for a, b in zip(
            *(jax.tree.leaves((r.state.params, r.state.clients)) for r in (models[0], other)),
            strict=True,
        ):
            np.testing.assert_array_equal(a, b)


@pytest.mark.slow
def test_a_table_with_words_for_labels_end_to_end(own: dict[str, Path], tmp_path: Path) -> None:
    """From the command to class names in predictions, with what the run has saved."""
    out = tmp_path / "out"
    done = perfed("run", own["table"], "--out", out)
    assert done.returncode == 0, done.stderr
    summary = json.loads((out / "summary.json").read_text())
    assert summary["labels"] == ["ill", "well"]
    assert summary["names"] == ["north", "south", "west"]
    assert summary["config"]["data"]["standardize"] == "client"
    assert summary["personalized"]["accuracy"]["worst"] > 0.8
    assert load_model(out / "model.safetensors").uses.labels == ("ill", "well")
    config = Config.load(own["table"])
    engine = config.build()
    result = config.train(engine)
    said = result.predict(WARDS.index("south"), np.array([[100.0, 50.0], [40.0, 50.0]]))
    assert said.tolist() == ["ill", "well"]
    saved, used = load_file(out / "data.safetensors"), engine.experiment.federation.scaling
    assert used is not None
    np.testing.assert_array_equal(saved["shift"], used.shift)
    np.testing.assert_array_equal(saved["scale"], used.scale)
    assert saved["shift"].shape == (3, 2)


def test_faults_of_own_data_reach_the_user(own: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "csv" / "south.csv").write_text("dose,age,state\n1,2,ill\n3,,well\n")
    done = here("run", own["csv"], "--out", tmp_path / "out")
    assert done.exit_code == 2
    assert 'south.csv, row 3, column "age"' in done.stderr
    assert not (tmp_path / "out").exists()
    done = here("run", own["csv"], "--set", "data.split=dirichlet", "--set", "data.a=3")
    assert done.exit_code == 2
    assert "data.a: no such setting" in done.stderr
    assert "alpha" in done.stderr  # what there is


@pytest.mark.slow
def test_a_regression_from_a_table(own: dict[str, Path], tmp_path: Path) -> None:
    done = perfed(
        "run", own["table"], "--out", tmp_path / "out",
        "--set", "data.task=regression", "--set", "data.label=dose",
        "--set", 'data.features=["age"]', "--set", "data.standardize_target=true",
        "--set", "model.name=linear",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "rmse" in done.stdout
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    # Age says nothing: the best a ward can do is its mean dose, whose spread is 10 a ward.
    assert summary["personalized"]["rmse"]["mean"] == pytest.approx(10, abs=2)
    assert summary["labels"] is None


def test_describe(tmp_path: Path) -> None:
    config = tmp_path / "digits.toml"
    config.write_text('[data]\nsource = "digits"\nclients = 10\n')  # all there needs to be
    picture = tmp_path / "labels.png"
    done = perfed("data", "describe", config, "--picture", picture)
    assert done.returncode == 0, done.stderr
    assert "10 clients, 10 classes" in done.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")
    wrong = here("data", "describe", config, "--picture", tmp_path / "labels.txt")
    assert wrong.exit_code == 2
    assert "must end in .png, .svg or .pdf" in wrong.stderr


def test_describe_says_what_numpy_says() -> None:
    data = load("digits", split="dirichlet", clients=5)
    facts = Description.of(data)
    for i in range(5):
        own = np.bincount(data.train.client(i)[1], minlength=10)
        everyone = np.bincount(data.train.y, minlength=10)
        np.testing.assert_array_equal(facts.counts[i], own)
        gap = np.abs(own / own.sum() - everyone / everyone.sum()).sum() / 2
        assert facts.distance[i] == pytest.approx(gap)
        assert facts.classes_held[i] == len(set(data.train.client(i)[1].tolist()))
        held = np.bincount(data.test.client(i)[1], minlength=10)
        gap = np.abs(own / own.sum() - held / held.sum()).sum() / 2
        assert facts.test_distance[i] == pytest.approx(gap)


def test_pictures_of_few_and_many_clients(tmp_path: Path) -> None:
    for clients in (5, 100):
        facts = Description.of(load("digits", split="dirichlet", clients=clients))
        path = tmp_path / f"{clients}.svg"
        label_picture(facts, path)
        assert f"{clients} clients" in path.read_text() or clients == 5
        assert path.stat().st_size > 5000


def test_names_are_drawn_as_they_are(tmp_path: Path) -> None:
    """No formulas, no warnings, however odd the names."""
    odd = ("$5_ to ^$10", "x" * 50, " ", "\u540d\u524d")
    counts = np.arange(8).reshape(2, 4)
    facts = Description(("$a_", "b"), np.ones(2), np.ones(2), odd, counts, counts, None)
    label_picture(facts, tmp_path / "odd.svg")
    many = Description(tuple(f"${i}" for i in range(70)), np.ones(70), np.ones(70), odd,
                       np.ones((70, 4), int), np.ones((70, 4), int), None)  # fmt: skip
    label_picture(many, tmp_path / "many.png")


@pytest.mark.slow
def test_a_regression_in_the_comparison(own: dict[str, Path], tmp_path: Path) -> None:
    done = perfed(
        "run", "--set", "data.source=table", "--set", f"data.path={tmp_path / 'all.csv'}",
        "--set", "data.client=ward", "--set", "data.label=dose", "--set", "data.task=regression",
        "--set", 'data.features=["age"]', "--set", "data.split=natural", "--set", "data.clients=3",
        "--set", "data.standardize=feature", "--set", "data.standardize_target=true",
        "--set", "cohort=2", "--set", "rounds=2", "--out", tmp_path / "out",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "R2 on the clients' held-out data" in done.stdout


def test_remarks_warn_before_training(tmp_path: Path) -> None:
    write_csv(tmp_path / "all.csv", {
        "who": ["a"] * 8 + ["b"] * 8, "small": [i / 10 for i in range(16)],
        "large": [1e5 * i for i in range(16)], "label": [0, 1] * 8,
    })  # fmt: skip
    settings: dict[str, Any] = {"path": str(tmp_path / "all.csv"), "client": "who"}
    found = remarks(Description.of(load("table", **settings)))
    assert 'try standardize = "feature"' in found[0]
    assert "2 client(s) hold out fewer than 5 examples" in found[1]
    scaled = remarks(Description.of(load("table", **settings, standardize="feature")))
    assert not any("scales" in remark for remark in scaled)


def test_list_shows_everything(tmp_path: Path) -> None:
    done = perfed("data", "list", PERFED_DATA="", PERFED_DATA_CACHE=str(tmp_path), COLUMNS="120")
    assert done.returncode == 0, done.stderr
    for name in ("mnist-writers", "shakespeare", "table", "per-fedavg", "quantity"):
        assert name in done.stdout
    assert "needs a download" in done.stdout
    assert "ships with the package" in done.stdout


@pytest.mark.slow
@needs_real_data
def test_shakespeare_learns_with_a_gru(tmp_path: Path) -> None:
    """One client per role; after a few rounds the next character is better than the commonest."""
    config = Config.checked({
        "rounds": 12, "cohort": 6,
        "data": {"source": "shakespeare", "root": str(REAL), "context": 8, "stride": 5,
                 "min_characters": 15_000},
        "model": {"name": "gru", "hidden": 24},
        "method": {"name": "fedavg", "lr": 1.0, "tau": 20, "batch": 32, "alpha": 0.1},
    })  # fmt: skip
    data = config.build_federation()
    assert data.train.x.dtype == np.uint8
    result = config.train(config.build(data))
    commonest = np.bincount(data.test.y).max() / len(data.test.y)
    assert result.scores["global"].accuracy.mean() > commonest + 0.05
    first = data.test.client(0)[0][:2]
    assert all(len(character) == 1 for character in result.predict(0, first))


@needs_real_data
def test_models_are_told_what_they_cannot_read(tmp_path: Path) -> None:
    config = tmp_path / "plays.toml"
    config.write_text(
        'cohort = 2\n[data]\nsource = "shakespeare"\nmin_characters = 20000\ncontext = 10\n'
        '[model]\nname = "mlr"\n[method]\nname = "fedavg"\n'
    )
    done = perfed("run", config, PERFED_DATA=str(REAL))
    assert done.returncode == 2
    assert "model.name = 'mlr': reads numbers, which these data are not; use gru" in done.stderr


@pytest.mark.slow
@needs_real_data
def test_real_writers_gain_from_models_of_their_own() -> None:
    """MNIST by writer: one MLR for all, against the same one adapted to each writer."""
    config = Config.checked({
        "rounds": 60, "cohort": 50, "adapt_on": "train",
        "data": {"source": "mnist-writers", "root": str(REAL)},
        "model": {"name": "mlr"},
        "method": {"name": "fedavg", "lr": 0.1, "tau": 10, "batch": 20, "alpha": 0.1,
                   "adapt_steps": 5},
    })  # fmt: skip
    result = config.train(config.build())
    own, shared = (result.scores[k].accuracy.mean() for k in ("personalized", "global"))
    assert len(result.scores["global"].accuracy) == 836
    assert own > shared > 0.8
