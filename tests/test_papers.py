"""The papers' tables and figures: the files, what is made of runs, and the quick versions."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from perfed import Config, ConfigError
from perfed.papers import Reproduction, Results, check_folder, names, reproduce
from perfed.papers.reproduction import Printed
from perfed.report import reproduced
from real_data import REAL, needs_real_data
from test_cli import perfed


def quiet(*_: object) -> None:
    return None


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("name", names())
def test_every_file_is_sound(name: str, quick: bool, tmp_path: Path) -> None:
    """Every run's configuration is valid, every printed number and claim belongs to something."""
    what = Reproduction.read(name, quick)
    entries = what.entries(2, tmp_path)
    assert len({entry.folder for entry in entries}) == len(entries)
    assert len({entry.name for entry in entries}) == len(entries)
    rows = {row.name: {column.name for column in row.columns} for row in what.rows}
    everywhere = {row.name for row in Reproduction.read(name).rows}
    for row in what.rows:
        for column in row.columns:
            assert set(column.printed) <= everywhere
    for claim in what.claims:
        for row_name in [claim.row] if claim.row else rows:
            assert {claim.ahead, *claim.of} <= rows[row_name]
    assert ("quick" in what.title) == quick
    assert what.choices
    assert sum(protocol.printed for protocol in what.protocols) == 1


def test_the_printed_numbers() -> None:
    """Digits of the papers, one of each table's corners."""
    table = Reproduction.read("per-fedavg-table1")
    printed = {column.name: column.printed for column in table.rows[0].columns}
    assert printed["FedAvg + update"]["MNIST, tau = 10, alpha = 0.01"] == Printed(75.96, 0.02)
    last = "CIFAR-10, tau = 4, alpha = 0.01, diff. hetero."
    assert printed["Per-FedAvg (HF)"][last] == Printed(71.25, 0.05)
    assert printed["Per-FedAvg (exact)"] == {}
    assert sum(map(len, printed.values())) == 18
    other = Reproduction.read("pfedme-table1")
    cells = {column.name: column.printed for column in other.rows[0].columns}
    assert cells["pFedMe PM"]["Synthetic, DNN"] == Printed(86.36, 0.15)
    assert cells["FedAvg"]["MNIST, MLR"] == Printed(93.96, 0.02)
    assert sum(map(len, cells.values())) == 16
    assert [len(Reproduction.read("fedpaq-figure1").rows)] == [8]


TABLE: dict[str, Any] = {
    "title": "A table",
    "paper": "Somebody",
    "choices": "None.",
    "score": ["accuracy"],
    "base": {
        "rounds": 2,
        "cohort": 2,
        "eval_every": 1,
        "data": {"source": "digits", "clients": 4},
        "model": {"name": "mlr"},
        "method": {"batch": 5},
    },
    "quick": {"says": "small", "settings": ["rounds=1"]},
    "protocol": [
        {"name": "theirs", "adapt_on": "test", "printed": True},
        {"name": "best", "take": "best"},
    ],
    "row": [{"name": "one"}],
    "method": [
        {"name": "A", "settings": ["method.name=fedavg", "method.lr=0.5"]},
        {"name": "B", "settings": ["method.name=fedavg", "method.lr=0.001"]},
    ],
    "column": [
        {"name": "A", "method": "A", "printed": {"one": [80.0, 1.0]}},
        {"name": "B", "method": "B", "printed": {"one": [70.0, 1.0]}},
        {"name": "B, global", "method": "B", "kind": "global"},
    ],
    "claim": [{"text": "A is best", "ahead": "A", "of": ["B"]}],
}


def written(what: Reproduction, folder: Path, method: str, seed: int, scores: list[float]) -> None:
    """A run's summary, as if it had been run."""
    place = what.place(folder, "one", method, seed)
    place.mkdir(parents=True)

    def of(value: float) -> dict[str, Any]:
        return {"accuracy": {"mean": value}, "loss": {"mean": 1 - value}}

    history = [
        {
            "round": 10 * i,
            "uplink_bytes": 1000 * i,
            "global": of(s / 2),
            "personalized": of(s),
        }
        for i, s in enumerate(scores)
    ]
    last = {"global": of(scores[-1] / 2), "personalized": of(scores[-1])}
    summary = last | {"history": history, "config": {"adapt_on": "train"}}
    (place / "summary.json").write_text(json.dumps(summary))
    other = {"global": of(scores[-1] / 2), "personalized": of(scores[-1] + 0.01)}
    (place / "adapted-on-test.json").write_text(json.dumps(other))


def test_cells_orders_and_claims(tmp_path: Path) -> None:
    what = Reproduction.of("t", TABLE, quick=False)
    for seed, (a, b) in enumerate(
        [([0.1, 0.8, 0.7], [0.1, 0.5, 0.6]), ([0.1, 0.9, 0.9], [0.2] * 3)]
    ):
        written(what, tmp_path, "A", seed, a)
        written(what, tmp_path, "B", seed, b)
    results = Results(what, 2, tmp_path, {})
    row = what.rows[0]
    theirs, best = what.protocols
    first, _, common = row.columns
    cell = results.cell(row, first, theirs)
    assert cell.mean == pytest.approx(81.0)  # as adapted on test data
    assert cell.half == pytest.approx(12.706 * 10.0, rel=1e-3)  # t of one degree of freedom
    assert cell.printed == Printed(80.0, 1.0)
    assert results.cell(row, first, best).mean == pytest.approx(85.0)
    assert results.cell(row, first, best).printed is None
    assert results.cell(row, common, best).mean == pytest.approx(20.0)
    assert results.order(row, theirs) == (1, 1, [])
    (judged,) = results.judged()
    assert judged.holds
    text = reproduced.markdown(results, "figure.png")
    assert "80.00 / 81.00 ± " in text
    assert "| yes |" in text
    assert "holds: A is best" in text
    turned = Reproduction.of(
        "t", TABLE | {"claim": [{"text": "B is best", "ahead": "B", "of": ["A"]}]}, quick=False
    )
    assert not Results(turned, 2, tmp_path, {}).judged()[0].holds
    swapped = [dict(c) for c in TABLE["column"]]
    swapped[0]["printed"], swapped[1]["printed"] = {"one": [60.0, 1.0]}, {"one": [61.9, 1.0]}
    near = Reproduction.of("t", TABLE | {"column": swapped}, quick=False)
    assert Results(near, 2, tmp_path, {}).order(row=near.rows[0], protocol=theirs)[0] == 0
    swapped[1]["printed"] = {"one": [70.0, 1.0]}
    wrong = Reproduction.of("t", TABLE | {"column": swapped}, quick=False)
    assert Results(wrong, 2, tmp_path, {}).order(wrong.rows[0], theirs) == (
        1, 0, ["B is not above A"],
    )  # fmt: skip


def test_curves_are_compared_when_the_first_ends(tmp_path: Path) -> None:
    """Against bytes, a curve that is ahead at the end may have paid more for it."""
    figure = TABLE | {"x": "uplink_bytes", "protocol": [{"name": "", "printed": True}]}
    what = Reproduction.of("t", figure, quick=False)
    written(what, tmp_path, "A", 0, [0.1, 0.5, 0.9])
    written(what, tmp_path, "B", 0, [0.1, 0.6])  # ends after half of the bytes
    results = Results(what, 1, tmp_path, {})
    (judged,) = results.judged()
    assert not judged.holds
    assert judged.detail == "one: -10 over B at uplink_bytes 1000"
    curve = results.curve(what.rows[0], what.rows[0].columns[0], "accuracy")
    assert curve is not None
    np.testing.assert_allclose(curve.x, [0, 1000, 2000])
    np.testing.assert_allclose(curve.mean, [10, 50, 90])
    written_files = reproduced.draw(results, tmp_path / "figure")
    assert [path.name for path in written_files] == ["figure.png", "figure.svg"]
    assert all(path.stat().st_size > 5000 for path in written_files)


def test_a_reproduction_runs_scores_and_goes_on(tmp_path: Path) -> None:
    what = Reproduction.of("t", TABLE, quick=False)
    check_folder(tmp_path, what, 2)
    results = reproduce(what, 2, tmp_path, quiet, quiet)
    assert results.failures == {}
    row, (theirs, best) = what.rows[0], what.protocols
    for seed in range(2):
        values = row.runs["A"] | {"seed": seed, "adapt_on": "test"}
        config = Config.checked(values)
        adapted = config.run(config.build()).scores["personalized"].accuracy.mean()
        found = results.values(row, row.columns[0], theirs)
        assert found is not None
        assert found[seed] == pytest.approx(100 * adapted, abs=1e-4)
    both = [results.cell(row, row.columns[0], protocol).mean for protocol in (theirs, best)]
    assert both[0] != both[1]  # the step on test data is another one
    stamp = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.json")}
    again = reproduce(what, 2, tmp_path, quiet, quiet)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.json")} == stamp
    assert again.cell(row, row.columns[0], theirs).mean == both[0]
    with pytest.raises(ConfigError, match="holds another reproduction"):
        check_folder(tmp_path, Reproduction.of("t", TABLE, quick=True), 2)
    check_folder(tmp_path, what, 3)  # more seeds of the same


def test_a_failed_run_is_shown(tmp_path: Path) -> None:
    methods = [
        TABLE["method"][0],
        {"name": "B", "settings": ["method.name=fedavg", "method.lr=1e38"]},
    ]
    what = Reproduction.of("t", TABLE | {"method": methods}, quick=False)
    results = reproduce(what, 1, tmp_path, quiet, quiet)
    assert "diverged" in results.failures["one: B (seed 0)"]
    text = reproduced.markdown(results, None)
    assert "70.00 / failed" in text
    assert "## Failed runs" in text
    assert not results.judged()[0].holds


def test_from_the_command_line(tmp_path: Path) -> None:
    listed = perfed("reproduce", "--list")
    assert listed.returncode == 0
    for name in names():
        assert name in listed.stdout
    alone = {"PERFED_DATA": "", "PERFED_DATA_CACHE": str(tmp_path), "PERFED_MIRROR": str(tmp_path)}
    missing = perfed("reproduce", "fedpaq-figure1", "--out", tmp_path / "out", **alone)
    assert missing.returncode == 2
    assert "mnist" in missing.stderr.lower()
    assert missing.stderr.count("PERFED_DATA") < 5  # once, not for every run
    assert not (tmp_path / "out" / "runs").exists()
    wrong = perfed("reproduce", "pfedme-table2")
    assert wrong.returncode == 2
    assert "pfedme-table1" in wrong.stderr


def run_quickly(name: str, folder: Path) -> Results:
    what = Reproduction.read(name, quick=True)
    results = reproduce(what, what.seeds, folder, quiet, quiet)
    assert results.failures == {}
    return results


def claims_hold(name: str, folder: Path) -> Results:
    results = run_quickly(name, folder)
    for judged in results.judged():
        assert judged.holds, judged
    return results


@pytest.mark.slow
def test_quick_pfedme_table(tmp_path: Path) -> None:
    """PM is ahead of GM, Per-FedAvg and FedAvg on both Synthetic problems; with the report."""
    done = perfed("reproduce", "pfedme-table1", "--quick", "--out", tmp_path / "out", COLUMNS="150")
    assert done.returncode == 0, done.stderr
    assert "does not hold" not in done.stdout
    assert "holds: pFedMe's personal model is the best performer" in done.stdout
    files = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"results.md", "figure.png", "figure.svg", "report-Synthetic__MLR.html"} <= files


@pytest.mark.slow
def test_quick_pfedme_figure(tmp_path: Path) -> None:
    claims_hold("pfedme-figure4", tmp_path)


@pytest.mark.slow
@needs_real_data
def test_quick_per_fedavg_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """HF above FedAvg + update and above FO; exact is as HF."""
    monkeypatch.setenv("PERFED_DATA", str(REAL))
    results = claims_hold("per-fedavg-table1", tmp_path)
    for row in results.what.rows:
        for protocol in results.what.protocols:
            cells = {c.name: results.cell(row, c, protocol).mean for c in row.columns}
            assert cells["Per-FedAvg (exact)"] == pytest.approx(cells["Per-FedAvg (HF)"], abs=0.3)


@pytest.mark.slow
@needs_real_data
def test_quick_per_fedavg_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERFED_DATA", str(REAL))
    claims_hold("per-fedavg-figure1", tmp_path)


@pytest.mark.slow
@needs_real_data
def test_quick_fedpaq_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERFED_DATA", str(REAL))
    results = run_quickly("fedpaq-figure1", tmp_path)
    levels, methods = results.what.rows
    ends = {
        row.name: {c.name: results.curve(row, c, "train_loss") for c in row.columns}
        for row in (levels, methods)
    }

    def at_equal_time(row: str, one: str, other: str) -> tuple[float, float]:
        first, second = ends[row][one], ends[row][other]
        assert first is not None
        assert second is not None
        time = min(first.x[-1], second.x[-1])
        return tuple(float(np.interp(time, c.x, c.mean)) for c in (first, second))  # type: ignore[return-value]

    fast, slow = at_equal_time(levels.name, "s = 1", "not quantised (FedAvg)")
    assert fast < slow / 2
    for other in ("FedAvg", "QSGD"):
        ahead, behind = at_equal_time(methods.name, "FedPAQ", other)
        assert ahead < behind


def test_dashes_tell_kin_apart_and_nobody_else() -> None:
    """s = 1 is no kin of s = 10; a method's global model is dashed, its codecs differ."""
    levels = Reproduction.read("fedpaq-figure1").rows[0].columns
    styles = [reproduced._style(column, levels) for column in levels]
    assert {style["linestyle"] for style in styles} == {"-"}
    assert len({style["color"] for style in styles}) == len(levels)
    kinds = Reproduction.read("pfedme-figure1").rows[0].columns
    assert [reproduced._style(c, kinds)["linestyle"] for c in kinds[:2]] == ["--", "-"]
    codecs = Reproduction.read("beyond").rows[0].columns
    assert len({str(reproduced._style(c, codecs)) for c in codecs}) == len(codecs)
