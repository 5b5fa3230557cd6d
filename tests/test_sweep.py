"""Sweeps: points chosen on validation data, failures that stop nobody, and taking up again."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from perfed import Config, ConfigError, load
from perfed.runs import run_dir
from perfed.runs.checkpoint import Checkpoints
from perfed.runs.recording import Recording
from perfed.runs.sweep import Sweep, SweepLine, _folder_name, grid_points, sweep_lines
from perfed.training import Progress
from test_cli import here, perfed

CONFIG = """
rounds = 15
cohort = 4
[data]
source = "digits"
split = "shards"
clients = 8
[model]
name = "mlr"
[method]
name = "fedavg"
lr = 0.5
alpha = 0.5
"""
PFEDME = '[method]\nname = "pfedme"\nlam = 5.0\neta = 0.1\ninner_lr = 0.1\nlocal_rounds = 5\n'


def write(folder: Path) -> Path:
    path = folder / "run.toml"
    path.write_text(CONFIG)
    return path


def quiet(*_: object) -> None:
    return None


def test_validation_data_are_training_data(tmp_path: Path) -> None:
    """Nothing of the held-out data is used to choose, for training, scoring or scaling."""
    data = load("digits", split="shards", clients=8)
    part = data.validation(0.25, seed=3)
    whole = {row.tobytes() for row in data.train.x}
    held = {row.tobytes() for row in data.test.x}
    rows = [row.tobytes() for side in (part.train, part.test) for row in side.x]
    assert set(rows) == whole
    assert not set(rows) & (held - whole)
    np.testing.assert_allclose(part.test.size / data.train.size, 0.25, atol=0.02)
    for i in range(8):
        own = [np.bincount(side.client(i)[1], minlength=10) for side in (part.train, part.test)]
        np.testing.assert_allclose(own[0] / own[0].sum(), own[1] / own[1].sum(), atol=0.05)
        assert part.names[i] == data.names[i]
    config = Config.load(write(tmp_path), ["validation=0.25"])
    used = config.build().experiment.federation
    assert used.train.size.sum() < data.train.size.sum()
    assert used.train.size.sum() + used.test.size.sum() == data.train.size.sum()


def test_the_best_on_validation_is_tested_and_nothing_else(tmp_path: Path) -> None:
    every = grid_points(write(tmp_path), [], ["method.lr=0.001,0.5"])
    assert [p.label for p in every] == ["fedavg, method.lr=0.001", "fedavg, method.lr=0.5"]
    sweep = Sweep(tuple(every), 2, tmp_path / "out")
    outcomes = sweep.run(quiet, quiet)
    assert [(o.point.settings[0], o.tested) for o in outcomes] == [
        ("method.lr=0.001", False),
        ("method.lr=0.5", False),
        ("method.lr=0.5", True),
    ]
    assert outcomes[1].mean > outcomes[0].mean
    tested = list((tmp_path / "out" / "test").iterdir())
    assert len(tested) == 1
    summary = json.loads((tested[0] / "seed-1" / "summary.json").read_text())
    assert summary["seed"] == 1
    assert summary["personalized"]["accuracy"]["mean"] == outcomes[2].scores[1]
    first, second = sweep_lines(outcomes)
    assert first.test is None
    assert second.test is not None
    assert second.test[0] == pytest.approx(np.mean(outcomes[2].scores))
    gap = abs(outcomes[2].scores[0] - outcomes[2].scores[1])
    assert second.test[1] == pytest.approx(12.706 * gap / 2, rel=1e-3)  # t of one degree


@pytest.mark.slow
def test_a_failed_point_stops_nobody(tmp_path: Path) -> None:
    said: list[str] = []
    every = grid_points(write(tmp_path), [], ["method.lr=1e38,0.5"])
    outcomes = Sweep(tuple(every), 1, tmp_path / "out").run(quiet, said.append)
    assert [bool(o.failure) for o in outcomes] == [True, False, False]
    assert any(
        "method.lr=1e38 (validation, seed 0) failed: fedavg diverged" in line for line in said
    )
    shown = sweep_lines(outcomes)
    assert shown[0].failure is not None
    assert shown[1].test is not None


def test_methods_are_chosen_each_for_itself(tmp_path: Path) -> None:
    (tmp_path / "pfedme.toml").write_text(PFEDME)
    (tmp_path / "fedavg.toml").write_text('[method]\nname = "fedavg"\nlr = 0.5\n')
    files = [tmp_path / "fedavg.toml", tmp_path / "pfedme.toml"]
    every = grid_points(write(tmp_path), files, [], ["rounds=3"])
    assert [p.method for p in every] == ["fedavg", "pfedme"]
    outcomes = Sweep(tuple(every), 1, tmp_path / "out").run(quiet, quiet)
    assert all(o.tested for o in outcomes)  # one point each: nothing to choose


def test_a_sweep_goes_on_where_it_was_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Finished runs are not run again; one that was interrupted goes on from its checkpoint."""
    every = tuple(grid_points(write(tmp_path), [], [], ["output.checkpoint_rounds=1"]))
    whole = Sweep(every, 2, tmp_path / "whole").run(quiet, quiet)
    sweep = Sweep(every, 2, tmp_path / "out")

    def stop(name: str, progress: Progress) -> None:
        assert name == "fedavg (test, seed 0) and 1 more"  # the two are computed together
        if progress.round >= 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sweep.run(stop, quiet)
    begun: list[Path] = []

    def begin(config: Config, folder: Path, data: object) -> Recording:
        begun.append(folder)
        raise AssertionError("nothing is begun anew")

    monkeypatch.setattr(Recording, "begin", begin)
    said: list[str] = []
    outcomes = sweep.run(quiet, said.append)
    assert begun == []
    assert any("going on from round" in line for line in said)
    assert outcomes[0].scores == whole[0].scores
    for seed in ("seed-0", "seed-1"):
        models = [
            (tmp_path / name / "test" / "fedavg" / seed / "model.safetensors").read_bytes()
            for name in ("whole", "out")
        ]
        assert models[0] == models[1]
    other = Sweep(tuple(grid_points(write(tmp_path), [], ["method.lr=0.1"])), 2, tmp_path / "out")
    with pytest.raises(ConfigError, match="holds another sweep"):
        other.run(quiet, quiet)


@pytest.mark.slow
def test_from_the_command_line(tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = perfed("sweep", write(tmp_path), "--out", out, "--seeds", 2, "--set", "rounds=2",
                  "--grid", "method.alpha=0.1,0.5", COLUMNS="120")  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "held-out" in done.stdout
    assert "±" in done.stdout
    for grid, message in (
        ("method.lrr=1,2", "method.lrr: no such setting"),
        ("x", "--grid x: write"),
    ):
        wrong = perfed("sweep", write(tmp_path), "--out", tmp_path / "no", "--grid", grid)
        assert wrong.returncode == 2
        assert message in wrong.stderr
    assert not (tmp_path / "no").exists()


def test_lines_of_one_seed_have_no_interval(tmp_path: Path) -> None:
    every = grid_points(write(tmp_path), [], [], ["rounds=1"])
    (line,) = sweep_lines(Sweep(tuple(every), 1, tmp_path / "out").run(quiet, quiet))
    assert isinstance(line, SweepLine)
    assert line.test is not None
    assert np.isnan(line.test[1])


@pytest.mark.parametrize(
    "moment", ["finish", pytest.param("between courses", marks=pytest.mark.slow)]
)
def test_an_interruption_loses_nothing_of_a_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """However far the books of the other runs were: all go on together from one round."""
    every = tuple(grid_points(write(tmp_path), [], [], ["output.checkpoint_rounds=2"]))
    whole = Sweep(every, 3, tmp_path / "whole").run(quiet, quiet)
    sweep = Sweep(every, 3, tmp_path / "out")
    calls = 0

    def interrupting(function: Callable[..., Any], at: int) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == at:
                raise KeyboardInterrupt
            return function(*args, **kwargs)

        return call

    with monkeypatch.context() as patched:
        if moment == "finish":
            patched.setattr(run_dir, "finish", interrupting(run_dir.finish, 2))
        else:
            patched.setattr(Checkpoints, "write", interrupting(Checkpoints.write, 5))
        with pytest.raises(KeyboardInterrupt):
            sweep.run(quiet, quiet)
    said: list[str] = []
    outcomes = sweep.run(quiet, said.append)
    going_on = [line for line in said if "going on from round" in line]
    assert len(going_on) == (2 if moment == "finish" else 3)
    assert len({line.rpartition(" ")[2] for line in going_on}) == 1  # all from the same round
    if moment == "finish":
        assert going_on[0].endswith("going on from round 15")
    assert outcomes[0].scores == pytest.approx(whole[0].scores, abs=1e-6)


def test_points_that_cannot_be_told_apart_are_refused(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "m.toml").write_text(PFEDME)
    path = write(tmp_path)
    with pytest.raises(ConfigError, match="two points are both called m"):
        grid_points(path, [tmp_path / "a" / "m.toml", tmp_path / "b" / "m.toml"], [])
    with pytest.raises(ConfigError, match=r"two points are both called fedavg, method\.lr=0\.5"):
        grid_points(path, [], ["method.lr=0.5,0.5"])
    with pytest.raises(ConfigError, match="seed: a sweep sets it itself"):
        grid_points(path, [], ["seed=1,2"])
    with pytest.raises(ConfigError, match="validation: a sweep sets it itself"):
        grid_points(path, [], [], ["validation=0.5"])
    long = [f"{'x' * 150}{i}" for i in range(2)] + ["a b", "a_b"]
    assert len({_folder_name(label) for label in long}) == 4


def test_a_point_with_bad_settings_stops_nobody(tmp_path: Path) -> None:
    """Even where they can be found wrong only once the data are there."""
    rows = "".join(f"{c},{i % 7},{i % 3},{i % 2}\n" for c in "abc" for i in range(40))
    (tmp_path / "t.csv").write_text("who,x1,x2,label\n" + rows)
    path = tmp_path / "run.toml"
    path.write_text(
        'rounds = 2\ncohort = 2\n[data]\nsource = "table"\nclient = "who"\nlabel = "label"\n'
        f'path = "{tmp_path / "t.csv"}"\n[model]\nname = "mlr"\n[method]\nname = "fedavg"\n'
    )
    bad = '[network]\nratio = 10\nclient_speed = [1.0, 2.0]\n[method]\nname = "fedavg"\n'
    (tmp_path / "bad.toml").write_text(bad)
    (tmp_path / "good.toml").write_text('[method]\nname = "fedavg"\n')
    every = grid_points(path, [tmp_path / "bad.toml", tmp_path / "good.toml"], [])
    outcomes = Sweep(tuple(every), 1, tmp_path / "out").run(quiet, quiet)
    assert [bool(o.failure) for o in outcomes] == [True, False]
    assert "client_speed" in str(outcomes[0].failure)


def test_a_sweep_of_failures_says_so(tmp_path: Path) -> None:
    done = here("sweep", write(tmp_path), "--out", tmp_path / "out", "--seeds", 1,
                  "--set", "rounds=2", "--set", "method.lr=1e38")  # fmt: skip
    assert done.exit_code == 1
    assert "failed" in done.stderr
