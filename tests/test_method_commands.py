"""Methods of every kind through `run`, `report`, `diagnose` and `advise`, on a tiny federation."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from perfed import Config
from perfed.cli.app import app
from perfed.methods import find_method
from perfed.runs.files import read_json

# Plain steps; state at the clients, at the server, at both; heads.
KINDS = ("local", "per-fedavg", "fedadam", "ditto", "scaffold", "fedper", "fedrod")
# Theorems cover these; of the others only step sizes are held against 2/L.
COVERED = ("fedavg", "per-fedavg", "pfedme")
CONFIG = """
rounds = 2
cohort = 2
eval_every = 1
[data]
source = "digits"
clients = 4
[model]
name = "mlp"
hidden = [4]
[method]
name = "{name}"
"""


def invoke(*arguments: object) -> str:
    """What a command prints; it must succeed, and its errors must not be tracebacks."""
    words = [str(part) for part in arguments]
    done = CliRunner().invoke(app, words, env={"COLUMNS": "1000"})
    assert done.exit_code == 0, done.output
    assert "Traceback" not in done.output
    return done.output


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_a_method_in_all_commands(tmp_path: Path, name: str) -> None:
    config, out = tmp_path / "c.toml", tmp_path / "out"
    config.write_text(CONFIG.format(name=name))
    cls = find_method(name)
    printed = invoke("run", config, "--out", out)
    summary = read_json(out / "summary.json")
    assert summary["method"] == name
    assert ("global" in summary) == (" global " in printed)
    assert cls.has_global_model or "global" not in summary

    found = invoke("diagnose", out, "--out", tmp_path / "theory.json")
    theory = json.loads((tmp_path / "theory.json").read_text())
    checked = {condition["text"].split()[0] for condition in theory["conditions"]}
    if name in COVERED:
        assert theory["conditions"]
    else:
        assert checked == set(cls.step_sizes)
        assert theory["bounds"] == []
        assert f"do not cover {name}" in found
    invoke("report", out, "--out", tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert 'id="theory"' in text

    advised = invoke("advise", config)
    assert "validation loss in the pilot" in advised
    chosen = Config.load(tmp_path / "c-advised.toml")
    assert chosen.method_name == name
    invoke("run", tmp_path / "c-advised.toml", "--out", tmp_path / "advised")
