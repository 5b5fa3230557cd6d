"""Benchmarks: every method is tuned alike, chosen on validation data, and the words are right."""

import csv
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from perfed import Config, ConfigError
from perfed.methods import find_method
from perfed.methods.registry import _BUILT_IN
from perfed.report.benchmark import (
    HEADER,
    benchmark_cells,
    benchmark_csv,
    benchmark_json,
    benchmark_latex,
    benchmark_markdown,
    clients_csv,
    recommendation_lines,
    recommended_config,
)
from perfed.runs.batch import Data, data_of
from perfed.runs.benchmark import (
    Benchmark,
    BenchmarkRun,
    benchmark_names,
    benchmark_summary,
    run_benchmark,
    tuned_methods,
)
from perfed.runs.benchmark_results import (
    BenchmarkResults,
    MethodResult,
    Recommendation,
    benchmark_results,
    versus,
)
from perfed.runs.recording import Recording
from perfed.runs.sweep import GridPoint, Sweep
from test_cli import here

CONFIG = """
rounds = 5
cohort = 3
[data]
source = "digits"
split = "iid"
clients = 4
examples = 200
[model]
name = "mlr"
[method]
name = "pfedme"
local_rounds = 3
batch = 10
"""


def quiet(*_: object) -> None:
    return None


def tiny() -> Benchmark:
    """Two methods on a few digits."""
    one = Benchmark.named("heart", quick=True)
    values = {
        "rounds": 2,
        "cohort": 4,
        "data": {"source": "digits", "split": "iid", "clients": 4, "examples": 200},
        "model": {"name": "mlr"},
    }
    return replace(one, values=values).only(["local", "fedavg"])


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[BenchmarkRun, BenchmarkResults]:
    run = run_benchmark(tiny(), tmp_path_factory.mktemp("benchmark"), quiet, quiet)
    return run, benchmark_results(run)


def test_all_built_in_methods_are_compared() -> None:
    assert {m.settings["name"] for m in tuned_methods()} == set(_BUILT_IN)
    assert {m.name for m in tuned_methods()} > {m.name for m in tuned_methods(quick=True)}


@pytest.mark.parametrize("name", benchmark_names())
def test_every_method_has_the_same_number_of_trials(name: str) -> None:
    """And the same rounds, data and cohort."""
    benchmark = Benchmark.named(name)
    points = benchmark.points()  # checks them
    assert {sum(p.method == m.name for p in points) for m in benchmark.methods} == {6}
    assert len({p.label for p in points}) == len(points)
    for key in ("rounds", "data", "model", "cohort"):
        assert len({json.dumps(p.values[key]) for p in points}) == 1
    assert {p.values["method"]["batch"] for p in points} == {benchmark.batch}
    quick = Benchmark.named(name, quick=True)
    assert {len(method.trials(quick.trials)) for method in quick.methods} == {2}
    assert quick.values["rounds"] < benchmark.values["rounds"]
    assert (benchmark.seeds, quick.seeds) == (5, 2)
    assert benchmark_summary(name).endswith(".")


def test_local_steps_are_equal() -> None:
    benchmark = Benchmark.named("digits")
    for point in benchmark.points()[::6]:
        method: Any = Config.checked(point.values).build_preset().method
        steps = getattr(method, method.local_steps)
        if point.method == "fedrep":  # on the head, then on the body
            steps += method.body_steps
        assert steps == benchmark.local_steps


def test_all_values_of_the_grids_are_valid() -> None:
    for point in Benchmark.named("digits").points():
        settings = point.values["method"]
        method_class = find_method(settings["name"])
        method_class(**{k: v for k, v in settings.items() if k != "name"})


def test_what_is_tried_is_spread_over_the_grid() -> None:
    (method,) = [m for m in tuned_methods() if m.name == "ditto"]
    every = method.trials(None)
    assert method.trials(2) == [every[0], every[3]]
    assert method.trials(100) == every
    assert len(set(every)) == 6


def test_numbers_are_those_of_the_summaries(
    finished: tuple[BenchmarkRun, BenchmarkResults],
) -> None:
    run, results = finished
    by_method = {m.method: m for m in results.methods}
    for outcome in run.outcomes:
        seeds = 2 if outcome.tested else 1
        assert len(outcome.scores) == seeds
    assert sum(not o.tested for o in run.outcomes) == 4
    (point,) = [o.point for o in run.outcomes if o.tested and o.point.method == "fedavg"]
    summaries: list[Any] = [
        json.loads((run.sweep.folder_of(point, "test", seed) / "summary.json").read_text())
        for seed in range(2)
    ]
    own = by_method["fedavg"]
    means = [s["global"]["accuracy"]["mean"] for s in summaries]
    assert own.mean == pytest.approx(np.mean(means))
    assert own.half == pytest.approx(12.706 * abs(means[0] - means[1]) / 2, rel=1e-3)
    assert own.settings == point.settings
    assert own.hurt is None  # its global model is what is scored
    tenth = [s["global"]["accuracy"]["p10"] for s in summaries]
    assert own.tenth == pytest.approx(np.mean(tenth))
    sent = [s["traffic"]["client_uplink_bytes"] for s in summaries]
    assert own.uplink == np.mean(sent) > 2 * (64 * 10 + 10) * 4  # rounds, parameters, bytes
    local = by_method["local"]
    assert (local.uplink, local.downlink, local.below_local) == (0, 0, None)
    assert own.below_local is not None
    best = max(results.methods, key=lambda m: m.validation)
    assert results.recommendation is not None
    assert results.recommendation.method == best.method
    assert results.recommendation.mean == best.validation


def test_resuming_trains_nothing_again(
    finished: tuple[BenchmarkRun, BenchmarkResults], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, results = finished

    def begin(*_: object) -> Recording:
        raise AssertionError("nothing is begun anew")

    monkeypatch.setattr(Recording, "begin", begin)
    again = run_benchmark(tiny(), run.sweep.folder, quiet, quiet)
    assert benchmark_json(benchmark_results(again)) == benchmark_json(results)
    other = replace(tiny(), values=tiny().values | {"rounds": 3})
    with pytest.raises(ConfigError, match="holds another"):
        run_benchmark(other, run.sweep.folder, quiet, quiet)


def test_files_say_the_same(finished: tuple[BenchmarkRun, BenchmarkResults]) -> None:
    _, results = finished
    _, rows = benchmark_cells(results)
    markdown, latex = benchmark_markdown(results), benchmark_latex(results)
    for row in rows:
        assert row[1] in markdown
        assert row[1].replace("±", r"$\pm$") in latex
    lines = list(csv.DictReader(benchmark_csv(results).splitlines()))
    assert {line["method"] for line in lines} == {"local", "fedavg"}
    assert float(lines[0]["mean"]) == max(m.mean for m in results.methods)
    read = json.loads(benchmark_json(results))
    assert read["recommendation"]["text"] == recommendation_lines(results)
    assert results.recommendation is not None
    clients = list(csv.DictReader(clients_csv(results.recommendation).splitlines()))
    assert [line["client"] for line in clients] == list(results.recommendation.names)


def recommendation(other: np.ndarray, own: np.ndarray) -> list[str]:
    """The words for a method's clients against those of Local and of the global model."""
    names = tuple(f"c{i}" for i in range(len(own)))
    against = versus(own, other, "local", "accuracy")
    common = versus(own, other, "the global model (fedavg)", "accuracy")
    point = GridPoint("ditto", ("method.lam=1.0",), {})
    found = Recommendation(
        "ditto", point, {"rounds": 3}, "accuracy", float(own.mean()), names, own, (9,) * len(own),
        against, common, () if against.told_apart else ("local",),
    )  # fmt: skip
    methods = (MethodResult("ditto", mean=0.9), MethodResult("local", mean=0.8))
    results = BenchmarkResults("x", "X.", "accuracy", 1, 2, 3, methods, found, ())
    written = recommended_config(found, results)
    assert written.startswith(HEADER)
    assert written.endswith("\n\nrounds = 3\n")
    return recommendation_lines(results)


def test_a_clear_gain_is_told_apart() -> None:
    lines = recommendation(np.full(6, 0.7), np.array([0.9, 0.88, 0.91, 0.9, 0.92, 0.89]))
    assert lines[0] == (
        "Recommended: ditto (method.lam=1.0), the best mean accuracy on validation data: 90.0 %, "
        "over 6 clients."
    )
    assert lines[1].startswith("Against Local: +20.0 points ± 1.5 (paired 95 % interval")
    assert lines[1].endswith(": better.")
    assert lines[2] == "6 of 6 clients gain over Local, and none would be better off with it."
    assert lines[3].startswith("Against the global model of FedAvg: +20.0 points")
    assert lines[-1] == "It is told apart from all the others."


def test_noise_is_not_told_apart() -> None:
    lines = recommendation(np.array([0.5, 0.9, 0.7, 0.8]), np.array([0.9, 0.6, 0.7, 0.75]))
    assert lines[1].endswith(": not told apart.")
    assert lines[2] == "1 of 4 clients gain over Local; 2 would be better off alone: c1, c3."
    assert lines[3] == "So training alone, which sends nothing, may do as well on these data."
    assert lines[-1] == "Not told apart from it: local."


def test_local_may_be_the_best(finished: tuple[BenchmarkRun, BenchmarkResults]) -> None:
    _, results = finished
    assert results.recommendation is not None
    alone = results.recommendation._replace(method="local", local=None, common=None)
    lines = recommendation_lines(results._replace(recommendation=alone))
    assert "Every client trains alone: no method that shares a model has a better mean." in lines
    assert "all of them failed" in recommendation_lines(results._replace(recommendation=None))[0]


def test_an_own_configuration(tmp_path: Path) -> None:
    """Data, rounds and local work are the file's; Local has all clients in every round."""
    path = tmp_path / "own.toml"
    path.write_text(CONFIG)
    benchmark = Benchmark.of_config(path).only(["local", "ditto"])
    assert (benchmark.local_steps, benchmark.batch) == (3, 10)
    points = benchmark.points(4)
    assert {(p.method, p.values["cohort"]) for p in points} == {("local", 4), ("ditto", 3)}
    assert {p.values["method"].get("personal_steps") for p in points} == {None, 3}
    assert points[0].values["output"]["personal_models"] == "none"
    short = Benchmark.of_config(path, quick=True).only(["local", "ditto"])
    assert short.points()[0].values["rounds"] == 1
    ready = short.config_of(short.points()[2])
    assert (ready["rounds"], ready["method"]["name"]) == (5, "ditto")
    assert "output" not in ready
    for setting in ("seed = 1\n", "validation = 0.5\n"):
        path.write_text(setting + CONFIG)
        with pytest.raises(ConfigError, match="a benchmark sets it itself"):
            Benchmark.of_config(path)


def test_a_validation_part_that_leaves_clients_out(tmp_path: Path) -> None:
    """The cohort is then all of the others."""
    benchmark = Benchmark.named("digits", True, ["rounds=1"]).only(["local"])
    values = benchmark.points()[0].values | {"validation": 0.25}
    assert data_of(Config.checked(values), Data()).clients < 20
    points = tuple(benchmark.points())
    used = Sweep(points, 1, tmp_path)._on_validation(points[0], Data())
    assert used["cohort"] == data_of(Config.checked(values), Data()).clients


def check_refused(tmp_path: Path, words: str) -> Callable[..., None]:
    def check(*arguments: object) -> None:
        done = here("benchmark", *arguments, "--out", tmp_path / "no")
        assert done.exit_code == 2, done.output
        assert words in done.stderr
        assert not (tmp_path / "no").exists()

    return check


def test_bad_input_is_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_refused(tmp_path, "no such benchmark, and no file; there are digits, cifar10-d")("digit")
    check_refused(tmp_path, "--methods fedavgg: there are local, fedavg,")(
        "digits", "--methods", "local,fedavgg"
    )
    check_refused(tmp_path, "cannot read")(tmp_path / "none.toml")
    check_refused(tmp_path, "a benchmark sets method itself")("digits", "--set", "method.lr=1")
    check_refused(tmp_path, "model.hiden: no such setting")("digits", "--set", "model.hiden=1")
    monkeypatch.setenv("PERFED_DATA", str(tmp_path))
    monkeypatch.setenv("PERFED_DATA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PERFED_MIRROR", "http://127.0.0.1:9")
    check_refused(tmp_path, "MNIST")("mnist-dirichlet", "--quick")
    own = tmp_path / "own.toml"
    own.write_text(CONFIG)
    (tmp_path / "own-recommended.toml").write_text("rounds = 1\n")
    check_refused(tmp_path, "it is there already")(own)
    listed = here("benchmark", "--list")
    assert listed.exit_code == 0
    assert all(name in listed.stdout for name in benchmark_names())


@pytest.mark.slow
def test_from_the_command_line(tmp_path: Path) -> None:
    own = tmp_path / "own.toml"
    own.write_text(CONFIG)
    out = tmp_path / "out"
    done = here("benchmark", own, "--quick", "--methods", "local,ditto,fedavg", "--out", out)
    assert done.exit_code == 0, done.output
    assert "Recommended: " in done.stdout
    for name in ("table.md", "table.tex", "results.csv", "results.json", "clients.csv"):
        assert (out / name).stat().st_size > 0
    assert "</html>" in (out / "report.html").read_text()
    Config.load(tmp_path / "own-recommended.toml").build()
    again = here("benchmark", own, "--quick", "--methods", "local,ditto,fedavg", "--out", out)
    assert again.exit_code == 0, again.output  # it may replace what it has written itself
