"""Run folders: what is in them, and that a run can be killed at any moment and taken up again."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import load_file

from perfed import Config, ConfigError, load, store
from perfed.runs import run_dir
from perfed.runs.checkpoint import Checkpoints
from perfed.runs.recording import Recording
from test_cli import here, perfed

CONFIG = """
rounds = {rounds}
cohort = 4
eval_every = 5
[data]
source = "synthetic"
clients = 12
sizes = "fedprox"
[model]
name = "mlr"
[method]
name = "pfedme"
local_rounds = 3
[codec]
name = "top-k"
fraction = 0.3
error_feedback = true
[output]
checkpoint_rounds = 1
keep = 2
"""


def write(folder: Path, rounds: int = 12, text: str = CONFIG) -> Path:
    path = folder / "run.toml"
    path.write_text(text.format(rounds=rounds))
    return path


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    config = Config.load(write(folder))
    Recording.begin(config, folder / "run").train()
    return folder / "run"


def test_everything_is_there_and_readable_in_two_lines(finished: Path) -> None:
    """As the docs say: pandas or pyarrow, and safetensors."""
    summary = json.loads((finished / "summary.json").read_text())
    metrics = pq.read_table(finished / "metrics.parquet").to_pylist()
    per_client = [row for row in metrics if row["client"] is not None]
    per_round = [row for row in metrics if row["client"] is None]
    scored = [point["round"] for point in summary["history"]]
    assert scored == [0, 5, 10, 12]
    assert len(per_client) == len(scored) * 12 * 2
    assert [row["round"] for row in per_round] == list(range(13))
    last = [r["accuracy"] for r in per_client if r["round"] == 12 and r["kind"] == "personalized"]
    assert last == summary["personalized"]["accuracy"]["clients"]
    assert per_round[-1]["uplink_bytes"] == summary["uplink_bytes"] > 0
    model, clients = (load_file(finished / f"{n}.safetensors") for n in ("model", "clients"))
    assert model["params.w"].shape == (10, 60)
    assert clients["w"].shape == (12, 10, 60)
    environment = json.loads((finished / "environment.json").read_text())
    assert environment["versions"]["jax"] == jax.__version__
    assert len(environment["data_sha256"]) == 64
    config = json.loads((finished / "config.json").read_text())
    assert config["method"]["inner_steps"] == 5  # defaults, too
    read = run_dir.read_run(finished)
    assert read.rounds.tolist() == scored
    np.testing.assert_array_equal(read.scores["personalized"]["accuracy"][-1], last)
    assert read.costs["uplink_bytes"][-1] == summary["uplink_bytes"]
    assert "simulated_seconds" not in read.costs
    assert read.train_counts.shape == (12, 10)


def test_personal_models_in_files_of_their_own(tmp_path: Path, finished: Path) -> None:
    path = write(tmp_path)
    Recording.begin(Config.load(path, ["output.personal_models=files"]), tmp_path / "run").train()
    stacked = load_file(finished / "clients.safetensors")
    for i in range(12):
        own = load_file(tmp_path / "run" / "clients" / f"{i}.safetensors")
        np.testing.assert_array_equal(own["params.w"], stacked["w"][i])
    assert not (tmp_path / "run" / "clients.safetensors").exists()


def same(one: Path, other: Path) -> None:
    """All that a run ends in is the same, bit for bit."""
    for name in ("model.safetensors", "clients.safetensors"):
        assert (one / name).read_bytes() == (other / name).read_bytes()
    kept = []
    for folder in (one, other):
        last = sorted((folder / "checkpoints").glob("*.checkpoint"))[-1]
        payload = last.read_bytes().split(b"\n", 1)[1]
        path = folder / "payload.safetensors"
        path.write_bytes(payload)
        kept.append(load_file(path))
        path.unlink()
    assert kept[0].keys() == kept[1].keys()
    for name, array in kept[0].items():
        np.testing.assert_array_equal(array, kept[1][name])
    histories = [
        json.loads((folder / "summary.json").read_text())["history"] for folder in (one, other)
    ]
    assert histories[0] == histories[1]


def started(*arguments: Any, cache: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "perfed", *map(str, arguments)],
        env=os.environ | {"PERFED_CACHE": str(cache)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )


KILLS = 10


@pytest.mark.slow
def test_killed_again_and_again(tmp_path: Path) -> None:
    """SIGKILL at ten random moments, half of them while a checkpoint is written."""
    config, rounds = write(tmp_path, rounds=400), 400
    cache, chance = tmp_path / "cache", random.Random(0)
    whole = started("run", config, "--out", tmp_path / "whole", cache=cache)
    assert whole.wait(timeout=300) == 0
    out = tmp_path / "killed"
    checkpoints = out / "checkpoints"
    process = started("run", config, "--out", out, cache=cache)
    kills, writing, reached = 0, 0, 0
    while kills < KILLS:
        seen = len(list(checkpoints.glob("*.checkpoint")))
        newest = max((p.stat().st_mtime_ns for p in checkpoints.glob("*.checkpoint")), default=0)
        deadline = time.monotonic() + 120
        # Wait until it has done something, then strike.
        while time.monotonic() < deadline:
            now = max((_mtime(p) for p in checkpoints.glob("*.checkpoint")), default=0)
            if now > newest:
                break
            assert process.poll() is None, process.stderr and process.stderr.read()
            time.sleep(0.002)
        if kills % 2:
            until = time.monotonic() + 5
            while not list(checkpoints.glob("*.partial")) and time.monotonic() < until:
                pass
        else:
            time.sleep(chance.uniform(0, 0.1))
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert not (out / "summary.json").exists(), "it was faster than the test"
        kills += 1
        writing += bool(list(checkpoints.glob("*.partial")))
        names = sorted(p.name for p in checkpoints.glob("*.checkpoint"))
        assert len(names) >= min(1, seen)
        reached = int(names[-1][6:15])
        assert reached < rounds
        process = started("resume", out, cache=cache)
    assert process.wait(timeout=300) == 0, process.stderr and process.stderr.read()
    assert writing >= 1, "no kill hit a checkpoint being written"
    same(tmp_path / "whole", out)


def _mtime(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def interrupted(tmp_path: Path, rounds: int = 12, stop: int = 7) -> Path:
    """A run that was left after some rounds."""
    config = Config.load(write(tmp_path, rounds))
    recording = Recording.begin(config, tmp_path / "left")

    def on_progress(progress: Any) -> None:
        if progress.round >= stop:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        recording.train(on_progress)
    return tmp_path / "left"


def test_an_interruption_keeps_where_the_run_stands(tmp_path: Path, finished: Path) -> None:
    left = interrupted(tmp_path)
    assert not (left / "summary.json").exists()
    said: list[str] = []
    Recording.resume(left).train(log=said.append)
    assert any(line.startswith("going on from round") for line in said)
    same(finished, left)


@pytest.mark.slow
def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path, finished: Path) -> None:
    left = interrupted(tmp_path)
    files = sorted((left / "checkpoints").glob("*.checkpoint"))
    assert len(files) == 2
    whole = files[-1].read_bytes()
    for damaged in (whole[:-1], whole[:100], b"", whole[:500] + b"x" + whole[501:]):
        copy = tmp_path / "copy"
        shutil.copytree(left, copy, dirs_exist_ok=True)
        (copy / "checkpoints" / files[-1].name).write_bytes(damaged)
        said: list[str] = []
        recording = Recording.resume(copy)
        checkpoints = Checkpoints(copy / "checkpoints", recording.config.resolved())
        contents = checkpoints.latest(said.append)
        assert contents is not None
        course = checkpoints.read(contents, recording.engine.init())
        assert course.round == int(files[0].name[6:15])
        assert "is damaged: its checksum does not fit; using the one before" in said[0]
        shutil.rmtree(copy)
    for file in files:
        file.write_bytes(b"nothing")
    Recording.resume(left).train()  # from the beginning, with nothing to go on from
    same(finished, left)


def test_another_configuration_is_refused(tmp_path: Path) -> None:
    left = interrupted(tmp_path)
    config = json.loads((left / "config.json").read_text())
    config["method"]["lam"] = 3.0
    config["engine"]["chunk"] = 2  # results do not depend on this one
    (left / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        ConfigError, match=r"^method.lam = 3.0 \(15.0 in the checkpoint\)"
    ) as caught:
        Recording.resume(left).train()
    assert "engine" not in str(caught.value)
    done = perfed("resume", left)
    assert done.returncode == 2
    assert "method.lam = 3.0 (15.0 in the checkpoint)" in done.stderr


def test_other_data_are_refused(tmp_path: Path) -> None:
    left = interrupted(tmp_path)
    environment = json.loads((left / "environment.json").read_text())
    (left / "environment.json").write_text(json.dumps(environment | {"data_sha256": "0" * 64}))
    with pytest.raises(ConfigError, match="the data are not those the run began with"):
        Recording.resume(left)


def test_folders_are_not_mistaken(tmp_path: Path, finished: Path) -> None:
    done = here("resume", finished)
    assert done.exit_code == 2
    assert "this run is finished" in done.stderr
    done = here("resume", tmp_path)
    assert done.exit_code == 2
    assert "is not a run folder" in done.stderr
    left = interrupted(tmp_path)
    done = here("run", write(tmp_path), "--out", left)
    assert done.exit_code == 2
    assert f"go on with it by `perfed resume {left}`" in done.stderr


def test_nobody_else_is_at_work_in_a_folder(tmp_path: Path) -> None:
    """Neither another resume, nor a run that would take its place."""
    config = Config.load(write(tmp_path))
    recording, tried = Recording.begin(config, tmp_path / "run"), 0

    def on_progress(_: Any) -> None:
        nonlocal tried
        for another in (recording.train, recording.begin_folder):
            with pytest.raises(ConfigError, match="another process is at work on this run"):
                another()
            tried += 1

    recording.train(on_progress)
    assert tried
    recording.begin_folder()  # now it may


def test_a_folder_is_that_of_a_run_when_all_is_there_to_resume_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, folder = Config.load(write(tmp_path)), tmp_path / "run"

    def killed(_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(run_dir, "environment", killed)
        with pytest.raises(KeyboardInterrupt):
            Recording.begin(config, folder)
    run_dir.check_vacant(folder, overwrite=False)
    (folder / "federation.json").write_text("{}")  # of a federation that was there before
    Recording.begin(config, folder)
    assert Recording.resume(folder).folder == folder


def test_a_federations_run_is_not_for_resume(tmp_path: Path) -> None:
    left = interrupted(tmp_path)
    (left / "federation.json").write_text("{}")
    with pytest.raises(ConfigError, match="go on with it by `perfed serve --resume`"):
        Recording.resume(left)
    with pytest.raises(ConfigError, match=f"go on with it by `perfed serve --resume {left}`"):
        run_dir.check_vacant(left, overwrite=False)


def test_data_may_have_moved(tmp_path: Path) -> None:
    """Their checksum says whether they are the same."""
    store(load("digits", clients=4), tmp_path / "a")
    text = 'rounds = 6\ncohort = 2\n[data]\nsource = "stored"\nroot = "{}"\n'
    text += '[model]\nname = "mlr"\n[method]\nname = "fedavg"\n'
    for name in "ab":
        (tmp_path / f"{name}.toml").write_text(text.format(tmp_path / name))
    recording = Recording.begin(Config.load(tmp_path / "a.toml"), tmp_path / "run")

    def on_progress(progress: Any) -> None:
        if progress.round >= 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        recording.train(on_progress)
    shutil.move(tmp_path / "a", tmp_path / "b")
    Recording.resume(tmp_path / "run", Config.load(tmp_path / "b.toml")).train()
    assert (tmp_path / "run" / "summary.json").exists()


@pytest.mark.slow
def test_only_the_last_are_kept_and_none_is_half(tmp_path: Path) -> None:
    left = interrupted(tmp_path, rounds=30, stop=20)
    assert len(list((left / "checkpoints").iterdir())) == 2
    (left / "checkpoints" / "round-000000021.checkpoint.partial").write_bytes(b"half")
    Recording.resume(left).train()
    assert not list((left / "checkpoints").glob("*.partial"))
