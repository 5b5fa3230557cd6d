"""The report: what it says, and that a browser shows it."""

import html
import json
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from playwright.sync_api import Browser, BrowserContext, Page, sync_playwright
from plotly.offline import get_plotlyjs  # type: ignore[import-untyped]
from typer.testing import CliRunner

from perfed.cli.app import app
from perfed.core.errors import DataError, FieldError
from perfed.evaluation import Summary
from perfed.report.groups import KINDS, count_line, grouped, over_clients
from perfed.report.headline import NOTHING, HeadlineCell, caption, headline
from perfed.report.page import report_page
from perfed.report.paper import latex_table, markdown_table, write_figures
from perfed.runs.run_dir import RecordedRun, read_run
from perfed.runs.statistics import over_seeds, student_t

EVIL = "<script>document.title='owned'</script>"


def recorded(
    method: str = "pfedme",
    seed: int = 0,
    *,
    clients: int = 12,
    evaluations: int = 6,
    regression: bool = False,
    network: bool = True,
    level: float = 0.7,
    names: Sequence[str] | None = None,
    labels: Sequence[str] = tuple("0123456789"),
    adapt_on: str = "train",
    has_global: bool = True,
    **settings: Any,
) -> RecordedRun:
    """A run that looks like one: scores rise, most clients gain by personalizing."""
    rng = np.random.default_rng([seed, *method.encode()])
    own = np.random.default_rng(5)
    rounds = np.linspace(0, 20 * (evaluations - 1), evaluations).astype(np.int64)
    rise = 1 - np.exp(-3 * rounds / rounds[-1])[:, None]
    scores: dict[str, dict[str, np.ndarray]] = {}
    sizes = own.integers(10, 90, clients)
    skill = own.normal(0, 0.06, clients)
    for kind, more in (("global", -0.12), ("personalized", 0.0)):
        gain = own.normal(more, 0.07, clients)
        noise = rng.normal(0, 0.02, (evaluations, 1)) + rng.normal(0, 0.02, (evaluations, clients))
        good = np.clip(0.1 + rise * (level - 0.1 + skill + gain) + noise * rise, 0, 1)
        if regression:
            scores[kind] = {"r2": good, "rmse": 3 * np.sqrt(1 - good), "loss": 1 - good}
        else:
            scores[kind] = {"accuracy": good, "loss": -np.log(good + 0.05)}
    if not has_global:
        del scores["global"]
    costs = {
        "uplink_bytes": rounds * 412_345.0,
        "downlink_bytes": rounds * 500_000.0,
        "seconds": 4 + rounds * 0.21 + rng.normal(0, 0.1, evaluations).cumsum() * 0.1,
    }
    if network:
        costs["simulated_seconds"] = rounds * 71.0 + rng.normal(0, 1, evaluations).cumsum() * 5
    counts = own.multinomial(80, own.dirichlet(np.full(len(labels), 0.25), clients)[0], clients)
    for i, mixture in enumerate(own.dirichlet(np.full(len(labels), 0.25), clients)):
        counts[i] = own.multinomial(int(own.integers(30, 200)), mixture)
    config = {
        "seed": seed,
        "rounds": int(rounds[-1]),
        "cohort": 5,
        "adapt_on": adapt_on,
        "data": {"source": "digits", "split": "per-fedavg", "clients": clients, "seed": 0},
        "model": {"name": "mlp", "hidden": [80, 60], "activation": "elu", "l2": 0.0},
        "method": {"name": method, "batch": 20} | settings,
        "codec": {"name": "float32", "downlink": None},
        "network": {"name": "lognormal"} if network else None,
        "engine": {"name": "vectorized", "devices": None, "chunk": None},
    }
    environment = {
        "versions": {"python": "3.11.7", "perfed": "0.1.0", "jax": "0.10.2", "numpy": "2.4.6"},
        "platform": "Linux-6.1-x86_64",
        "devices": "2 x cpu",
        "command": ["perfed", "run", "config.toml", "--set", f"seed={seed}"],
        "git": {"commit": "0123456789abcdef0123456789abcdef01234567", "changed": False},
        "data_sha256": "ab" * 32,
    }
    return RecordedRun(
        path=Path("runs") / f"{method}-{seed}",
        config=config,
        environment=environment,
        summary={},
        rounds=rounds,
        scores=scores,
        costs=costs,
        names=tuple(names or (f"client {i}" for i in range(clients))),
        sizes=sizes,
        labels=None if regression else tuple(labels),
        train_counts=np.zeros((clients, 0), np.int64) if regression else counts,
        timing={
            "data": 0.8,
            "compiling": 9.1 + seed,
            "rounds": 21.0,
            "scoring": 3.2,
            "recording": 0.4,
        },
        theory=None,
    )


def methods(**settings: Any) -> list[RecordedRun]:
    """Three methods, three seeds each."""
    return [
        recorded(method, seed, level=level, **settings)
        for method, level in (("fedavg", 0.6), ("per-fedavg", 0.75), ("pfedme", 0.8))
        for seed in (0, 1, 2)
    ]


def body(page: str) -> str:
    """The page without Plotly."""
    return page.replace(get_plotlyjs(), "")


def data_of(page: str) -> Any:
    found = re.search(r'<script type="application/json" id="chart-data">(.*?)</script>', page)
    assert found is not None
    return json.loads(found[1])


def test_runs_that_differ_only_in_seed_are_one_group() -> None:
    runs = methods()
    groups = grouped([runs[4], runs[0], runs[3], runs[1], runs[8]])
    assert [group.label for group in groups] == ["per-fedavg", "fedavg", "pfedme"]
    assert [[run.config["seed"] for run in g.runs] for g in groups] == [[0, 1], [0, 1], [2]]


def test_labels_say_what_tells_runs_of_one_method_apart() -> None:
    runs = [recorded("pfedme", lam=5.0), recorded("pfedme", lam=15.0), recorded("fedavg")]
    assert [g.label for g in grouped(runs)] == ["pfedme (lam=5.0)", "pfedme (lam=15.0)", "fedavg"]
    long = [recorded("pfedme", note="x" * 80), recorded("pfedme", note="y" * 80)]
    assert [g.label for g in grouped(long)] == ["pfedme #1", "pfedme #2"]


def test_runs_that_cannot_be_compared_are_refused() -> None:
    with pytest.raises(DataError, match="at least one"):
        grouped([])
    with pytest.raises(DataError, match="same seed, 0: give one of them"):
        grouped([recorded(), recorded()])
    with pytest.raises(DataError, match="report them separately"):
        grouped([recorded(), recorded("fedavg", regression=True)])
    with pytest.raises(DataError, match="other clients"):
        grouped([recorded(), recorded(seed=1, names=[f"other {i}" for i in range(12)])])
    short = recorded(seed=1)
    short = replace(
        short,
        rounds=short.rounds[:-1],
        scores={k: {n: v[:-1] for n, v in own.items()} for k, own in short.scores.items()},
        costs={k: v[:-1] for k, v in short.costs.items()},
    )
    with pytest.raises(DataError, match=r"ends at round 100, .* at round 80: resume"):
        grouped([recorded(), short])


def test_curves_are_drawn_at_the_rounds_all_seeds_have() -> None:
    run, other = recorded(), recorded(seed=1)
    kept = [0, 2, 5]
    fewer = replace(
        other,
        rounds=other.rounds[kept],
        scores={k: {n: v[kept] for n, v in own.items()} for k, own in other.scores.items()},
        costs={k: v[kept] for k, v in other.costs.items()},
    )
    (group,) = grouped([run, fewer])
    assert group.rounds.tolist() == [0, 40, 100]
    mean = group.curve("global", "accuracy", "mean").mean
    of = [r.scores["global"]["accuracy"][2].mean() for r in (run, other)]
    assert mean[1] == pytest.approx(np.mean(of))
    axis = group.axis("seconds")
    assert axis is not None
    assert axis[1] == pytest.approx((run.costs["seconds"][2] + other.costs["seconds"][2]) / 2)


@pytest.mark.parametrize(
    ("freedom", "quantile"),
    [
        (1, 12.7062),
        (2, 4.30265),
        (3, 3.18245),
        (4, 2.77645),
        (9, 2.26216),
        (30, 2.04227),
        (100, 1.98397),
    ],
)
def test_quantiles_of_student_t(freedom: int, quantile: float) -> None:
    assert student_t(freedom) == pytest.approx(quantile, rel=1e-5)


def test_intervals_by_hand() -> None:
    # 1, 2, 3, 4, 5: standard deviation sqrt(2.5), so 2.77645 sqrt(2.5 / 5) to each side.
    mean, half = over_seeds(np.array([1.0, 2.0, 3.0, 4.0, 5.0]))
    assert float(mean) == 3.0
    assert float(half) == pytest.approx(1.96324, rel=1e-5)
    mean, half = over_seeds(np.array([[0.4], [0.6]]))
    assert half[0] == pytest.approx(12.7062 * 0.1, rel=1e-5)
    assert np.isnan(over_seeds(np.array([0.5])).half)


@pytest.mark.parametrize("score", ["r2", "loss"])
def test_statistics_over_clients_are_those_of_the_summary(score: str) -> None:
    values = np.array([[0.1, np.nan, 0.9, 0.4], [0.3, np.nan, 0.2, 0.8]])
    sizes = np.array([5, 90, 1, 30])
    found = over_clients(values, sizes, score)
    for i, row in enumerate(values):
        summary = Summary.of(row, sizes, score == "loss")
        for name, own in found.items():
            assert own[i] == pytest.approx(getattr(summary, name))
    assert np.isnan(over_clients(np.full((1, 4), np.nan), sizes, score)["mean"]).all()


def test_the_headline_is_the_last_round() -> None:
    runs = methods()
    best_before = replace(runs[0], scores={k: dict(v) for k, v in runs[0].scores.items()})
    peak = best_before.scores["personalized"]["accuracy"].copy()
    peak[2] = 1.0
    best_before.scores["personalized"]["accuracy"] = peak
    table = headline(grouped([best_before, *runs[1:]]))
    at = [(c.over, c.name) for c in table.columns].index(("Personalized model", "mean"))
    of = [100 * run.scores["personalized"]["accuracy"][-1].mean() for run in runs[:3]]
    mean, half = over_seeds(np.array(of))
    assert table.rows[0][at][:2] == (f"{mean:.1f}", f"{half:.1f}")
    assert [row[at].best for row in table.rows] == [False, False, True]
    names = [c.name for c in table.columns]
    assert names[8:] == ["Sent by clients (MB)", "Simulated time (min)", "Real time (s)"]
    # All sent as much: there is no best, and an interval of no width says nothing.
    assert [row[8] for row in table.rows] == [("41.2", None, False)] * 3


def test_of_errors_the_least_is_best_and_the_upper_tail_is_shown() -> None:
    table = headline(grouped(methods()), "loss")
    assert [c.name for c in table.columns[:4]] == ["mean", "by size", "worst", "p90"]
    assert [row[0].best for row in table.rows] == [False, False, True]


def test_captions_say_what_was_scored_and_adapted_on() -> None:
    told = caption(grouped(methods()))
    for words in ("last round (round 100), not the best", "held-out", "adapt_on = train", "95 %"):
        assert words in told
    one = caption(grouped([recorded()]))
    assert "One seed" in one
    assert "so there is no interval" in one
    mixed = [recorded("fedavg"), recorded("pfedme", adapt_on="test")]
    assert "of pfedme: the very data it is scored on (adapt_on = test)" in caption(grouped(mixed))
    assert "Adapted on the data that are scored" in body(report_page(mixed, "x"))
    assert "Adapted on the data" not in body(report_page(methods(), "x"))
    other = [recorded("fedavg"), recorded("two-step-per-fedavg", adapt_on="test-then-train")]
    text = caption(grouped(other))
    assert (
        "of two-step-per-fedavg: not its training data alone (adapt_on = test-then-train)" in text
    )
    assert "Not adapted on training data alone" in body(report_page(other, "x"))
    assert "(adapt_on = train)" not in caption(grouped(other[1:]))


def test_gains_are_counted() -> None:
    run = recorded(clients=5)
    score = np.array([0.5, 0.5, 0.5, 0.5, 0.5])
    own = np.array([0.7, 0.51, 0.5 - 1e-8, 0.495, 0.4])  # the third: float32's rounding
    for kind, last in (("global", score), ("personalized", own)):
        run.scores[kind]["accuracy"][-1] = last
    gain = grouped([run])[0].gain()
    assert gain is not None
    assert (gain.better, gain.worse, gain.much_worse, gain.defined) == (2, 2, 1, 5)
    assert count_line(gain, "accuracy") == "2 of 5 clients gain; 2 lose, 1 more than 1 point"
    run.scores["global"]["accuracy"][-1, 0] = np.nan
    gain = grouped([run])[0].gain()
    assert gain is not None
    assert count_line(gain, "accuracy").endswith("of 1 the score is not defined")
    run.scores["global"]["accuracy"][-1] = np.nan
    gain = grouped([run])[0].gain()
    assert gain is not None
    assert count_line(gain, "accuracy") == "no client has this score for both models"


def personal_and_global() -> list[RecordedRun]:
    """Two methods of two seeds; the first has no global model, as FedRep."""
    return [
        recorded(name, seed, level=level, has_global=has_global)
        for name, level, has_global in (("fedrep", 0.8, False), ("fedavg", 0.6, True))
        for seed in (0, 1)
    ]


@pytest.mark.slow
def test_a_method_without_a_global_model_beside_one_that_has_it(tmp_path: Path) -> None:
    runs = personal_and_global()
    groups = grouped(runs)
    assert [group.kinds for group in groups] == [("personalized",), ("global", "personalized")]
    table = headline(groups)
    is_global = [column.over == "Global model" for column in table.columns]
    assert is_global.count(True) == 4
    for cell, common in zip(table.rows[0], is_global, strict=True):
        assert cell == HeadlineCell(NOTHING) if common else cell.mean != NOTHING
    assert all(cell.mean != NOTHING for cell in table.rows[1])
    assert " No global model: fedrep." in caption(groups)
    assert groups[0].gain() is None

    page = body(report_page(runs, "Both"))
    assert "fedrep, mean accuracy" in page
    assert "with the global one" not in page
    assert "No global model to compare with: fedrep." in page
    gains = re.search(r'<select id="gain-group"[^>]*>(.*?)</select>', page)
    assert gains is not None
    assert re.findall(r'value="(\d)"', gains[1]) == ["1"]
    data = data_of(page)
    first, second = data["groups"]
    assert list(first["curves"]["accuracy"]) == list(first["boxes"]["loss"]) == ["personalized"]
    assert list(second["curves"]["accuracy"]) == ["global", "personalized"]
    assert first["gain"] is None
    assert "nan" not in page.split("<main")[1].split('id="chart-data"')[0].lower()
    assert len(second["gain"]["names"]) == 12
    row = markdown_table(runs).splitlines()[2]
    assert row.startswith(f"| fedrep | 2 | {4 * f'{NOTHING} | '}**")
    assert r"fedrep & 2 & -- & -- & -- & -- & \textbf{" in latex_table(runs)
    names = {path.name for path in write_figures(runs, tmp_path, ["png"])}
    assert {"gain.png", "clients.png", "curve-accuracy-round.png"} <= names


def test_methods_without_a_global_model_alone(tmp_path: Path) -> None:
    runs = personal_and_global()[:2]
    groups = grouped(runs)
    columns = headline(groups).columns
    assert {column.over for column in columns} == {"Personalized model", ""}
    assert "lobal" not in caption(groups)
    text = body(report_page(runs, "Personal"))
    assert "with personalized models." in text
    page = text.split("<main")[1].split('id="chart-data"')[0]
    assert "lobal" not in page
    assert "nan" not in page.lower()
    assert 'id="gain"' not in page
    assert "lobal" not in markdown_table(runs) + latex_table(runs)
    names = {path.name for path in write_figures(runs, tmp_path, ["png"])}
    assert {"clients.png", "curve-loss-round-column.png"} <= names
    assert not any(name.startswith("gain") for name in names)


def test_a_regression_has_no_labels_and_may_have_undefined_scores() -> None:
    runs = [recorded(m, s, regression=True, network=False) for m in ("a", "b") for s in (0, 1)]
    for run in runs:
        run.scores["global"]["r2"][:, 0] = np.nan
        run.scores["personalized"]["r2"][:, 0] = np.nan
    page = body(report_page(runs, "Regression"))
    assert "Labels of the clients" not in page
    assert "Simulated time" not in page
    assert "RMSE" in page
    data = data_of(page)
    assert data["labels"] is None
    assert [score["key"] for score in data["scores"]] == ["r2", "rmse", "loss"]
    assert len(data["groups"][0]["gain"]["names"]) == 11
    assert "NaN" not in json.dumps(data)


def test_one_run_says_that_it_is_one_seed() -> None:
    page = body(report_page([recorded()], "One"))
    assert "One seed per method, so there is no interval." in page
    assert "±" not in page.split("<main")[1].split('id="chart-data"')[0]
    assert data_of(page)["groups"][0]["curves"]["loss"]["global"]["mean"][1] is None


def test_names_from_runs_are_text() -> None:
    names = [EVIL, '"><img src=x onerror=alert(1)>', *map(str, range(10))]
    runs = [
        recorded("pfedme", names=names, labels=[EVIL, "b"], note=EVIL),
        recorded("pfedme", names=names, labels=[EVIL, "b"], note="</style>"),
        recorded(EVIL, names=names, labels=[EVIL, "b"]),
    ]
    page = body(report_page(runs, EVIL))
    assert EVIL not in page
    assert "<img" not in page
    assert page.count("<script") == page.count("</script>") == 4
    assert page.count("<style") == page.count("</style>") == 1
    assert html.escape(EVIL) in page
    assert data_of(page)["groups"][0]["gain"]["names"].count(EVIL) == 1


def test_the_page_needs_nothing_from_elsewhere() -> None:
    page = report_page(methods(), "Offline")
    own = body(page)
    assert "://" not in own
    assert not re.search(r"""(src|href)\s*=\s*["']?\s*(https?:|//)""", own)
    assert "@import" not in own
    assert "url(" not in own
    assert page.count("plotly.js v") == 1
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', own)
    assert policy is not None
    assert policy[1].startswith("default-src 'none'; script-src 'sha256-")


@pytest.mark.slow
def test_many_clients_and_rounds_make_a_page_of_a_few_megabytes() -> None:
    labels = [f"label {i}" for i in range(100)]
    runs = [
        recorded(m, s, clients=3000, evaluations=250, labels=labels)
        for m in ("a", "b")
        for s in (0, 1)
    ]
    page = report_page(runs, "Large")
    own = body(page)
    assert len(own) < 1_500_000
    data = data_of(own)
    group = data["groups"][0]
    assert len(group["x"]["round"]) == 200
    assert group["x"]["round"][-1] == 4980
    assert len(group["gain"]["names"]) == 400
    assert group["gain"]["ranks"][-1] == 3000
    assert len(data["labels"]["values"]) == 60
    assert len(data["labels"]["values"][0]) == 400
    for words in (
        "At most 200 of the scored rounds",
        "400 clients are drawn",
        "150 of them",
        "400 of 3,000 clients",
        "59 commonest of 100 labels",
    ):
        assert words in own


def test_the_page_is_in_order_for_those_who_do_not_see_it() -> None:
    page = body(report_page(methods(), "Order"))
    levels = [int(level) for level in re.findall(r"<h(\d)", page)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after - before <= 1 for before, after in pairwise(levels))
    tables = page.count("<table")
    assert tables == page.count("<caption>") == page.count('role="region" tabindex="0"')
    assert not re.search(r"<th(?![^>]*scope)[ >]", page)
    charts = re.findall(r'<div class="chart"[^>]*role="img" aria-label="([^"]+)"', page)
    assert len(charts) == 5
    for landmark in ("<header", "<nav aria-label", "<main", "<footer", 'class="skip" href="#main"'):
        assert page.count(landmark) == 1
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    named = re.findall(r'<section id="([^"]+)" aria-labelledby="([^"]+)"', page)
    assert len(named) == page.count("<section") == 9
    assert all(f'<h2 id="{name}"' in page for _, name in named)
    assert '<html lang="en-US">' in page


def test_the_settings_mark_what_differs() -> None:
    page = body(report_page(methods(), "Settings"))
    marked = re.findall(r'<tr class="differs"><th scope="row"><span[^>]*>≠ </span>([^<]+)', page)
    assert marked == ["method.name"]
    assert "0 · 1 · 2" in page


def test_markdown() -> None:
    table = markdown_table([*methods(), recorded("a|b*_<i>")])
    lines = table.splitlines()
    assert len({len(re.findall(r"(?<!\\)\|", line)) for line in lines[:6]}) == 1
    assert lines[5].startswith(r"| a\|b\*\_\<i\> | 1 | ")
    assert "**" in lines[4]
    assert "±" in lines[4]
    assert "±" not in lines[5]
    assert "not the best one" in lines[7]


def test_latex() -> None:
    evil = r"a_b%&$#{}~^\x"
    table = latex_table([*methods(), recorded(evil)])
    assert r"a\_b\%\&\$\#\{\}\textasciitilde{}\textasciicircum{}\textbackslash{}x & 1" in table
    assert r"\toprule" in table
    assert r"\cmidrule(lr){3-6}\cmidrule(lr){7-10}" in table
    assert re.search(r"\\textbf\{\d+\.\d\} \$\\pm\$ \d", table)
    rows = re.search(r"\\midrule\n(.*)\n\\bottomrule", table, flags=re.DOTALL)
    assert rows is not None
    assert {len(re.findall(r"(?<!\\)&", row)) for row in rows[1].splitlines()} == {12}
    assert rows[1].count(r" \\") == 4


@pytest.mark.slow
def test_figures(tmp_path: Path) -> None:
    runs = [*methods(), recorded("_$x", network=False, names=["$\\frac{"] * 12)]
    written = write_figures(runs, tmp_path / "new", formats=("svg",))
    names = {path.name for path in written}
    assert names == {path.name for path in (tmp_path / "new").iterdir()}
    axes = ("round", "uplink-bytes", "simulated-seconds", "seconds")
    figures = [f"curve-{s}-{a}" for s in ("accuracy", "loss") for a in axes] + ["clients", "gain"]
    assert names == {f"{f}{end}.svg" for f in figures for end in ("", "-column")}
    column = (tmp_path / "new" / "gain-column.svg").read_text(encoding="utf-8")
    assert 'width="237.6pt"' in column  # 3.3 inches
    assert "<!-- _$x -->" in column
    before = (tmp_path / "new" / "clients.svg").read_bytes()
    (again,) = [p for p in write_figures(runs, tmp_path, ("svg",)) if p.name == "clients.svg"]
    assert again.read_bytes() == before
    with pytest.raises(FieldError, match="formats"):
        write_figures(runs, tmp_path, formats=("bmp",))


def test_a_real_run(tmp_path: Path) -> None:
    """From the command line to the page, two seeds."""
    config = tmp_path / "config.toml"
    config.write_text(
        'rounds = 4\ncohort = 3\neval_every = 2\n[data]\nsource = "digits"\nclients = 6\n'
        '[model]\nname = "linear"\n[method]\nname = "fedavg"\nlr = 0.1\ntau = 2\nbatch = 10\n'
    )
    runs = []
    for seed in (0, 1):
        out = tmp_path / f"run-{seed}"
        done = CliRunner().invoke(
            app, ["run", str(config), "--set", f"seed={seed}", "--out", str(out)]
        )
        assert done.exit_code == 0, done.output
        runs.append(read_run(out))
    (group,) = grouped(runs)
    assert group.rounds.tolist() == [0, 2, 4]
    for kind in KINDS:
        of = [run.summary[kind]["accuracy"]["mean"] for run in runs]
        assert float(group.last(kind, "accuracy", "mean").mean) == pytest.approx(np.mean(of))
    page = body(report_page(runs, "Digits"))
    assert "fedavg" in page
    assert "run-1" in page
    assert str(tmp_path) not in page.split('id="environment-of-runs"')[0]
    assert data_of(page)["labels"]["labels"] == list("0123456789")


# A browser: Debian's and others' names for it.
BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
in_browser = pytest.mark.skipif(
    BROWSER is None, reason="no browser: install Chromium (apt-get install chromium)"
)
CHARTS = ("curves", "distribution", "gain", "labels", "timing")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield browser
        browser.close()


Opened = Callable[..., Page]


@pytest.fixture
def opened(browser: Browser, tmp_path: Path) -> Iterator[Opened]:
    """Opens a page from disk, without a network; whatever goes wrong in it fails the test."""
    wrong: list[str] = []
    contexts: list[BrowserContext] = []

    def open_page(html: str, width: int = 1600, **options: Any) -> Page:
        path = tmp_path / "report.html"
        path.write_text(html, encoding="utf-8")
        context = browser.new_context(viewport={"width": width, "height": 900}, **options)
        context.set_offline(True)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: wrong.append(f"console: {message.text}"))
        page.on("pageerror", lambda error: wrong.append(f"error: {error}"))
        page.on("requestfailed", lambda request: wrong.append(f"failed: {request.url[:200]}"))
        page.on(
            "request",
            lambda request: (
                None
                if request.url.startswith(("file:", "data:", "blob:"))
                else wrong.append(f"asked for {request.url[:200]}")
            ),
        )
        page.goto(path.as_uri())
        page.wait_for_selector("html[data-drawn]", state="attached")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert wrong == []


@pytest.fixture(scope="module")
def usual() -> str:
    return report_page(methods(clients=20, evaluations=9), "Three methods")


def traces(page: Page, chart: str) -> int:
    """How many traces are drawn, by what they are made of."""
    layers = ".scatterlayer .trace, .boxlayer .trace, .barlayer .trace, .heatmaplayer .hm"
    return page.locator(f"#{chart}").locator(layers).count()


def overflow(page: Page) -> Any:
    return page.evaluate("document.documentElement.scrollWidth - innerWidth")


@in_browser
def test_all_charts_are_drawn(opened: Opened, usual: str) -> None:
    page = opened(usual)
    # A band and a line for each method; dots and boxes for each method and model kind.
    assert [traces(page, chart) for chart in CHARTS] == [6, 12, 1, 1, 5]
    for chart in CHARTS:
        box = page.locator(f"#{chart} .main-svg").first.bounding_box()
        assert box is not None
        assert box["width"] > 300
        assert box["height"] > 80
        assert len(page.locator(f"#{chart}").get_attribute("aria-label") or "") > 40


@in_browser
def test_a_click_in_the_legend_hides_a_method(opened: Opened, usual: str) -> None:
    page = opened(usual)
    button = page.locator("#training .legend button", has_text="pfedme")
    button.click()
    assert (traces(page, "curves"), traces(page, "distribution")) == (4, 8)
    assert button.get_attribute("aria-pressed") == "false"
    button.focus()
    page.keyboard.press("Enter")  # and back, without a mouse
    assert traces(page, "curves") == 6
    assert button.get_attribute("aria-pressed") == "true"


@in_browser
def test_selects_change_the_charts(opened: Opened, usual: str) -> None:
    page = opened(usual)
    for key, title in (
        ("uplink_bytes", "Sent by clients (MB)"),
        ("simulated_seconds", "Simulated time (h)"),
        ("seconds", "Real time (s)"),
        ("round", "Rounds"),
    ):
        page.select_option("#curve-axis", key)
        assert page.locator("#curves .xtitle").text_content() == title
    page.select_option("#curve-score", "loss")
    assert page.locator("#curves .ytitle").text_content() == "Loss"
    page.select_option("#curve-statistic", "tail")
    assert "90th percentile" in (page.locator("#curves").get_attribute("aria-label") or "")
    page.select_option("#curve-kind", "both")
    assert traces(page, "curves") == 12
    page.select_option("#box-score", "loss")
    assert page.locator("#distribution .xtitle").text_content() == "Loss"
    before = page.locator("#gain").get_attribute("aria-label")
    page.select_option("#gain-group", "2")
    assert page.locator("#gain").get_attribute("aria-label") != before
    rows = page.locator("#settings tbody tr:visible")
    all_rows = rows.count()
    page.check("#only-differences")
    assert 0 < rows.count() < all_rows


@in_browser
@pytest.mark.parametrize("width", [400, pytest.param(1600, marks=pytest.mark.slow)])
def test_the_page_is_as_wide_as_the_window(opened: Opened, usual: str, width: int) -> None:
    page = opened(usual, width)
    assert overflow(page) <= 0
    page.evaluate("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
    assert overflow(page) <= 0
    for chart in CHARTS:
        box = page.locator(f"#{chart} .main-svg").first.bounding_box()
        assert box is not None
        assert box["x"] > 0
        assert box["x"] + box["width"] <= width


@in_browser
def test_charts_follow_the_window(opened: Opened, usual: str) -> None:
    page = opened(usual)
    page.set_viewport_size({"width": 400, "height": 900})
    # Not wait_for_function: the page's policy lets nobody evaluate text.
    page.evaluate(
        """() => new Promise((done) => {
          const look = () => document.querySelector("#curves .main-svg").clientWidth < 400
            ? done() : setTimeout(look, 50);
          look();
        })"""
    )
    assert overflow(page) <= 0


# The least contrast of any text against what is behind it, and that text.
CONTRAST = """() => {
  const parts = (c) => (c.match(/[\\d.]+/g) || []).map(Number);
  const light = (rgb) => rgb.slice(0, 3).map((v) => v / 255)
    .map((v) => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (e) => {
    for (; e; e = e.parentElement) {
      const c = parts(getComputedStyle(e).backgroundColor);
      if (c.length === 3 || c[3] === 1) return c;
    }
    return [255, 255, 255];
  };
  let least = [99, ""];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const e = walker.currentNode.parentElement, said = walker.currentNode.textContent.trim();
    if (!said || !e.getClientRects().length) continue;
    if (e.closest("script, style, noscript, .unseen")) continue;
    const style = getComputedStyle(e);
    const own = parts(e.closest("svg") ? style.fill : style.color);
    const [a, b] = [light(own), light(behind(e))].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05);
    if (ratio < least[0]) least = [ratio, said];
  }
  return least;
}"""


@in_browser
@pytest.mark.parametrize("scheme", ["light", pytest.param("dark", marks=pytest.mark.slow)])
def test_text_stands_out(opened: Opened, usual: str, scheme: str) -> None:
    page = opened(usual, color_scheme=scheme)
    page.evaluate("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
    ratio, text = page.evaluate(CONTRAST)
    assert ratio >= 4.5, text


@in_browser
def test_light_and_dark(opened: Opened, usual: str) -> None:
    page = opened(usual, color_scheme="dark")

    def colors() -> Any:
        return page.evaluate(
            "[getComputedStyle(document.body).backgroundColor,"
            " getComputedStyle(document.querySelector('#curves .xtitle')).fill]"
        )

    dark = colors()
    assert page.locator("html").get_attribute("data-theme") == "dark"
    page.emulate_media(color_scheme="light")
    page.wait_for_selector("html[data-theme=light]")
    light = colors()
    assert all(a != b for a, b in zip(light, dark, strict=True))
    page.get_by_role("button", name="Dark colors").click()
    assert colors() == dark
    page.reload()  # what was chosen is remembered
    page.wait_for_selector("html[data-drawn]", state="attached")
    assert colors() == dark
    assert page.get_by_role("button", name="Light colors").count() == 1


@in_browser
def test_the_keyboard_reaches_all(opened: Opened, usual: str) -> None:
    page = opened(usual)
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    reached = set()
    for _ in range(60):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.id || document.activeElement.tagName"))
    wanted = {"theme", "curve-axis", "curve-score", "curve-kind", "box-score", "gain-group"}
    assert wanted | {"only-differences", "SUMMARY", "A", "BUTTON"} <= reached


@in_browser
@pytest.mark.parametrize("many", [False, True])
def test_what_names_say_is_shown_and_not_done(opened: Opened, many: bool) -> None:
    marked = ["<b>bold</b>", "a &amp; b", "%{x} $x^2$", '<a href="javascript:0">x</a>']
    clients = 80 if many else 12
    names = [*marked, *(f"{EVIL}{i}" for i in range(clients - 4))]
    labels = ["<i>it</i>", "$y$", EVIL]
    page = opened(
        report_page(
            [
                recorded(m, names=names, clients=clients, labels=labels, note=EVIL)
                for m in (EVIL, "b")
            ],
            EVIL,
        )
    )
    assert page.title() == EVIL
    assert page.locator("h1").text_content() == EVIL
    assert page.locator("svg a, svg script, svg image[href^=http]").count() == 0
    ticks = page.locator("#labels .ytick text").all_text_contents()
    assert ticks[:2] == ["<i>it</i>", "$y$"]
    if not many:
        shown = page.locator("#labels .xtick text").all_text_contents()
        assert shown[:3] == ["<b>bold</b>", "a &amp; b", "%{x} $x^2$"]
    assert "<script>" in "".join(page.locator("#distribution .ytick text").all_text_contents())
    page.locator("#gain").scroll_into_view_if_needed()
    bar = page.locator("#gain .point path").first.bounding_box()
    assert bar is not None
    page.mouse.move(bar["x"] + bar["width"] / 2, bar["y"] + bar["height"] / 2)
    page.wait_for_selector("#gain .hoverlayer .hovertext")
    hover = page.locator("#gain .hoverlayer .hovertext").text_content() or ""
    assert any(name in hover for name in names)
    assert "points" in hover


@in_browser
@pytest.mark.parametrize("alone", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_methods_without_a_global_model_are_drawn(opened: Opened, alone: bool) -> None:
    runs = personal_and_global()
    page = opened(report_page(runs[:2] if alone else runs, "Personal"))
    drawn = [chart for chart in CHARTS if page.locator(f"#{chart}").count()]
    assert drawn == [chart for chart in CHARTS if not (alone and chart == "gain")]
    assert all(traces(page, chart) for chart in drawn)
    page.select_option("#curve-kind", "personalized" if alone else "global")
    assert traces(page, "curves") == 2  # a curve of one method, and its interval
    if not alone:
        page.select_option("#curve-kind", "both")
        assert traces(page, "curves") == 6
        label = page.locator("#gain").get_attribute("aria-label") or ""
        assert "client by client, of fedavg. " in label
        assert label.endswith(".")


@in_browser
@pytest.mark.parametrize("regression", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_one_run_is_drawn(opened: Opened, regression: bool) -> None:
    page = opened(report_page([recorded(regression=regression, network=False)], "One"), width=400)
    drawn = [chart for chart in CHARTS if page.locator(f"#{chart}").count()]
    assert drawn == [chart for chart in CHARTS if not (regression and chart == "labels")]
    assert all(traces(page, chart) for chart in drawn)
    assert overflow(page) <= 0
