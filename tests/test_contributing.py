"""The method that CONTRIBUTING adds, in a package of its own: every command works with it."""

import json
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from perfed import Config, load
from perfed.runs.recording import Recording
from test_cli import perfed

ROOT = Path(__file__).parent.parent
RUN = """
rounds = 6
cohort = 3
eval_every = 3
[data]
source = "digits"
clients = 4
split = "dirichlet"
[model]
name = "mlr"
[method]
name = "mr-mtl"
lr = 0.1
tau = 3
"""


def page_method() -> str:
    page = (ROOT / "CONTRIBUTING.md").read_text()
    return textwrap.dedent(re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0])


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A distribution with the page's method, as pip would install it, for every process."""
    site = tmp_path / "site"
    info = site / "mr_mtl-1.0.dist-info"
    info.mkdir(parents=True)
    (site / "mr_mtl.py").write_text(page_method())
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mr-mtl\nVersion: 1.0\n")
    page = (ROOT / "CONTRIBUTING.md").read_text()
    name, where = re.findall(r'^ +(\S+) = "(mr_mtl:\w+)"$', page, re.MULTILINE)[0]
    (info / "entry_points.txt").write_text(f"[perfed.methods]\n{name} = {where}\n")
    monkeypatch.syspath_prepend(site)
    monkeypatch.setenv("PYTHONPATH", str(site), prepend=":")
    monkeypatch.setenv("PERFED_DEVICES", "1")
    return site


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(RUN)
    return path


def done(*arguments: object) -> str:
    """What a command prints that ends well."""
    ended = perfed(*arguments)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def accuracy(folder: Path, kind: str) -> float:
    summary = json.loads((folder / "summary.json").read_text())
    return float(summary["history"][-1][kind]["accuracy"]["mean"])


def test_the_page_passes_the_linters(tmp_path: Path) -> None:
    file = tmp_path / "mr_mtl.py"
    file.write_text(page_method())
    rules = ["--config", str(ROOT / "pyproject.toml"), "--no-cache"]
    for command in (["check"], ["format", "--check"]):
        ruff = [sys.executable, "-m", "ruff", *command, *rules, str(file)]
        ended = subprocess.run(ruff, capture_output=True, text=True, check=False)
        assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.mark.slow
def test_the_page_passes_the_type_checker(tmp_path: Path) -> None:
    file = tmp_path / "mr_mtl.py"
    file.write_text(page_method())
    mypy = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), str(file)]
    ended = subprocess.run(mypy, capture_output=True, text=True, check=False, cwd=ROOT)
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.mark.usefixtures("package")
@pytest.mark.slow
def test_run_resume_report_adapt_and_predict(tmp_path: Path, config: Path) -> None:
    """A run that is interrupted and resumed ends where one ends that was not."""
    done("run", config, "--out", tmp_path / "run")
    assert accuracy(tmp_path / "run", "personalized") > accuracy(tmp_path / "run", "global") > 0.2

    def interrupt(progress: object) -> None:
        if getattr(progress, "round") >= 3:  # noqa: B009
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Recording.begin(Config.load(config), tmp_path / "again").train(interrupt)
    done("resume", tmp_path / "again")
    for kind in ("personalized", "global"):
        assert accuracy(tmp_path / "again", kind) == accuracy(tmp_path / "run", kind)

    done("report", tmp_path / "run", "--out", tmp_path / "page.html")
    assert "mr-mtl" in (tmp_path / "page.html").read_text()

    client = load("digits", clients=4, split="iid").train.client(0)
    np.savez(tmp_path / "new.npz", x=client[0], y=client[1])
    own = tmp_path / "own.safetensors"
    assert "accuracy" in done(
        "adapt", tmp_path / "run", "--data", tmp_path / "new.npz", "--out", own
    )
    predictions = done("predict", own, "--data", tmp_path / "new.npz").split()[1:]
    assert np.mean(np.array(predictions) == client[1].astype(str)) > 0.3


@pytest.mark.slow
@pytest.mark.usefixtures("package")
def test_sweep(tmp_path: Path, config: Path) -> None:
    grid = ["--grid", "method.lam=0.01,1.0", "--seeds", 2]
    printed = done("sweep", config, *grid, "--out", tmp_path / "sweep")
    points = {f"mr-mtl, method.lam={lam}" for lam in (0.01, 1.0)}
    assert all(point in printed for point in points)
    assert len(list((tmp_path / "sweep" / "validation").iterdir())) == 2
    assert len(list((tmp_path / "sweep" / "test").iterdir())) == 1


@pytest.mark.slow
@pytest.mark.usefixtures("package")
def test_diagnose_and_advise(tmp_path: Path, config: Path) -> None:
    printed = done("diagnose", config)
    assert "do not cover mr-mtl: there is no bound" in " ".join(printed.split())
    advised = tmp_path / "advised.toml"
    done("advise", config, "--out", advised)
    assert Config.load(advised).method_name == "mr-mtl"


@pytest.mark.slow
@pytest.mark.usefixtures("package")
def test_federate(tmp_path: Path, config: Path) -> None:
    out = tmp_path / "federated"
    done("federate", config, "--out", out)
    assert accuracy(out, "personalized") > 0.2
