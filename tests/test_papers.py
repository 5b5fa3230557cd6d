"""The papers' tables and figures: the files, what is made of runs, and the quick versions."""

import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import problems
from perfed import Config, ConfigError, Experiment, FedAvg, Federation, Sequential
from perfed.core.errors import FieldError
from perfed.core.random import Purpose
from perfed.evaluation import SimulationEvaluator
from perfed.papers import (
    CheckedClaim,
    Reproduction,
    Results,
    check_claims,
    check_folder,
    names,
    reproduce,
)
from perfed.papers.reproduction import Printed
from perfed.papers.two_step import TwoStepPerFedAvg
from perfed.report import reproduced
from real_data import REAL, needs_real_data
from test_cli import perfed

DOCS = Path(__file__).parents[1] / "docs" / "results"


def quiet(*_: object) -> None:
    return None


@pytest.mark.parametrize("name", names())
def test_the_recorded_page_is_of_the_file(name: str) -> None:
    """docs/results/NAME.md has all claims with a verdict, all curves or rows, and the choices."""
    what = Reproduction.read(name)
    page = (DOCS / f"{name}.md").read_text(encoding="utf-8")
    verdicts = re.findall(r"^- (holds|inconclusive|does not hold)( \([a-z]+\))?: ", page, re.M)
    assert len(verdicts) == len(what.claims)
    for claim in what.claims:
        assert f": {claim.text} (" in page
    assert what.choices in page
    assert f"{what.seeds} seed(s)" in page
    for row in what.rows:
        assert page.count(f"| {row.name} |") == (1 if what.x is None else len(row.columns))


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
        assert claim.of
        for row_name in [claim.row] if claim.row else rows:
            assert {claim.ahead, *claim.of} <= rows[row_name]
            assert len(claim.printed.get(row_name, claim.of)) == len(claim.of)
    said = tomllib.loads(files("perfed.papers").joinpath(f"{name}.toml").read_text("utf-8"))
    assert quick or len(what.claims) == len(said.get("claim", []))  # none is of an unknown row
    assert ("quick" in what.title) == quick
    assert what.choices
    assert [protocol.printed for protocol in what.protocols] == [True] + [False] * (
        len(what.protocols) - 1
    )


def printed(what: Reproduction) -> dict[str, list[Printed]]:
    """A table's columns, from top to bottom."""
    return {
        column.name: [column.printed[row.name] for row in what.rows]
        for column in what.rows[0].columns
        if column.printed
    }


def test_the_printed_numbers() -> None:
    """All of the two tables, and the gaps that pFedMe's text says of its figures."""
    assert printed(Reproduction.read("per-fedavg-table1")) == {
        "FedAvg + update": [
            (75.96, 0.02), (60.18, 0.02), (40.49, 0.07), (38.38, 0.07), (35.97, 0.17), (58.59, 0.11)
        ],
        "Per-FedAvg (FO)": [
            (78.00, 0.02), (64.55, 0.02), (46.98, 0.1), (34.04, 0.08), (25.32, 0.18), (37.71, 0.23)
        ],
        "Per-FedAvg (HF)": [
            (79.85, 0.02), (70.94, 0.03), (50.44, 0.15), (43.73, 0.11), (46.32, 0.12), (71.25, 0.05)
        ],
    }  # fmt: skip
    settings = [0, 0, 1, 1, 2, 3]  # MNIST is there with rows as published and with disjoint ones
    of_table = {
        "FedAvg": [(93.96, 0.02), (98.79, 0.03), (77.62, 0.11), (83.64, 0.22)],
        "Per-FedAvg (two steps)": [(94.37, 0.04), (98.90, 0.02), (81.49, 0.09), (85.01, 0.10)],
        "pFedMe GM": [(94.18, 0.06), (99.16, 0.03), (78.65, 0.25), (84.17, 0.35)],
        "pFedMe PM": [(95.62, 0.04), (99.46, 0.01), (83.20, 0.06), (86.36, 0.15)],
    }
    assert printed(Reproduction.read("pfedme-table1")) == {
        name: [column[i] for i in settings] for name, column in of_table.items()
    }
    gaps = {
        "pfedme-figure3": {"MLR": (1.1, 1.3, 1.5), "DNN": (0.9, 0.9, 1.3)},
        "pfedme-figure4": {"MLR": (6.1, 3.8, 5.2), "DNN": (3.9, 0.7, 3.1)},
    }
    for name, expected in gaps.items():
        (claim,) = (c for c in Reproduction.read(name).claims if c.printed)
        assert (claim.ahead, claim.score) == ("pFedMe PM", "accuracy")
        assert claim.of == ("pFedMe GM", "Per-FedAvg", "FedAvg")
        assert claim.printed == expected


def test_the_printed_settings_of_the_tables() -> None:
    """What the captions and texts say of rates, periods and penalties."""
    first = Reproduction.read("per-fedavg-table1")
    of_rows = [(10, 0.01), (4, 0.01), (10, 0.001), (4, 0.001), (4, 0.01), (4, 0.01)]
    for row, (tau, alpha) in zip(first.rows, of_rows, strict=True):
        for values in row.runs.values():
            method, data = values["method"], values["data"]
            assert (method["tau"], method["alpha"], method["batch"]) == (tau, alpha, 40)
            assert method.get("beta", method.get("lr")) == 0.001
            assert (values["rounds"], values["cohort"], data["clients"]) == (1000, 10, 50)
            assert data["a"] == {"mnist": 196, "cifar10": 68}[data["source"]]
    assert [row.runs["Per-FedAvg (HF)"]["data"].get("diff_hetero") for row in first.rows] == [
        *[None] * 5, True,
    ]  # fmt: skip
    second = Reproduction.read("pfedme-table1")
    meta = [(0.03, 0.003), (0.02, 0.001), (0.02, 0.002), (0.01, 0.001)]
    rates: dict[str, Sequence[tuple[float, ...]]] = {
        "FedAvg": [(0.02,), (0.02,), (0.02,), (0.03,)],
        "Per-FedAvg (two steps)": meta,
        "Per-FedAvg (HF)": meta,
        "pFedMe": [(15, 0.01, 2), (30, 0.01, 2), (20, 0.01, 2), (30, 0.01, 2)],
    }
    keys = {"FedAvg": ["lr"], "pFedMe": ["lam", "eta", "beta"]}
    for name, expected in rates.items():
        runs = [row.runs[name] for row in second.rows]
        found = [tuple(run["method"][k] for k in keys.get(name, ["alpha", "beta"])) for run in runs]
        assert found == [expected[i] for i in (0, 0, 1, 1, 2, 3)]
        assert [run["rounds"] for run in runs] == [800] * 4 + [600] * 2
        assert [run["cohort"] for run in runs] == [5] * 4 + [10] * 2
        assert {run["method"]["batch"] for run in runs} == {20}
        published = [run["data"].get("overlap") == "as-published" for run in runs]
        assert published == [True, False, True, False, False, False]
        on_test = {run.get("adapt_on", "train") for run in runs}
        assert on_test == {"test-then-train" if "two steps" in name else "train"}


def test_the_printed_settings_of_fedpaq() -> None:
    """s, r and tau of every curve of Figure 1; all of T = 100 iterations."""
    figure = Reproduction.read("fedpaq-figure1")
    assert (figure.x, len(figure.rows)) == ("simulated_seconds", 8)
    found = []
    for i, row in enumerate(figure.rows):
        curves = []
        for values in row.runs.values():
            codec = values.get("codec", {"name": "float32"})
            assert codec["name"] == ("low-precision" if "levels" in codec else "float32")
            tau = values["method"]["tau"]
            assert values["rounds"] * tau == 100
            assert values["method"]["batch"] == 10
            assert values["network"]["ratio"] == (100 if i < 4 else 1000)
            assert (values["data"]["clients"], values["data"]["examples"]) == (50, 10_000)
            curves.append((codec.get("levels"), values["cohort"], tau))
        found.append(curves)
    periods = [(1, 25, tau) for tau in (1, 2, 5, 10, 20, 50)]
    assert found[0] == [(1, 25, 5), (5, 25, 5), (10, 25, 5), (None, 25, 5)]
    assert {(s, tau) for s, _, tau in found[1]} == {(1, 5)}
    assert found[2] == periods
    assert found[3] == [(1, 50, 2), (None, 50, 2), (1, 50, 1)]
    assert found[4] == [(1, 25, 2), (5, 25, 2), (10, 25, 2), (None, 25, 2)]
    assert {(s, tau) for s, _, tau in found[5]} == {(1, 2)}
    assert found[6] == periods
    assert found[7] == [(1, 20, 10), (None, 20, 10), (1, 50, 1)]


def two_step_experiment(data: Federation) -> Experiment:
    method = TwoStepPerFedAvg(alpha=0.07, beta=0.03, tau=3, batch=4)
    return problems.experiment(method, data, cohort=2, seed=5, weighting="size")


def sgd(rows: Any, w: np.ndarray, rate: float, position: Any) -> np.ndarray:
    """A step on half the mean squared error of some rows, in NumPy."""
    x, y = (part[np.asarray(position)].astype(np.float64) for part in rows)
    return np.asarray(w - rate * x.T @ (x @ w - y) / len(y))


def test_two_step_rounds_by_numpy() -> None:
    """Alpha, then beta from where that led, tau times; then the mean by size."""
    data = problems.federation()
    experiment = two_step_experiment(data)
    engine = Sequential(experiment)
    state = engine.init()
    w = np.asarray(state.params, np.float64)
    for k in range(3):
        models, sizes = [], []
        for i in np.asarray(experiment.sample_cohort(k)).tolist():
            objective, rows = problems.objective(data, i), data.train.client(i)
            keys = jax.random.split(experiment.client_key(Purpose.LOCAL, k, i))
            first, second = (np.asarray(objective.batches(key, 3, 4).position) for key in keys)
            own = w
            for t in range(3):
                own = sgd(rows, own, 0.07, first[t])
                own = sgd(rows, own, 0.03, second[t])
            models.append(own)
            sizes.append(len(rows[1]))
        w = np.average(models, axis=0, weights=sizes)
    np.testing.assert_allclose(engine.advance(state, 3).params, w, atol=1e-5)
    assert experiment.method.gradient_count(9) == 2 * 3 * 4


def test_test_then_train_by_numpy() -> None:
    """From the global w: alpha on a batch of test rows, then beta on one of training rows."""
    data = problems.federation()
    experiment = two_step_experiment(data)
    engine = Sequential(experiment)
    state = engine.advance(engine.init(), 2)
    models = SimulationEvaluator(engine, "test-then-train").personal_models(state)
    for i in range(data.clients):
        keys = jax.random.split(experiment.client_key(Purpose.PERSONALIZE, 2, i))
        w = np.asarray(state.params, np.float64)
        for rows, rate, key in ((data.test, 0.07, keys[0]), (data.train, 0.03, keys[1])):
            objective = problems.objective(replace(data, train=rows), i)
            (chosen,) = np.asarray(objective.batches(key, 1, 4).position)
            w = sgd(rows.client(i), w, rate, chosen)
        np.testing.assert_allclose(models[i], w, atol=1e-5)
    with pytest.raises(FieldError, match="is for the method two-step-per-fedavg, not for fedavg"):
        SimulationEvaluator(
            Sequential(problems.experiment(FedAvg(), data)), "test-then-train"
        ).personal_models(state)


def test_the_two_step_method_is_not_one_of_the_package() -> None:
    """It is known once a paper's file asks for it."""
    code = (
        "from perfed.methods import method_names\n"
        "import perfed.papers as papers\n"
        "papers.Reproduction.read('per-fedavg-table1')\n"
        "print('two-step-per-fedavg' in method_names(), end=' ')\n"
        "papers.Reproduction.read('pfedme-table1')\n"
        "print('two-step-per-fedavg' in method_names())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]


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


def written(
    what: Reproduction,
    folder: Path,
    method: str,
    seed: int,
    scores: Sequence[float],
    *,
    row: str = "one",
    losses: Sequence[float] | None = None,
    x: Sequence[float] | None = None,
) -> None:
    """A run's summary, as if it had been run; every number can be told from the others."""
    place = what.place(folder, row, method, seed)
    place.mkdir(parents=True)
    losses = [1 - s for s in scores] if losses is None else losses

    def of(score: float, loss: float) -> dict[str, Any]:
        return {
            "accuracy": {"mean": score, "weighted": score / 4},
            "loss": {"mean": loss, "weighted": 3 * loss},
        }

    history = [
        {
            "round": 10 * i,
            "uplink_bytes": 1000 * i if x is None else x[i],
            "global": of(score / 2, 5 * loss),
            "personalized": of(score, loss),
        }
        for i, (score, loss) in enumerate(zip(scores, losses, strict=True))
    ]
    last = {kind: history[-1][kind] for kind in ("global", "personalized")}
    summary = last | {"history": history, "config": {"adapt_on": "train"}}
    (place / "summary.json").write_text(json.dumps(summary))
    other = last | {"personalized": of(scores[-1] + 0.01, losses[-1] / 2)}
    (place / "adapted-on-test.json").write_text(json.dumps(other))


CLAIM: dict[str, Any] = {"text": "A is best", "ahead": "A", "of": ["B"]}
PLAIN: dict[str, Any] = TABLE | {"protocol": [{"name": "", "printed": True}]}
FIGURE: dict[str, Any] = PLAIN | {"x": "uplink_bytes"}


def made(values: dict[str, Any], *claims: dict[str, Any]) -> Reproduction:
    return Reproduction.of("t", values | ({"claim": list(claims)} if claims else {}), quick=False)


def judged(
    values: dict[str, Any], folder: Path, seeds: int, *claims: dict[str, Any]
) -> list[CheckedClaim]:
    """What comes of claims, each given by what it has beside `CLAIM`."""
    return check_claims(Results(made(values, *[CLAIM | c for c in claims]), seeds, folder, {}))


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
    (checked,) = check_claims(results)
    assert (checked.verdict, checked.ahead) == ("inconclusive", True)  # two seeds: +10 and +70
    text = reproduced.markdown(results, "figure.png")
    assert "80.00±1.00 / 81.00 ± " in text
    assert "| yes |" in text
    assert "- inconclusive: A is best" in text
    (turned,) = judged(TABLE, tmp_path, 2, {"ahead": "B", "of": ["A"]})
    assert (turned.verdict, turned.ahead) == ("inconclusive", False)
    swapped = [dict(c) for c in TABLE["column"]]
    swapped[0]["printed"], swapped[1]["printed"] = {"one": [60.0, 1.0]}, {"one": [61.9, 1.0]}
    near = Reproduction.of("t", TABLE | {"column": swapped}, quick=False)
    assert Results(near, 2, tmp_path, {}).order(row=near.rows[0], protocol=theirs)[0] == 0
    swapped[1]["printed"] = {"one": [70.0, 1.0]}
    wrong = Reproduction.of("t", TABLE | {"column": swapped}, quick=False)
    assert Results(wrong, 2, tmp_path, {}).order(wrong.rows[0], theirs) == (
        1, 0, ["B is not above A"],
    )  # fmt: skip


@pytest.mark.parametrize("values", [PLAIN, FIGURE], ids=["table", "figure"])
@pytest.mark.parametrize(
    ("own", "others", "verdict", "detail"),
    [
        ([0.5, 0.7], [0.4, 0.6], "holds", "+10 ± "),  # paired; otherwise far from told apart
        ([0.4, 0.6], [0.5, 0.7], "does not hold", "-10 ± "),
        ([0.5, 0.7], [0.4, 0.4], "inconclusive", "+20 ± 1.3e+02 over B"),
        ([0.4, 0.4], [0.5, 0.7], "inconclusive", "-20 ± 1.3e+02 over B"),
        ([0.5], [0.4], "holds", "+10 over B"),  # one seed has no interval
        ([0.4], [0.5], "does not hold", "-10 over B"),
        ([0.5], [0.5], "does not hold", "+0 over B"),
    ],
)
def test_three_verdicts(
    values: dict[str, Any],
    own: list[float],
    others: list[float],
    verdict: str,
    detail: str,
    tmp_path: Path,
) -> None:
    what = made(values)
    for seed, (a, b) in enumerate(zip(own, others, strict=True)):
        written(what, tmp_path, "A", seed, [0.1, a])
        written(what, tmp_path, "B", seed, [0.1, b])
    where = " at uplink_bytes 1000" if values is FIGURE else ""
    places = (where, " at the end" if where else "")
    found = judged(values, tmp_path, len(own), {}, {"at_own_end": True})
    for checked, place in zip(found, places, strict=True):
        assert checked.verdict == verdict
        assert checked.ahead == (float(detail.split()[0]) > 0)
        assert checked.detail.startswith(f"one: {detail}")
        assert checked.detail.endswith(f" over B{place}")
    (line,) = reproduced.claim_lines(Results(made(values, CLAIM), len(own), tmp_path, {}))
    assert line.startswith(f"{verdict}: A is best (one: ")
    by_figure = made(values, CLAIM | {"source": "figure"})
    text = reproduced.markdown(Results(by_figure, len(own), tmp_path, {}), None)
    assert f"- {verdict} (figure): A is best (one: " in text


def test_every_gap_and_row_of_a_claim_counts(tmp_path: Path) -> None:
    """Whatever their order: the worst is what a claim comes to."""
    methods = [{"name": name, "settings": ["method.name=fedavg"]} for name in "ABC"]
    rows = [{"name": "one"}, {"name": "two"}]
    table = PLAIN | {"row": rows, "method": methods, "column": []}
    what = made(table)
    scores = {"one": {"A": 0.5, "B": 0.4, "C": 0.3}, "two": {"A": 0.5, "B": 0.6, "C": 0.3}}
    for row, of in scores.items():
        for method, score in of.items():
            written(what, tmp_path, method, 0, [score], row=row)
    claims: list[dict[str, Any]] = [
        {"of": ["B", "C"], "row": "one"}, {"of": ["B", "C"]}, {"of": ["C", "B"]}, {"of": ["C"]},
        {"of": ["B"], "row": "two"},
    ]  # fmt: skip
    found = judged(table, tmp_path, 1, *claims)
    expected = ["holds", "does not hold", "does not hold", "holds", "does not hold"]
    assert [checked.verdict for checked in found] == expected
    assert [checked.ahead for checked in found] == [v == "holds" for v in expected]
    assert found[1].detail == "one: +10 over B, +20 over C; two: -10 over B, +20 over C"
    assert found[4].detail == "two: -10 over B"


def test_worse_verdicts_win(tmp_path: Path) -> None:
    """Of "holds" and "inconclusive" the second, of that and "does not hold" the last."""
    methods = [{"name": name, "settings": ["method.name=fedavg"]} for name in "ABCD"]
    table = PLAIN | {"method": methods, "column": []}
    what = made(table)
    scores = {"A": [0.5, 0.5], "B": [0.4, 0.4], "C": [0.3, 0.45], "D": [0.6, 0.6]}
    for method, of_seeds in scores.items():
        for seed, score in enumerate(of_seeds):
            written(what, tmp_path, method, seed, [score])
    claims = [{"of": list(of)} for of in ("B", "BC", "CB", "CD", "DCB")]
    found = judged(table, tmp_path, 2, *claims)
    assert [checked.verdict for checked in found] == [
        "holds", "inconclusive", "inconclusive", "does not hold", "does not hold",
    ]  # fmt: skip
    assert [checked.ahead for checked in found] == [True, True, True, False, False]


@pytest.mark.parametrize("values", [PLAIN, FIGURE], ids=["table", "figure"])
def test_of_losses_less_is_better(values: dict[str, Any], tmp_path: Path) -> None:
    """And a claim is judged by its own score, whatever is shown; losses are no percentages."""
    what = made(values)
    written(what, tmp_path, "A", 0, [0.1, 0.5], losses=[0.9, 0.3])
    written(what, tmp_path, "B", 0, [0.1, 0.6], losses=[0.9, 0.7])
    by_accuracy, by_loss = judged(values, tmp_path, 1, {}, {"score": "loss"})
    assert (by_accuracy.verdict, by_loss.verdict) == ("does not hold", "holds")
    assert by_loss.detail.startswith("one: +0.4 over B")
    (shown,) = judged(values | {"score": ["loss"]}, tmp_path, 1, {})
    assert shown.verdict == "holds"


def test_an_objective_without_penalty_is_the_loss(tmp_path: Path) -> None:
    """Which is recorded once, so that rows with and without a penalty can stand in one figure."""
    figure = FIGURE | {"score": ["train_objective"]}
    what = made(figure)
    for method, penalty in {"A": 0.0, "B": 0.001}.items():
        written(what, tmp_path, method, 0, [0.1, 0.5])
        place = what.place(tmp_path, "one", method, 0) / "summary.json"
        summary = json.loads(place.read_text())
        summary["config"]["model"] = {"l2": penalty}
        name = "train_objective" if penalty else "train_loss"
        for scores in [summary, *summary["history"]]:
            scores["personalized"] |= {name: {"mean": 0.4 + penalty}}
            if penalty:
                scores["personalized"]["train_loss"] = {"mean": 0.2}
        place.write_text(json.dumps(summary))
    (checked,) = judged(figure, tmp_path, 1, {})
    assert checked.detail == "one: +0.001 over B at uplink_bytes 1000"
    results = Results(what, 1, tmp_path, {})
    row, (protocol,) = what.rows[0], what.protocols
    means = [results.cell(row, column, protocol).mean for column in row.columns[:2]]
    np.testing.assert_allclose(means, [0.4, 0.401])


def test_the_best_loss_is_the_least(tmp_path: Path) -> None:
    table = TABLE | {"score": ["loss"]}
    what = made(table)
    for seed in range(2):
        written(what, tmp_path, "A", seed, [0.1, 0.8, 0.7], losses=[0.9, 0.2, 0.3])
    results = Results(what, 2, tmp_path, {})
    row, (theirs, best) = what.rows[0], what.protocols
    assert results.cell(row, row.columns[0], best).mean == pytest.approx(0.2)
    assert results.cell(row, row.columns[0], theirs).mean == pytest.approx(0.15)


def test_the_statistic_is_the_one_asked_for(tmp_path: Path) -> None:
    weighted = TABLE | {"statistic": "weighted"}
    what = made(weighted)
    written(what, tmp_path, "A", 0, [0.2, 0.8, 0.6])
    results = Results(what, 1, tmp_path, {})
    row, (theirs, best) = what.rows[0], what.protocols
    column = row.columns[0]
    last = best._replace(take="last")
    found = [results.cell(row, column, protocol).mean for protocol in (theirs, best, last)]
    np.testing.assert_allclose(found, [15.25, 20, 15])
    curve = results.curve(row, column, "accuracy")
    assert curve is not None
    np.testing.assert_allclose(curve.mean, [5, 20, 15])
    loss = results.curve(row, column, "loss")
    assert loss is not None
    np.testing.assert_allclose(loss.mean, [2.4, 0.6, 1.2])


def test_curves_and_their_lines(tmp_path: Path) -> None:
    """Of the models a column names, in the score's own unit; lines show where curves end."""
    figure = FIGURE | {"score": ["accuracy", "loss"]}
    what = made(figure)
    for method, scores in {"A": [0.1, 0.5, 0.9], "B": [0.1, 0.3, 0.6]}.items():
        written(what, tmp_path, method, 0, scores)
    results = Results(what, 1, tmp_path, {})
    row = what.rows[0]
    curves = [results.curve(row, row.columns[2], score) for score in what.score]
    assert curves[0] is not None
    assert curves[1] is not None
    np.testing.assert_allclose(curves[0].x, [0, 1000, 2000])
    np.testing.assert_allclose(curves[0].mean, [5, 15, 30])
    np.testing.assert_allclose(curves[1].mean, [4.5, 3.5, 2])
    _, lines = reproduced.table_lines(results)
    assert [line[:2] + line[3:] for line in lines] == [
        ["one", "A", "90.00", "0.1000"],
        ["one", "B", "60.00", "0.4000"],
        ["one", "B, global", "30.00", "2.0000"],
    ]
    assert [line[2] for line in lines] == [reproduced._amount("uplink_bytes", 2000)] * 3
    drawn = reproduced.draw(results, tmp_path / "figure")
    assert [path.name for path in drawn] == ["figure.png", "figure.svg"]
    assert all(path.stat().st_size > 5000 for path in drawn)


def test_curves_are_compared_when_the_first_ends(tmp_path: Path) -> None:
    """Against bytes, a curve that is ahead at the end may have paid more for it."""
    what = made(FIGURE)
    written(what, tmp_path, "A", 0, [0.1, 0.5, 0.9])
    written(what, tmp_path, "B", 0, [0.1, 0.6])  # ends after half of the bytes
    early, late = judged(FIGURE, tmp_path, 1, {}, {"at_own_end": True})
    assert (early.verdict, early.detail) == (
        "does not hold", "one: -10 over B at uplink_bytes 1000",
    )  # fmt: skip
    assert (late.verdict, late.detail) == ("holds", "one: +30 over B at the end")


def test_a_round_counts_when_it_has_ended(tmp_path: Path) -> None:
    """Each seed by its own clock, at the last round that has ended: nothing lies between two."""
    what = made(FIGURE)
    written(what, tmp_path, "A", 0, [0.1, 0.5, 0.9], x=[0, 100, 300])
    written(what, tmp_path, "B", 0, [0.1, 0.6], x=[0, 250])  # A's 0.9 is not there yet
    written(what, tmp_path, "A", 1, [0.1, 0.5, 0.7], x=[0, 100, 200])
    written(what, tmp_path, "B", 1, [0.1, 0.6], x=[0, 250])  # here A ends before it
    (checked,) = judged(FIGURE, tmp_path, 1, {})
    assert checked.detail == "one: -10 over B at uplink_bytes 250"
    (checked,) = judged(FIGURE, tmp_path, 2, {})  # gaps of -10 and, over B's beginning, +60
    assert checked.detail.startswith("one: +25 ± ")
    assert checked.detail.endswith(" over B at uplink_bytes 225")


@pytest.mark.parametrize("score", ["accuracy", "loss"])
def test_who_reaches_a_level_first(score: str, tmp_path: Path) -> None:
    """By the seed's own level and clock: before the end of A, after it, or never."""
    figure = FIGURE | {"score": [score]}
    what = made(figure)
    before, after, never = ([0.1, 0.8, 0.7], [0.1, 0.6, 0.75], [0.1, 0.6, 0.69])
    cases = {
        "holds": [after, never, never],
        "inconclusive": [after, before, never],
        "does not hold": [before, after, before],
    }
    details = {
        "holds": "first in 3 of 3 seeds against B (never reaches it in 2)",
        "inconclusive": "first in 2 of 3 seeds against B (never reaches it in 1)",
        "does not hold": "first in 1 of 3 seeds against B",
    }
    for verdict, others in cases.items():
        folder = tmp_path / verdict
        for seed, scores in enumerate(others):
            less, slower = 0.2 * seed, 1 + seed
            clock = [0, 100 * slower, 200 * slower]
            written(what, folder, "A", seed, [0.1, 0.7 - less], x=[0, 150 * slower])
            written(what, folder, "B", seed, [s - less for s in scores], x=clock)
        (checked,) = judged(figure, folder, 3, {"reach": True})
        assert (checked.verdict, checked.detail) == (verdict, f"one: {details[verdict]}")
        assert checked.ahead == (verdict != "does not hold")
    for seeds, verdict in ((1, "does not hold"), (2, "inconclusive")):  # half of two do not tell
        (checked,) = judged(figure, tmp_path / "does not hold", seeds, {"reach": True})
        assert (checked.verdict, checked.ahead) == (verdict, False)
    written(what, tmp_path, "A", 0, [0.1, 0.7])
    written(what, tmp_path, "B", 0, [0.1, 0.7])  # at the very same moment is not later
    (checked,) = judged(figure, tmp_path, 1, {"reach": True})
    assert checked.verdict == "does not hold"


@pytest.mark.parametrize("claim", [{}, {"at_own_end": True}, {"reach": True}], ids=str)
def test_a_seed_that_failed_is_not_left_out(claim: dict[str, Any], tmp_path: Path) -> None:
    what = made(FIGURE)
    for seed in range(2):
        written(what, tmp_path, "A", seed, [0.1, 0.9])
    written(what, tmp_path, "B", 0, [0.1, 0.2])
    (checked,) = judged(FIGURE, tmp_path, 2, claim)
    assert (checked.verdict, checked.ahead, checked.detail) == (
        "does not hold",
        False,
        "one: runs failed",
    )
    results = Results(what, 2, tmp_path, {})
    row = what.rows[0]
    assert results.curve(row, row.columns[1], "accuracy") is None
    assert np.isnan(results.cell(row, row.columns[1], what.protocols[0]).mean)
    assert reproduced.table_lines(results)[1][1] == ["one", "B", "", "failed"]


def test_printed_gaps_are_shown(tmp_path: Path) -> None:
    columns = ["B", "B, global"]
    claim = {"of": columns, "printed": {"one": [5.5, 1.25], "two": [7.0, 7.0]}}
    what = made(PLAIN)
    written(what, tmp_path, "A", 0, [0.9])
    written(what, tmp_path, "B", 0, [0.8])
    (checked,) = judged(PLAIN, tmp_path, 1, claim)
    assert checked.detail == "one: +10 (printed +5.5) over B, +50 (printed +1.25) over B, global"


def test_settings_of_rows_and_claims_of_the_whole() -> None:
    """A method may have settings of one row; some claims are of long runs only."""
    methods = [
        {"name": "A", "settings": ["method.name=fedavg", "method.lr=0.5"],
         "row": {"two": ["method.lr=0.25"]}},
    ]  # fmt: skip
    table = TABLE | {
        "row": [{"name": "one", "settings": ["cohort=3"]}, {"name": "two"}],
        "method": methods,
        "column": [],
        "claim": [CLAIM, CLAIM | {"text": "later", "full_only": True}],
    }
    whole, quick = (Reproduction.of("t", table, quick) for quick in (False, True))
    for what, rounds in ((whole, 2), (quick, 1)):
        runs = [row.runs["A"] for row in what.rows]
        assert [run["method"]["lr"] for run in runs] == [0.5, 0.25]
        assert [run["cohort"] for run in runs] == [3, 2]
        assert {run["rounds"] for run in runs} == {rounds}
        assert {run["output"]["personal_models"] for run in runs} == {"none"}
    assert [claim.text for claim in whole.claims] == ["A is best", "later"]
    assert [claim.text for claim in quick.claims] == ["A is best"]
    assert (whole.claims[0].source, whole.claims[0].reach) == ("text", False)


def test_files_that_cannot_be(tmp_path: Path) -> None:
    best_of_others = {"name": "b", "adapt_on": "test", "take": "best", "printed": True}
    with pytest.raises(ConfigError, match=r'take = "best".*one: A adapts on train data'):
        made(TABLE | {"protocol": [best_of_others]})
    own = TABLE["base"] | {"adapt_on": "test"}
    assert made(TABLE | {"protocol": [best_of_others], "base": own}).protocols[0].take == "best"
    with pytest.raises(FieldError, match=r"claim\.source = 'hearsay'.*\"figure\""):
        made(TABLE, CLAIM | {"source": "hearsay"})
    with pytest.raises(ConfigError, match="A is best: reach is for figures"):
        made(TABLE, CLAIM | {"reach": True})
    with pytest.raises(ConfigError, match="not for curves compared at_own_end"):
        made(FIGURE, CLAIM | {"reach": True, "at_own_end": True})
    rows = TABLE | {"row": [{"name": "a, b"}, {"name": "a; b"}]}
    with pytest.raises(ConfigError, match=r"a; b: A \(seed 0\) and a, b: A \(seed 0\) are both"):
        made(rows).entries(1, tmp_path)
    alike = [{"name": name, "settings": ["method.name=fedavg"]} for name in ("A+B", "A/B")]
    with pytest.raises(ConfigError, match=r"one: A/B \(seed 0\) and one: A\+B"):
        made(TABLE | {"method": alike, "column": []}).entries(1, tmp_path)
    with pytest.raises(ConfigError, match="one: two methods are named A"):
        made(TABLE | {"method": [TABLE["method"][0]] * 2})
    alone = [{"name": "Alone", "settings": ["method.name=local"]}]
    column = [{"name": "G", "method": "Alone", "kind": "global"}]
    with pytest.raises(ConfigError, match='column G: kind = "global", but Alone has no global'):
        made(TABLE | {"method": alone, "column": column})


def test_finished_runs_of_other_settings_are_refused(tmp_path: Path) -> None:
    """Settings that an older record does not know yet are no difference."""
    what = made(PLAIN)
    for entry in what.entries(2, tmp_path):
        method = entry.name.removeprefix("one: ")[0]
        written(what, tmp_path, method, entry.values["seed"], [0.1, 0.5])
        summary = json.loads((entry.folder / "summary.json").read_text())
        summary["config"] = Config.checked(entry.values).resolved()
        del summary["config"]["sampling"], summary["config"]["method"]["tau"]
        (entry.folder / "summary.json").write_text(json.dumps(summary))
    assert reproduce(what, 2, tmp_path, quiet, quiet).failures == {}
    others = [
        TABLE["method"][0],
        {"name": "B", "settings": ["method.name=fedavg", "method.lr=0.002"]},
    ]
    with pytest.raises(ConfigError) as refused:
        reproduce(made(PLAIN | {"method": others}), 2, tmp_path, quiet, quiet)
    assert str(refused.value) == (
        f"one: B (seed 0): {tmp_path}/runs/one/B/seed-0 holds a finished run of other settings "
        "(method.lr was 0.001, is 0.002 now); remove it, or name another folder"
    )
    place = what.place(tmp_path, "one", "A", 1) / "summary.json"
    summary = json.loads(place.read_text())
    summary["config"] |= {"seed": 0, "network": {"ratio": 100.0}}
    place.write_text(json.dumps(summary))
    with pytest.raises(ConfigError, match=r"A \(seed 1\).*seed was 0, is 1 now; network was .*rat"):
        reproduce(what, 2, tmp_path, quiet, quiet)


@pytest.mark.slow
def test_a_reproduction_runs_scores_and_goes_on(tmp_path: Path) -> None:
    what = Reproduction.of("t", TABLE, quick=False)
    check_folder(tmp_path, what, 2)
    results = reproduce(what, 2, tmp_path, quiet, quiet)
    assert results.failures == {}
    row, (theirs, best) = what.rows[0], what.protocols
    for seed in range(2):
        values = row.runs["A"] | {"seed": seed, "adapt_on": "test"}
        config = Config.checked(values)
        adapted = config.train(config.build()).scores["personalized"].accuracy.mean()
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
    assert "70.00±1.00 / failed" in text
    assert "## Failed runs" in text
    assert "does not hold: A is best (one: runs failed)" in text


@pytest.mark.slow
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
    all_ahead(results)
    return results


def all_ahead(results: Results) -> None:
    """So few seeds seldom tell apart; the means have to be on the claims' side, at least."""
    for checked in check_claims(results):
        assert checked.ahead, checked
        assert checked.verdict != "does not hold"


@pytest.mark.slow
def test_quick_pfedme_table(tmp_path: Path) -> None:
    """PM is ahead of GM, Per-FedAvg and FedAvg on both Synthetic problems; with the report."""
    folder = tmp_path / "out"
    done = perfed("reproduce", "pfedme-table1", "--quick", "--out", folder, COLUMNS="150")
    assert done.returncode == 0, done.stderr
    assert "does not hold" not in done.stdout
    assert ": pFedMe's personal model is the best performer" in done.stdout
    what = Reproduction.read("pfedme-table1", quick=True)
    all_ahead(Results(what, what.seeds, folder, {}))
    files = {path.name for path in folder.iterdir()}
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
        row.name: {c.name: results.curve(row, c, results.what.score[0]) for c in row.columns}
        for row in (levels, methods)
    }

    def at_equal_time(row: str, one: str, other: str) -> tuple[float, float]:
        first, second = ends[row][one], ends[row][other]
        assert first is not None
        assert second is not None
        time = min(first.x[-1], second.x[-1])
        return tuple(float(np.interp(time, c.x, c.mean)) for c in (first, second))  # type: ignore[return-value]

    fast, slow = at_equal_time(levels.name, "s = 1", "not quantized (FedAvg)")
    assert fast < 0.75 * slow
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
