"""A client that was not there: adapted from its own file, without the training data."""

import csv
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from perfed import Config, DataError, DivergedError, FieldError
from perfed.runs.adapt import adapt, client_rows, load_model
from perfed.runs.recording import Recording
from test_cli import here, perfed

METHODS = {
    "fedavg": 'name = "fedavg"\nlr = 0.2\ntau = 5\nalpha = 0.5',
    "per-fedavg": 'name = "per-fedavg"\nalpha = 0.5\nbeta = 0.2\ntau = 5\nbatch = 20',
    "pfedme": 'name = "pfedme"\nlam = 2.0\neta = 0.1\ninner_lr = 0.2\nlocal_rounds = 10',
    "ditto": 'name = "ditto"\nlam = 0.1\nlr = 0.2\npersonal_lr = 0.2\ntau = 5',
    "apfl": 'name = "apfl"\nlr = 0.3\ntau = 10',
    "fedrod": 'name = "fedrod"\nlr = 0.2\ntau = 5',
}


def ward(i: int, n: int = 80) -> dict[str, list[Any]]:
    """Patients of one ward: who is ill depends on the dose, from a level of the ward's own."""
    rng = np.random.default_rng(i)
    dose = rng.normal(50 + 4 * i, 10, n).round(4)
    return {
        "age": rng.integers(20, 90, n).tolist(),
        "dose": dose.tolist(),
        "state": np.where(dose > 50 + 4 * i, "ill", "well").tolist(),
        "cost": (3 * dose + 100 * i).round(3).tolist(),
    }


def write_csv(path: Path, columns: dict[str, list[Any]]) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(zip(*columns.values(), strict=True))
    return path


def trained(folder: Path, method: str, extra: str = "", label: str = "state") -> Path:
    """A run on four wards; the fifth is new."""
    whole: dict[str, list[Any]] = {"ward": [f"w{i}" for i in range(4) for _ in range(80)]}
    for column in ward(0):
        whole[column] = [value for i in range(4) for value in ward(i)[column]]
    write_csv(folder / "all.csv", whole)
    path = folder / "run.toml"
    path.write_text(
        f'rounds = 25\ncohort = 4\n[data]\nsource = "table"\npath = "{folder / "all.csv"}"\n'
        f'client = "ward"\nlabel = "{label}"\nfeatures = ["age", "dose"]\n{extra}\n'
        f'[model]\nname = "mlr"\n[method]\n{METHODS[method]}\n'
    )
    Recording.begin(Config.load(path), folder / "run").train()
    (folder / "all.csv").unlink()  # what follows does without the training data
    return folder / "run"


@pytest.mark.parametrize(
    "method", [pytest.param(n, marks=pytest.mark.slow if n == "apfl" else ()) for n in METHODS]
)
def test_a_new_client_gains(tmp_path: Path, method: str) -> None:
    """The new ward's level is its own: the common model fails it, its own does better."""
    run = trained(tmp_path, method, 'standardize = "feature"')
    model = load_model(run / "model.safetensors")
    columns = {k: v for k, v in ward(4).items() if k != "cost"}
    file = write_csv(tmp_path / "new.csv", dict(reversed(columns.items())))  # in another order
    adapted = adapt(model, client_rows(model.uses, file))
    assert (adapted.examples, adapted.held_out) == (60, 20)
    assert adapted.after["loss"] < adapted.before["loss"]
    assert adapted.after["accuracy"] >= adapted.before["accuracy"]
    out = tmp_path / "own.safetensors"
    out.write_bytes(adapted.model.to_bytes())
    again = load_model(out)
    x = client_rows(model.uses, file).x
    np.testing.assert_array_equal(again.predict(x), adapted.model.predict(x))
    assert set(again.predict(x)) <= {"ill", "well"}
    longer = adapt(model, client_rows(model.uses, file), steps=30)
    assert longer.after["loss"] < adapted.after["loss"]


def test_what_adapt_does_is_what_the_method_does(tmp_path: Path) -> None:
    """FedAvg + update in NumPy: one full gradient step from the common model, on scaled inputs."""
    run = trained(tmp_path, "fedavg", 'standardize = "feature"')
    model = load_model(run / "model.safetensors")
    columns = {k: v for k, v in ward(4).items() if k != "cost"}
    npz = tmp_path / "new.npz"
    x = np.column_stack([columns["age"], columns["dose"]])
    y = np.array(columns["state"])
    np.savez(npz, x=x[:60], y=y[:60], x_test=x[60:], y_test=y[60:])
    adapted = adapt(model, client_rows(model.uses, npz))
    np.testing.assert_allclose(client_rows(model.uses, npz, labeled=False).x, x[:60], rtol=1e-6)
    assert (adapted.examples, adapted.held_out) == (60, 20)
    assert model.scaling is not None
    z = (x[:60] - model.scaling.shift[0]) * model.scaling.scale[0]
    w, b = np.asarray(model.params["w"], float), np.asarray(model.params["b"], float)
    logits = z @ w.T + b
    p = np.exp(logits - logits.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    error = p - (y[:60, None] == np.array(["ill", "well"]))
    np.testing.assert_allclose(
        adapted.model.params["w"], w - 0.5 * error.T @ z / 60, rtol=1e-3, atol=1e-5
    )
    np.testing.assert_allclose(
        adapted.model.params["b"], b - 0.5 * error.mean(axis=0), rtol=1e-3, atol=1e-5
    )


def test_inputs_scaled_by_each_client(tmp_path: Path) -> None:
    """A new client's own training rows say how its inputs are scaled."""
    run = trained(tmp_path, "pfedme", 'standardize = "client"')
    model = load_model(run / "model.safetensors")
    assert model.scaling is None
    columns = {k: v for k, v in ward(4).items() if k != "cost"}
    adapted = adapt(model, client_rows(model.uses, write_csv(tmp_path / "n.csv", columns)))
    assert adapted.model.scaling is not None
    assert adapted.after["accuracy"] > 0.85
    np.testing.assert_allclose(adapted.model.scaling.shift[0, 1], 66, atol=4)


@pytest.mark.parametrize(
    ("setting", "clip"), [("", 10.0), ("clip = 1.5", 1.5), ('clip = "none"', None)]
)
def test_inputs_scaled_by_each_client_are_clipped_as_in_training(
    tmp_path: Path, setting: str, clip: float | None
) -> None:
    """A new client clips its inputs where the clients of the run did."""
    run = trained(tmp_path, "fedavg", f'standardize = "client"\n{setting}')
    model = load_model(run / "model.safetensors")
    assert model.uses.clip == clip
    columns = {k: v for k, v in ward(4).items() if k != "cost"}
    adapted = adapt(model, client_rows(model.uses, write_csv(tmp_path / "new.csv", columns)))
    scaling = adapted.model.scaling
    assert scaling is not None
    limit = np.inf if clip is None else clip
    assert scaling.clip.tolist() == [limit]
    far = np.array([[50.0, 66.0], [50.0, 1e4]])
    inputs = scaling(far, 0)
    assert np.abs(inputs[1]).max() == (limit if clip else np.abs(inputs).max())
    out = tmp_path / "own.safetensors"
    out.write_bytes(adapted.model.to_bytes())
    saved = load_model(out)
    assert saved.uses.clip == clip
    assert saved.scaling is not None
    np.testing.assert_array_equal(saved.scaling.clip, scaling.clip)


def test_a_regression(tmp_path: Path) -> None:
    extra = 'task = "regression"\nstandardize = "feature"\nstandardize_target = true'
    run = trained(tmp_path, "pfedme", extra, label="cost")
    model = load_model(run / "model.safetensors")
    columns = {k: v for k, v in ward(4).items() if k != "state"}
    file = write_csv(tmp_path / "new.csv", columns)
    adapted = adapt(model, client_rows(model.uses, file))
    assert set(adapted.after) == {"r2", "rmse", "loss"}
    assert adapted.after["rmse"] < adapted.before["rmse"]
    said = adapted.model.predict(client_rows(model.uses, file, labeled=False).x)
    assert abs(said.mean() - np.mean(columns["cost"])) < 150  # in the targets' own unit


@pytest.mark.slow
def test_from_the_command_line(tmp_path: Path) -> None:
    run = trained(tmp_path, "per-fedavg", 'standardize = "feature"')
    columns = {k: v for k, v in ward(4).items() if k != "cost"}
    file, out = write_csv(tmp_path / "new.csv", columns), tmp_path / "own.safetensors"
    done = perfed("adapt", run, "--data", file, "--out", out)
    assert done.returncode == 0, done.stderr
    assert "own model" in done.stdout
    unlabeled = write_csv(tmp_path / "rows.csv", {k: columns[k][:3] for k in ("dose", "age")})
    said = perfed("predict", out, "--data", unlabeled)
    assert said.returncode == 0, said.stderr
    assert said.stdout.splitlines()[0] == "prediction"
    assert set(said.stdout.split()[1:]) <= {"ill", "well"}
    assert len(said.stdout.split()) == 4
    before = unlabeled.read_bytes()
    lost = perfed("predict", out, "--data", unlabeled, "--out", unlabeled)
    assert lost.returncode == 2
    assert "it is there already" in lost.stderr
    assert unlabeled.read_bytes() == before
    refused = perfed("adapt", run, "--data", file, "--out", out)
    assert refused.returncode == 2
    assert "it is there already" in refused.stderr


@pytest.fixture(scope="module")
def model_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("bad"), "per-fedavg", 'standardize = "feature"')


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("age,state\n1,ill\n2,well\n", 'no column "dose"'),
        ("age,dose,state\n1,2,dead\n2,3,ill\n", 'the label "dead" is not in labels'),
        ("age,dose,state\n1,,ill\n", 'row 2, column "dose": the cell is empty'),
        ("age,dose,state\n1,2,ill\n", "two are needed"),
        ("age,dose\n1,2\n", 'no column "state"'),
    ],
)
def test_bad_files_are_named(model_run: Path, tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "new.csv"
    file.write_text(text)
    model = load_model(model_run / "model.safetensors")
    with pytest.raises(DataError) as caught:
        adapt(model, client_rows(model.uses, file))
    assert message in str(caught.value)


def test_bad_input_writes_nothing(model_run: Path, tmp_path: Path) -> None:
    """Exit 2, and the message says what, where and what to do."""
    (tmp_path / "new.csv").write_text("age,state\n1,ill\n2,well\n")
    out = tmp_path / "own.safetensors"
    for data, message in (
        (tmp_path / "new.csv", 'no column "dose"'),
        (tmp_path / "none.csv", "no such file"),
        (tmp_path, "no such file"),
    ):
        done = here("adapt", model_run, "--data", data, "--out", out)
        assert done.exit_code == 2
        assert message in done.stderr
        assert not out.exists()
    (tmp_path / "no.safetensors").write_bytes(b"nothing")
    refused = perfed("predict", tmp_path / "no.safetensors", "--data", tmp_path / "new.csv")
    assert refused.returncode == 2
    assert "is not a perfed model file" in refused.stderr


def test_local_has_nothing_to_adapt(model_run: Path) -> None:
    model = load_model(model_run / "model.safetensors")
    local = {"name": "local", "lr": 0.1, "tau": 1, "batch": 5}
    from dataclasses import replace

    alone = replace(model, uses=replace(model.uses, method=local))
    file = model_run / "x.npz"
    np.savez(file, x=np.ones((4, 2)), y=np.array(["ill", "well"] * 2))
    with pytest.raises(DataError, match="learns no common model"):
        adapt(alone, client_rows(model.uses, file))
    with pytest.raises(FieldError, match="steps = 0"):
        adapt(model, client_rows(model.uses, file), steps=0)
    file.unlink()


@pytest.mark.slow
def test_models_of_every_kind_come_back(tmp_path: Path) -> None:
    """Nested parameters, image shapes and texts survive the file."""
    for i, (model, data) in enumerate(
        (
            ('name = "cnn"\nchannels = [3]\nhidden = 5', 'source = "digits"\nclients = 4'),
            (
                'name = "mlp"\nhidden = [7, 5]\nactivation = "relu"',
                'source = "digits"\nclients = 4',
            ),
        )
    ):
        path = tmp_path / f"{i}.toml"
        path.write_text(
            f'rounds = 1\ncohort = 2\n[data]\n{data}\n[model]\n{model}\n[method]\nname = "fedavg"\n'
        )
        result = Recording.begin(Config.load(path), tmp_path / str(i)).train()
        saved = load_model(tmp_path / str(i) / "model.safetensors")
        for a, b in zip(*map(jax.tree.leaves, (saved.params, result.state.params)), strict=True):
            np.testing.assert_array_equal(a, b)
        x = result.experiment.federation.test.client(0)[0]
        np.testing.assert_array_equal(saved.predict(x), result.predict(0, x, kind="global"))
        shutil.rmtree(tmp_path / str(i))


def test_a_model_that_is_not_finite_is_not_given(model_run: Path, tmp_path: Path) -> None:
    columns = {k: v for k, v in ward(4).items() if k != "cost"}
    file = write_csv(tmp_path / "new.csv", columns)
    model = load_model(model_run / "model.safetensors")
    huge = jax.tree.map(lambda leaf: leaf + np.float32(1e38), model.params)
    model = replace(model, params=huge)
    with pytest.raises(DivergedError, match="the adapted model is not finite"):
        adapt(model, client_rows(model.uses, file))
    with pytest.raises(FieldError, match="seed = -1"):
        adapt(model, client_rows(model.uses, write_csv(file, columns)), seed=-1)


def test_the_output_is_checked_first(model_run: Path, tmp_path: Path) -> None:
    file = write_csv(tmp_path / "new.csv", {k: v for k, v in ward(4).items() if k != "cost"})
    for command, out, message in (
        ("adapt", tmp_path, "is a folder"),
        ("adapt", tmp_path / "no" / "own.safetensors", "there is no folder"),
        ("predict", tmp_path / "no" / "said.csv", "there is no folder"),
    ):
        more = ["--overwrite"] if out.is_dir() else []
        done = here(command, model_run, "--data", file, "--out", out, *more)
        assert done.exit_code == 2
        assert message in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["new.csv"]
