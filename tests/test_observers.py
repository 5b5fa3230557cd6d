"""Trackers: what TensorBoard and MLflow hold of a run, and that a run does without them."""

import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

from perfed import Config
from perfed.runs import trackers as observers
from perfed.runs.trackers import Guarded, MLflow, TensorBoard, TrackerBackend, tracked_values
from perfed.training import Run, Trainer, TrainState
from perfed.training.callbacks import OnTrainState

CONFIG: dict[str, Any] = {
    "rounds": 4,
    "cohort": 3,
    "eval_every": 2,
    "data": {"source": "synthetic", "clients": 6, "sizes": "fedprox"},
    "model": {"name": "mlr"},
    "method": {"name": "fedavg"},
}

needs_tensorboard = pytest.mark.skipif(
    find_spec("tensorboard") is None, reason="the tensorboard package is not installed"
)
needs_mlflow = pytest.mark.skipif(
    find_spec("mlflow") is None or find_spec("sqlalchemy") is None,
    reason="the mlflow-skinny and sqlalchemy packages are not installed",
)


@pytest.fixture(scope="module")
def courses() -> list[TrainState]:
    """A small run, whenever it was scored."""
    config = Config.checked(CONFIG)
    found: dict[int, TrainState] = {}

    def keep(state: TrainState) -> None:
        found.setdefault(len(state.history), state)

    run = Run(config.build(), callbacks=[OnTrainState(keep)])
    Trainer(config.train_options()).train(run)
    return [found[n] for n in sorted(found)]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database for all tests: to make one takes MLflow seconds."""
    return tmp_path_factory.mktemp("mlflow")


@pytest.fixture
def client(store: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{store}/mlflow.db")
    monkeypatch.delenv("MLFLOW_EXPERIMENT_NAME", raising=False)
    monkeypatch.chdir(store)
    from mlflow import MlflowClient  # type: ignore[import-not-found, unused-ignore]

    return MlflowClient()


def events(folder: Path) -> Any:
    """What TensorBoard itself reads there: each name's (round, value) pairs."""
    from tensorboard.backend.event_processing import (  # type: ignore[import-not-found, import-untyped, unused-ignore]
        event_accumulator,
    )

    reader = event_accumulator.EventAccumulator(str(folder / "tensorboard"))
    reader.Reload()
    return {
        name: [(event.step, event.value) for event in reader.Scalars(name)]
        for name in reader.Tags()["scalars"]
    }


def steps(client: Any, run: str, name: str) -> list[tuple[int, float]]:
    return [(m.step, m.value) for m in client.get_metric_history(run, name)]


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_values_are_flat_and_those_of_the_scores(courses: list[TrainState]) -> None:
    assert [course.round for course in courses] == [0, 2, 4]
    first, last = tracked_values(courses[0]), tracked_values(courses[-1])
    assert first["uplink_bytes"] == first["downlink_bytes"] == 0
    assert last["uplink_bytes"] == courses[-1].traffic.uplink.sum() > 0
    assert last["downlink_bytes"] == 3 * courses[-1].traffic.downlink.sum()
    scores = courses[-1].history[-1].scores
    assert last["personalized/accuracy/mean"] == np.mean(scores["personalized"].accuracy)
    assert last["global/loss/worst"] == np.max(scores["global"].loss)
    assert len(last) == 2 * 2 * 6 + 3
    assert all(isinstance(value, float) for value in last.values())


def test_costs_are_those_of_the_last_score_not_of_the_rounds_since(
    courses: list[TrainState],
) -> None:
    """As in a checkpoint between two scores."""
    scored, later = courses[1], courses[2]
    between = TrainState(later.engine, scored.history, later.messages, scored.marks, {})
    assert tracked_values(between) == tracked_values(scored)


@needs_tensorboard
def test_tensorboard_reads_what_was_written(courses: list[TrainState], tmp_path: Path) -> None:
    observer = TensorBoard()
    observer.begin(CONFIG, tmp_path)
    for course in courses:
        observer.score(course.round, tracked_values(course))
    observer.end(tracked_values(courses[-1]) | {"best": 0.5}, [])
    observer.close()
    read = events(tmp_path)
    assert read.pop("best") == [(4, 0.5)]
    assert set(read) == set(tracked_values(courses[0]))
    for name, points in read.items():
        assert points == [(c.round, np.float32(tracked_values(c)[name])) for c in courses], name


@needs_tensorboard
def test_tensorboard_goes_on_in_the_same_folder(tmp_path: Path) -> None:
    """The first part is killed, so never closed, after a round that is run again."""
    killed = TensorBoard()
    killed.begin(CONFIG, tmp_path)
    for round in (0, 2, 4):
        killed.score(round, {"loss": float(round)})
    resumed = TensorBoard()
    resumed.begin(CONFIG, tmp_path)
    for round in (4, 6):
        resumed.score(round, {"loss": 10.0 * round})
    resumed.close()
    assert events(tmp_path) == {"loss": [(0, 0.0), (2, 2.0), (4, 40.0), (6, 60.0)]}
    killed.close()


@needs_mlflow
def test_mlflow_holds_params_metrics_and_files(
    courses: list[TrainState], tmp_path: Path, client: Any
) -> None:
    folder = tmp_path / "my-run"
    (folder / "clients").mkdir(parents=True)
    files = [folder / "summary.json", folder / "clients" / "a.safetensors"]
    for file in files:
        file.write_text("{}")
    many = {f"k{i}": i for i in range(150)} | {"long": "x" * 10_000, "none": None}
    observer = MLflow()
    observer.begin(CONFIG | {"many": many}, folder)
    [run] = client.search_runs([client.get_experiment_by_name("perfed").experiment_id])
    assert (run.info.run_name, run.info.status) == ("my-run", "RUNNING")
    for course in courses:
        observer.score(course.round, tracked_values(course))
    observer.end(tracked_values(courses[-1]) | {"best": 0.5}, files)
    observer.close()
    run = client.get_run(run.info.run_id)
    assert run.info.status == "FINISHED"
    params = run.data.params
    assert (params["method.name"], params["rounds"], params["many.k149"]) == ("fedavg", "4", "149")
    assert params["many.long"] == "x" * 500
    assert "many.none" not in params
    assert run.data.metrics == tracked_values(courses[-1]) | {"best": 0.5}
    assert steps(client, run.info.run_id, "best") == [(4, 0.5)]
    for name in tracked_values(courses[0]):
        expected = [(c.round, tracked_values(c)[name]) for c in courses]
        assert steps(client, run.info.run_id, name) == expected
    assert [f.path for f in client.list_artifacts(run.info.run_id)] == ["clients", "summary.json"]
    inner = client.list_artifacts(run.info.run_id, "clients")
    assert [f.path for f in inner] == ["clients/a.safetensors"]


@needs_mlflow
def test_mlflow_goes_on_in_the_same_run(tmp_path: Path, client: Any) -> None:
    config = CONFIG | {"output": {"experiment": "resumed"}}
    left = MLflow()
    left.begin(config, tmp_path)
    for round in (0, 2, 4):
        left.score(round, {"loss": float(round)})
    left.close()
    experiment = [client.get_experiment_by_name("resumed").experiment_id]
    [run] = client.search_runs(experiment)
    assert run.info.status == "FAILED"
    resumed = MLflow()
    # Where a run is computed may change; MLflow's params may not.
    resumed.begin(config | {"engine": {"devices": 2}}, tmp_path)
    assert client.get_run(run.info.run_id).info.status == "RUNNING"
    resumed.score(4, {"loss": 4.0, "rmse": 1.0})  # run again: what it has already is left alone
    resumed.score(6, {"loss": 6.0, "rmse": 1.0})
    resumed.end({"loss": 6.0}, [])
    resumed.close()
    [run] = client.search_runs(experiment)
    assert run.info.status == "FINISHED"
    expected = [(0, 0.0), (2, 2.0), (4, 4.0), (6, 6.0)]
    assert steps(client, run.info.run_id, "loss") == expected
    assert [step for step, _ in steps(client, run.info.run_id, "rmse")] == [4, 6]


@needs_mlflow
@needs_tensorboard
def test_a_new_run_in_an_old_folder_is_another_one(tmp_path: Path, client: Any) -> None:
    for loss in (1.0, 2.0):
        observers.forget(tmp_path)
        for observer in observers.trackers_of(["mlflow", "tensorboard", "mlflow"]):
            observer.begin(CONFIG | {"output": {"experiment": "again"}}, tmp_path)
            observer.score(0, {"loss": loss})
            observer.close()
    assert events(tmp_path) == {"loss": [(0, 2.0)]}
    assert len(client.search_runs([client.get_experiment_by_name("again").experiment_id])) == 2


@needs_mlflow
def test_a_lost_store_does_not_end_the_run(
    tmp_path: Path, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "no-such-scheme://nowhere")
    said: list[str] = []
    guarded = Guarded(MLflow(), said.append)
    guarded.begin(CONFIG, tmp_path)
    guarded.score(0, {"loss": 1.0})
    guarded.close()
    assert len(said) == 1
    assert said[0].startswith("MLflow failed (")


def test_the_registry_and_the_setting_name_the_same() -> None:
    assert tuple(observers.TRACKERS) == get_args(observers.Tracker)


@pytest.mark.parametrize("name", list(observers.TRACKERS))
def test_a_missing_package_is_named_with_its_extra(name: str) -> None:
    said = python(
        f"import sys; sys.modules[{name!r}] = None\n"
        "from perfed import ConfigError\n"
        "from perfed.runs.trackers import trackers_of\n"
        f"try: trackers_of([{name!r}])\n"
        "except ConfigError as error: print(error)"
    )
    assert f'output.trackers: "{name}"' in said
    assert f'pip install "perfed[{name}]"' in said


def test_nothing_is_imported_unless_asked_for() -> None:
    said = python(
        "import sys, perfed.cli.app, perfed.runs.trackers\n"
        "roots = {name.split('.')[0].lower() for name in sys.modules}\n"
        "print(sorted(roots & {'tensorboard', 'tensorboardx', 'tensorflow', 'mlflow', 'torch'}))"
    )
    assert said.strip() == "[]"


class _Failing(TrackerBackend):
    """Told of everything, and fails when told of round 2."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def begin(self, config: dict[str, Any], folder: Path) -> None:
        self.told.append("begin")

    def score(self, round: int, values: Mapping[str, float]) -> None:
        self.told.append(round)
        if round == 2:
            raise OSError("no space left")

    def end(self, values: Mapping[str, float], files: Sequence[Path]) -> None:
        self.told.append("end")

    def close(self) -> None:
        self.told.append("close")
        if 2 in self.told:
            raise OSError("still none")


@pytest.mark.parametrize("fails", [True, False])
def test_a_failure_is_said_once_and_the_run_goes_on(tmp_path: Path, fails: bool) -> None:
    said: list[str] = []
    observer = _Failing()
    guarded = Guarded(observer, said.append)
    guarded.begin(CONFIG, tmp_path)
    for round in (0, 2, 4) if fails else (0, 4):
        guarded.score(round, {})
    guarded.end({}, [])
    guarded.close()
    if fails:
        assert said == ["_Failing failed (OSError: no space left); the run goes on without it"]
        assert observer.told == ["begin", 0, 2, "close"]
    else:
        assert said == []
        assert observer.told == ["begin", 0, 4, "end", "close"]


def test_ctrl_c_is_no_failure_of_a_tracker() -> None:
    class Interrupted(_Failing):
        def score(self, round: int, values: Mapping[str, float]) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Guarded(Interrupted(), pytest.fail).score(0, {})
