"""The command, as a process of its own."""

import contextlib
import fcntl
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from perfed.cli.app import app
from test_config import SMALL


def perfed(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "perfed", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | environment,
    )


def here(*arguments: object) -> Result:
    """The command in this process: it takes seconds to start one of its own."""
    return CliRunner().invoke(app, [str(word) for word in arguments], env={"COLUMNS": "1000"})


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text("rounds = 7\neval_every = 3\n" + SMALL)
    return path


def test_run_writes_a_summary(config: Path, tmp_path: Path) -> None:
    out = tmp_path / "new" / "folder"
    done = perfed("run", config, "--set", "method.lr=0.3", "--seed", 3, "--out", out)
    assert done.returncode == 0, done.stderr
    assert "personalized" in done.stdout
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["method"], summary["rounds"], summary["seed"]) == ("fedavg", 7, 3)
    assert summary["seconds"] > 0
    assert summary["config"]["method"]["lr"] == 0.3
    assert [point["round"] for point in summary["history"]] == [0, 3, 6, 7]
    for kind in ("global", "personalized"):
        for name in ("accuracy", "loss"):
            values = summary[kind][name]
            assert set(values) == {"mean", "weighted", "worst", "p10", "p50", "p90", "clients"}
            assert len(values["clients"]) == 10
            assert values["mean"] == pytest.approx(sum(values["clients"]) / 10)
    assert sorted(os.listdir(out)) == [
        "clients.safetensors",
        "config.json",
        "data.safetensors",
        "environment.json",
        "metrics.parquet",
        "model.safetensors",
        "report.html",
        "summary.json",
    ]


def test_results_are_not_overwritten_unless_asked(config: Path, tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text("precious")
    refused = here("run", config, "--out", tmp_path)
    assert refused.exit_code == 2
    assert "holds results already" in refused.stderr
    assert (tmp_path / "summary.json").read_text() == "precious"
    allowed = here("run", config, "--out", tmp_path, "--overwrite")
    assert allowed.exit_code == 0
    assert json.loads((tmp_path / "summary.json").read_text())["rounds"] == 7


def test_a_config_error_exits_2_and_writes_nothing(config: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = perfed("run", config, "--set", "method.lr=-1", "--set", "model.hidden=[3]", "--out", out)
    assert done.returncode == 2
    assert "method.lr = -1.0: must be a number greater than 0" in done.stderr
    assert "Traceback" not in done.stderr
    assert not out.exists()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["cohort=99"], "cohort = 99: must be between 1 and the number of clients, 10"),
        (["data.clients=7"], "data.clients = 7: must be even"),
        (["data.seed=-1"], "data.seed = -1: must be between"),
        (
            ["engine.name=sequential", "engine.chunk=2"],
            "engine.chunk = 2: is for the other engines",
        ),
    ],
)
def test_a_late_fault_writes_nothing_either(
    config: Path, tmp_path: Path, settings: list[str], message: str
) -> None:
    out = tmp_path / "out"
    arguments = [part for setting in settings for part in ("--set", setting)]
    done = here("run", config, *arguments, "--out", out)
    assert done.exit_code == 2
    assert message in done.stderr
    assert not out.exists()


def test_a_folder_that_cannot_be_written_is_refused_before_the_run(
    config: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "full" / "summary.json").mkdir(parents=True)
    for out, flag in ((tmp_path / "file", []), ("/proc", []), (tmp_path / "full", ["--overwrite"])):
        done = here("run", config, "--set", "rounds=99999999", "--out", out, *flag)
        assert done.exit_code == 2
        assert "cannot write there" in done.stderr
    assert os.listdir(tmp_path / "full") == ["summary.json"]


def test_a_number_of_devices_that_is_none(config: Path) -> None:
    done = perfed("run", config, PERFED_DEVICES="many")
    assert done.returncode == 2
    assert "PERFED_DEVICES = 'many': must be a whole number" in done.stderr


def test_divergence_is_an_error_with_a_name(config: Path, tmp_path: Path) -> None:
    done = perfed(
        "run", config, "--set", "method.lr=1e30", "--set", "method.alpha=0.1", "--out", tmp_path
    )
    assert done.returncode == 1
    assert "fedavg diverged: the update of client" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "summary.json").exists()


@pytest.mark.slow
def test_the_number_of_devices_does_not_change_the_result(config: Path, tmp_path: Path) -> None:
    losses: list[Any] = []
    for devices in ("1", "2"):
        out = tmp_path / devices
        done = perfed("run", config, "--out", out, PERFED_DEVICES=devices)
        assert done.returncode == 0, done.stderr
        losses.append(json.loads((out / "summary.json").read_text())["global"]["loss"]["clients"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.slow
def test_the_built_in_comparison(tmp_path: Path) -> None:
    settings = ["rounds=2", "eval_every=2", "data.clients=4", "cohort=2", "model.hidden=[4]"]
    arguments = [part for setting in settings for part in ("--set", setting)]
    done = perfed("run", *arguments, "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    for label in (
        "FedAvg",
        "FedAvg + update",
        "Per-FedAvg (FO)",
        "Per-FedAvg (HF)",
        "Per-FedAvg (exact)",
        "pFedMe",
        "Local",
    ):
        assert label in done.stdout
    runs = json.loads((tmp_path / "summary.json").read_text())["runs"]
    assert [run["method"] for run in runs] == ["fedavg", *["per-fedavg"] * 3, "pfedme", "local"]


def test_progress_in_a_terminal_and_ctrl_c(config: Path) -> None:
    """In a real terminal: the bar shows round, loss and pace; Ctrl-C ends it in a line."""
    terminal, inside = pty.openpty()
    fcntl.ioctl(inside, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 120, 0, 0))
    # Tests started in the background have interrupts ignored, and children inherit that.
    listening = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    process = subprocess.Popen(
        [
            sys.executable,
            "-c",
            f"{listening}; from perfed.cli import main; main()",
            "run",
            str(config),
            "--set",
            "rounds=99999999",
        ],
        stdin=inside,
        stdout=inside,
        stderr=inside,
        env=os.environ | {"TERM": "xterm"},
        start_new_session=True,
    )
    os.close(inside)
    shown = ""
    try:
        while "rounds/s" not in shown:
            shown += os.read(terminal, 4096).decode(errors="replace")
        assert re.search(r"round +\d+/99999999", shown)
        assert re.search(r"loss \d\.\d+", shown)
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(OSError):  # the terminal closes with the process
            while part := os.read(terminal, 4096).decode(errors="replace"):
                shown += part
        assert process.wait(timeout=60) == 130
    finally:
        process.kill()
    assert "nothing was written" in shown
    assert "interrupted" in shown
    assert "Traceback" not in shown


def test_version_and_help() -> None:
    assert perfed("--version").stdout.startswith("perfed 0.")
    shown = perfed("run", "--help").stdout
    for word in ("CONFIG", "--set", "--seed", "--out"):
        assert word in shown
