"""Who is worse off, than with the global model and than alone: counts, summaries, reports."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from perfed import MLR, ConfigError, FedAvg, Federation, Local, simulate
from perfed.cli.app import app
from perfed.evaluation import Scores, by_name, gain_over
from perfed.federation.protocol.config_checks import check_config
from perfed.report.groups import grouped, worse_count
from perfed.report.page import report_page
from perfed.report.paper import latex_table, markdown_table
from perfed.report.tables import comparison_table, worse_off_lines
from perfed.runs.comparison import ComparisonRow
from perfed.runs.config import Config
from perfed.runs.local_run import read_local_run
from perfed.runs.run_dir import RecordedRun, read_run
from perfed.runs.summary import LocalRun, summarize, summary_bytes, with_local_run
from perfed.runs.sweep import Sweep, grid_points
from test_report import Opened, body, browser, in_browser, methods, opened, recorded

# Per client: a gain, a loss of a point, a loss of less, a tie by rounding, a tie, no score.
OWN = np.array([0.7, 0.48, 0.495, 0.5 - 5e-7, 0.5, np.nan])
OTHER = np.full(6, 0.5)

CONFIG = """
rounds = 2
cohort = 4
[data]
source = "digits"
split = "shards"
clients = 4
[model]
name = "linear"
[method]
"""
LOCAL = 'name = "local"\nlr = 0.05\ntau = 3\nbatch = 10\n'
FEDAVG = 'name = "fedavg"\nlr = 0.05\ntau = 3\nbatch = 10\n'


def test_ties_and_clients_without_a_score_are_not_worse() -> None:
    gain = gain_over(OWN, OTHER, "accuracy")
    assert (gain.better, gain.worse, gain.much_worse, gain.defined) == (1, 2, 1, 5)
    assert gain.share_worse == 0.4
    assert worse_count(gain, "accuracy") == "2 of 5 clients (40 %), 1 by more than 1 point"
    assert worse_count(gain, "r2") == "2 of 5 clients (40 %), 1 by more than 0.01"
    none = gain_over(OTHER, OTHER, "accuracy")
    assert worse_count(none, "accuracy") == "0 of 6 clients"
    unknown = gain_over(OWN[-1:], OTHER[-1:], "accuracy")
    assert worse_count(unknown, "accuracy") == "no client has both scores"
    assert np.isnan(unknown.share_worse)


def test_of_errors_more_is_worse() -> None:
    gain = gain_over(OWN, OTHER, "loss")
    assert (gain.better, gain.worse, gain.much_worse, gain.defined) == (2, 1, 1, 5)


def test_clients_are_matched_by_name() -> None:
    found = by_name([0.1, None, 0.3], ["a", "b", "c"], ["c", "d", "b", "a"])
    np.testing.assert_array_equal(found, [0.3, np.nan, np.nan, 0.1])


@pytest.fixture(scope="module")
def federation() -> Federation:
    rng = np.random.default_rng(0)
    parts = [(rng.normal(size=(30, 3)).astype(np.float32), rng.integers(0, 2, 30)) for _ in "abcd"]
    return Federation.from_arrays(parts, parts, names=list("abcd"))


def test_the_summary_counts_those_worse_off(federation: Federation) -> None:
    result = simulate(federation, MLR(3, 2), FedAvg(alpha=5.0), rounds=1, cohort=2)
    summary = summarize(result)
    own, common = (result.scores[kind].accuracy for kind in ("personalized", "global"))
    gain = gain_over(own, common, "accuracy")
    assert summary["worse_off"] == {
        "score": "accuracy",
        "than_global": {
            "worse": gain.worse,
            "much_worse": gain.much_worse,
            "better": gain.better,
            "defined": 4,
            "share": gain.worse / 4,
        },
        "than_local": None,
    }
    line = f"worse off than with the global model: {worse_count(gain, 'accuracy')}"
    assert worse_off_lines(result, None) == [line]
    # Alone, two clients are much better, one is as good, and of one nothing is known.
    local = LocalRun("alone", ("b", "a", "c"), {"accuracy": [own[1], own[0] + 0.2, own[2] + 0.2]})
    compared = with_local_run(summary, local)["worse_off"]
    assert compared["than_global"] == summary["worse_off"]["than_global"]
    counts = {k: compared["than_local"][k] for k in ("worse", "much_worse", "defined", "share")}
    assert counts == {"worse": 2, "much_worse": 2, "defined": 3, "share": 2 / 3}
    assert compared["than_local"]["run"] == "alone"
    text = "worse off than alone: 2 of 3 clients (67 %), 2 by more than 1 point"
    assert worse_off_lines(result, local)[1] == text
    assert json.loads(summary_bytes(compared))["than_local"]["scores"][3] is None


def test_without_a_global_model_there_is_nothing_to_be_worse_than(federation: Federation) -> None:
    result = simulate(federation, MLR(3, 2), Local(), rounds=1, cohort=4)
    assert summarize(result)["worse_off"]["than_global"] is None
    assert worse_off_lines(result, None) == []


def last(run: RecordedRun, kind: str, values: Any) -> RecordedRun:
    run.scores[kind]["accuracy"][-1] = values
    return run


def pair(**settings: Any) -> list[RecordedRun]:
    """pFedMe and Local with known last scores."""
    own = last(recorded("pfedme", clients=6, **settings), "personalized", OWN)
    last(own, "global", [0.8, 0.4, 0.4, 0.5, 0.4, 0.4])
    local = recorded("local", clients=6, has_global=False, **settings)
    return [own, last(local, "personalized", OTHER)]


def section(runs: list[RecordedRun]) -> str:
    page = body(report_page(runs, "x"))
    return page.split('<section id="worse-off"')[1].split("</section>")[0]


def test_a_report_with_a_local_run_tells_who_is_worse_off() -> None:
    runs = pair()
    groups = grouped(runs)
    alone = groups[0].gain_over_alone(groups)
    assert alone is not None
    assert (alone.worse, alone.much_worse, alone.defined) == (2, 1, 5)
    assert groups[1].gain_over_alone(groups) is None
    shown = section(runs)
    # Of the global model: one of five loses by more than a point; alone: two, one by more.
    assert "1 of 5 (20\N{NO-BREAK SPACE}%)</td><td>1</td>" in shown
    assert "2 of 5 (40\N{NO-BREAK SPACE}%)</td><td>1</td>" in shown
    assert "trained on its own data only, by local." in shown
    assert "not known" not in shown
    assert "0.000001 is a tie" in shown
    for table in (markdown_table(runs), latex_table(runs).replace(r"\%", "%")):
        assert "Worse off than with the global model: pfedme: 1 of 5 clients (20 %)" in table
        assert "Worse off than alone: pfedme: 2 of 5 clients (40 %)" in table


def test_a_report_without_one_says_how_to_get_one() -> None:
    shown = section(methods())
    assert "Worse than alone" not in shown
    assert "is not known: there is no run of Local on the same data" in shown
    assert "output.local" in shown
    assert "A client&#x27;s score is its mean over seeds" in shown
    assert "than alone" not in markdown_table(methods())
    personal = section([recorded("fedrep", has_global=False)])
    assert "is not known" in personal
    assert "<table" not in personal
    assert 'id="worse-off"' not in body(report_page([pair()[1]], "x"))


def test_a_local_run_on_other_data_is_not_compared_with() -> None:
    own, local = pair()
    local = replace(local, environment=local.environment | {"data_sha256": "cd" * 32})
    assert grouped([own, local])[0].alone(grouped([own, local])) is None
    assert "is not known: there is no run of Local" in section([own, local])


def test_of_several_local_runs_the_best_is_compared_with() -> None:
    runs = pair()
    poor = last(recorded("local", clients=6, has_global=False, lr=9.0), "personalized", OTHER / 2)
    groups = grouped([*runs, poor])
    alone = groups[0].alone(groups)
    assert alone is not None
    assert alone.clients.tolist() == OTHER.tolist()
    assert "of the best mean" in section([*runs, poor])


def test_those_of_other_data_are_named() -> None:
    other = recorded("fedavg", clients=6)
    other = replace(other, environment=other.environment | {"data_sha256": "cd" * 32})
    assert "is not known for fedavg: there is no run" in section([*pair(), other])


def test_scores_are_means_over_seeds() -> None:
    runs = [run for seed in (0, 1) for run in pair(seed=seed)]
    last(runs[2], "personalized", OWN + 0.1)  # with the other seed the first loss is made up for
    groups = grouped(runs)
    gain = groups[0].gain_over_alone(groups)
    assert gain is not None
    assert (gain.worse, gain.defined) == (0, 5)


__all__ = ["browser", "opened"]  # fixtures


@in_browser
@pytest.mark.parametrize("width", [1300, 390])
def test_a_browser_shows_it(opened: Opened, width: int) -> None:
    page = opened(report_page(pair(), "x"), width)
    section = page.locator("#worse-off")
    assert section.locator("tbody tr").count() == 1
    assert section.locator("tbody td").all_inner_texts() == [
        "1 of 5 (20\N{NO-BREAK SPACE}%)",
        "1",
        "2 of 5 (40\N{NO-BREAK SPACE}%)",
        "1",
    ]
    assert page.locator('nav a[href="#worse-off"]').is_visible()
    assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0


def test_the_table_of_the_comparison_fits_a_terminal() -> None:
    def row(label: str, values: Any) -> ComparisonRow:
        scores = {"accuracy": np.array(values), "loss": np.ones(4)}
        return ComparisonRow(label, Scores(scores, np.ones(4, int)), 1.0)

    rows = [
        row("FedAvg", [0.5, 0.5, 0.5, 0.5]),
        row("Per-FedAvg (exact)", [0.4, 0.6, 0.5, 0.7]),
        row("Local", [0.6, 0.4, 0.6, 0.8]),
    ]
    console = Console(width=80, record=True)
    console.print(comparison_table(rows))
    lines = console.export_text().splitlines()
    assert "\N{HORIZONTAL ELLIPSIS}" not in "".join(lines)
    (line,) = (line for line in lines if "exact" in line)
    # Against FedAvg one of four has a worse accuracy; against Local three.
    assert line.split()[-3:] == ["1/4", "3/4", "1.0"]


def write(folder: Path, method: str, name: str = "config.toml") -> Path:
    path = folder / name
    path.write_text(CONFIG + method)
    return path


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments))


def test_a_run_that_names_a_local_run_is_compared_with_it(tmp_path: Path) -> None:
    local, own, plain = (str(tmp_path / name) for name in ("local", "own", "plain"))
    config = str(write(tmp_path, FEDAVG))
    assert invoke("run", str(write(tmp_path, LOCAL, "l.toml")), "--out", local).exit_code == 0
    done = invoke("run", config, "--out", own, "--set", f"output.local={local}")
    assert done.exit_code == 0, done.output
    summary = json.loads(Path(own, "summary.json").read_text())
    gain = gain_over(
        np.array(summary["personalized"]["accuracy"]["clients"]),
        np.array(read_local_run(local).scores["accuracy"]),
        "accuracy",
    )
    counts = summary["worse_off"]["than_local"]
    assert (counts["worse"], counts["defined"], counts["run"]) == (gain.worse, 4, local)
    assert f"worse off than alone: {worse_count(gain, 'accuracy')}" in done.output
    # Its own report has the comparison too, without the other folder.
    assert f"by {local}." in section([read_run(Path(own))])
    # Runs that differ in their seed and in this are one group.
    other = invoke("run", config, "--out", plain, "--set", "seed=1")
    assert "than alone" not in other.output
    (group,) = grouped([read_run(Path(own)), read_run(Path(plain))])
    assert (group.seeds, group.label) == (2, "fedavg")
    for setting, message in (
        (f"output.local={plain}", "is a run of fedavg"),
        (f"output.local={tmp_path / 'none'}", "must be the folder of a finished run"),
    ):
        done = invoke("run", config, "--out", str(tmp_path / "no"), "--set", setting)
        assert done.exit_code == 2
        assert message in done.output
    done = invoke("run", config, "--set", f"output.local={local}", "--set", "data.seed=1")
    assert (done.exit_code, "is a run on other data" in done.output) == (2, True)


def test_a_sweep_compares_with_its_own_local_runs(tmp_path: Path) -> None:
    base = write(tmp_path, FEDAVG)
    files = []
    for name, method in (("fedavg", FEDAVG), ("alone", LOCAL)):
        files.append(tmp_path / f"{name}.toml")
        files[-1].write_text(f"[method]\n{method}")
    sweep = Sweep(tuple(grid_points(base, files, [])), 2, tmp_path / "sweep")
    sweep.run(lambda *_: None, lambda _: None)
    for seed in (0, 1):
        folders = [
            tmp_path / "sweep" / "test" / name / f"seed-{seed}" for name in ("fedavg", "alone")
        ]
        own, alone = (json.loads((folder / "summary.json").read_text()) for folder in folders)
        counts = own["worse_off"]["than_local"]
        assert counts["scores"] == alone["personalized"]["accuracy"]["clients"]
        assert counts["defined"] == 4
        assert alone["worse_off"]["than_local"] is None
    with pytest.raises(ConfigError, match=r"output\.local: a sweep compares with its own"):
        grid_points(base, files, [], ["output.local=x"])


def test_a_federation_has_no_local_run(tmp_path: Path) -> None:
    text = CONFIG.replace('source = "digits"\nsplit = "shards"\nclients = 4', FOLDER)
    path = tmp_path / "config.toml"
    path.write_text(text + FEDAVG)
    with pytest.raises(ConfigError, match=r"output\.local: is for simulations only"):
        check_config(Config.load(path, ["output.local=x"]), 4)


FOLDER = 'source = "folder"\nroot = "."\nlabels = ["0", "1"]'
