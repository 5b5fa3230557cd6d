"""Models with dropout, running statistics and frozen leaves: resumed, adapted, federated."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
from typer.testing import CliRunner

from federations import NAMES, distance, federation, simulated
from perfed import load
from perfed.cli.app import app
from perfed.runs.config import Config
from perfed.runs.recording import Recording
from test_recording import same

FACTORY = "networks:normalized"


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The factories, for this process and those it starts."""
    here = str(Path(__file__).parent)
    monkeypatch.syspath_prepend(here)
    monkeypatch.setenv("PYTHONPATH", here, prepend=":")


def write(folder: Path, **more: Any) -> Path:
    values = {
        "rounds": 6,
        "cohort": 3,
        "eval_every": 3,
        "data": {"source": "digits", "clients": 6},
        "model": {"name": "python", "factory": FACTORY, "dropout": 0.2},
        "method": {"name": "fedavg", "lr": 0.05, "tau": 4, "batch": 8, "adapt_batch": 8},
        "output": {"checkpoint_rounds": 1},
    }
    path = folder / "config.toml"
    path.write_text(tomli_w.dumps(values | more))
    return path


def invoke(*arguments: object) -> str:
    done = CliRunner().invoke(app, [str(part) for part in arguments])
    assert done.exit_code == 0, done.output
    return done.output


@pytest.mark.parametrize("batch_norm", ["shared", pytest.param("personal", marks=pytest.mark.slow)])
def test_a_resumed_run_is_the_same_bits(tmp_path: Path, batch_norm: str) -> None:
    config = Config.load(write(tmp_path, batch_norm=batch_norm))
    whole = Recording.begin(config, tmp_path / "whole").train()
    assert whole.scores["personalized"].accuracy.mean() > 0.1

    def stop(progress: Any) -> None:
        if progress.round >= 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Recording.begin(config, tmp_path / "left").train(stop)
    Recording.resume(tmp_path / "left").train()
    same(tmp_path / "whole", tmp_path / "left")


@pytest.mark.parametrize("batch_norm", ["shared", pytest.param("personal", marks=pytest.mark.slow)])
def test_adapt_and_predict_with_statistics(tmp_path: Path, batch_norm: str) -> None:
    """A client that was not there: its model's statistics are of its own rows, too."""
    path = write(tmp_path, batch_norm=batch_norm, rounds=12)
    invoke("run", path, "--out", tmp_path / "run")
    rows = load("digits", clients=3, split="iid").train.client(0)
    np.savez(tmp_path / "new.npz", x=rows[0], y=rows[1])
    own = tmp_path / "own.safetensors"
    allow = ["--allow-factory", FACTORY]
    said = invoke("adapt", tmp_path / "run", "--data", tmp_path / "new.npz", "--out", own,
                  "--steps", 60, *allow)  # fmt: skip
    assert "accuracy" in said
    lines = invoke("predict", own, "--data", tmp_path / "new.npz", *allow).split()[1:]
    assert np.mean(np.array(lines) == rows[1].astype(str)) > 0.5


def test_theory_says_that_it_has_nothing_to_say(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["diagnose", str(write(tmp_path))])
    assert done.exit_code == 2
    assert "keeps running statistics" in " ".join(done.output.split())


@pytest.mark.slow
def test_the_log_tells_what_is_slow(tmp_path: Path) -> None:
    """What is not rewritten, and what it costs; nothing where all is."""

    def said(factory: str, *out: object) -> str:
        model = {"name": "python", "factory": factory}
        path = write(tmp_path, rounds=1, model=model)
        return " ".join(invoke("run", path, *out).split())

    expected = "slow operations of the model stay as they are: conv_general_dilated within cond"
    # There are 8 x 8 places, 9 numbers in a window, 4 outputs and 8 examples, twice each.
    for out in ((), ("--out", tmp_path / "run")):
        assert f"{expected} (0.0 MFLOP a batch)" in said("networks:switched", *out)
    assert "slow operations" not in said("networks:normalized")


def test_inputs_that_a_module_does_not_take(tmp_path: Path) -> None:
    path = write(tmp_path, model={"name": "python", "factory": "networks:torch_cnn"})
    done = CliRunner().invoke(app, ["run", str(path)])
    assert done.exit_code == 2
    said = " ".join(done.output.split())
    assert "cannot take inputs of shape (8, 8, 1): Expected 3D" in said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("factory", "more"),
    [
        ("networks:normalized", {}),
        ("networks:normalized", {"batch_norm": "personal", "codec": {"name": "low-precision"}}),
        ("networks:adapted", {}),
    ],
    ids=["shared", "fedbn-quantized", "frozen"],
)
def test_a_real_federation_ends_where_a_simulation_ends(
    tmp_path: Path, factory: str, more: dict[str, Any]
) -> None:
    method = {"name": "fedavg", "lr": 0.05, "tau": 3, "batch": 8, "adapt_batch": 8}
    model = {"name": "python", "factory": factory}
    with federation(tmp_path, method, model=model, **more) as run:
        run.serve()
        for client in NAMES:
            run.join(client, "--allow-factory", factory)
        run.finish()
    expected = simulated(run.values)
    for i, client in enumerate(NAMES):
        assert distance(run.own_model(client), expected.personal_model(i)) < 1e-5
    summary = run.summary()
    assert summary["uplink_bytes"] == expected.costs.uplink_bytes[-1]
    assert summary["downlink_bytes"] == expected.costs.downlink_bytes[-1]


@pytest.mark.slow
def test_three_processes_train_a_torch_cnn(tmp_path: Path) -> None:
    """With batch normalization and dropout; a client that has not allowed it, runs no code."""
    pytest.importorskip("torchax", reason="PyTorch modules need the extra perfed[torch]")
    factory = "networks:torch_cnn"
    method = {"name": "fedavg", "lr": 0.05, "tau": 3, "batch": 8, "adapt_batch": 8}
    model = {"name": "python", "factory": factory}
    with federation(tmp_path, method, model=model, shape=(8, 8)) as run:
        run.serve()
        run.join(NAMES[0])
        run.wait_for("--allow-factory networks:torch_cnn", who=NAMES[0])
        for client in NAMES[1:]:
            run.join(client, "--allow-factory", factory)
        again = run.members[NAMES[0]]
        again.terminate()
        again.wait(30)
        run.join(NAMES[0], "--allow-factory", factory)
        run.finish()
    expected = simulated(run.values)
    for i, client in enumerate(NAMES):
        assert distance(run.own_model(client), expected.personal_model(i)) < 1e-4
    scores = json.loads((run.run / "summary.json").read_text())
    assert scores["rounds"] == 3
