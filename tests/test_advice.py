"""Advice and conditions: better than the defaults, within targets, and right about what breaks."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from perfed import FedAvg, LowPrecision, PerFedAvg, PFedMe, Sign, Vectorized
from perfed.core.errors import ConfigError, DivergedError
from perfed.data import Federation
from perfed.methods.schedules import Harmonic, Polynomial
from perfed.runs.config import Config
from perfed.theory.advice import advise, candidates
from perfed.theory.conditions import Condition, Diagnosis
from perfed.theory.diagnosis import diagnose
from perfed.theory.pfedme import inner_steps
from perfed.theory.targets import message_bytes, sent_examples, within_bytes, within_seconds
from problems import QUADRATIC, experiment, federation, noisy, quadratics
from test_theory import some_constants

SYNTHETIC: dict[str, Any] = {
    "rounds": 60,
    "cohort": 5,
    "data": {"source": "synthetic", "alpha": 0.5, "beta": 0.5, "clients": 12, "sizes": "pfedme"},
    "model": {"name": "mlr"},
}


def perfed(*arguments: Any, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "perfed", *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, **environment}
    )


def loss(values: dict[str, Any]) -> float:
    config = Config.checked(values)
    return float(config.train(config.build()).scores["personalized"].loss.mean())


@pytest.mark.slow
@pytest.mark.parametrize("method", ["per-fedavg", "pfedme"])
def test_advice_beats_the_defaults(method: str) -> None:
    """On held-out data, which it has not seen; and everything it says is in the configuration."""
    values = SYNTHETIC | {"method": {"name": method}}
    advice = advise(values)
    assert loss(advice.values) <= loss(values)
    assert advice.trials[0].loss <= advice.given.loss
    assert [t.loss for t in advice.trials] != [advice.trials[0].loss] * len(advice.trials)
    said = {line.setting: line.value for line in advice.reasons}
    for setting, value in said.items():
        section, _, key = setting.partition(".")
        if section == "method" and key:
            assert Config.checked(advice.values).method.settings()[key] == value
    if method == "per-fedavg":
        assert said["method.alpha"] <= 1.01 / np.median(advice.constants.client_L)
    assert values["method"] == {"name": method}  # what was given is not changed


@pytest.mark.slow
def test_a_target_of_bytes_is_kept() -> None:
    """Coarser messages where float32's do not fit; fewer rounds where none do; an error at last."""
    values = SYNTHETIC | {"method": {"name": "fedavg"}}
    engine = Config.checked(values).build()
    message = 4 * sum(leaf.size for leaf in engine.init().params.values()) + 10
    everything = 60 * 5 * message
    examples, config = sent_examples(engine), Config.checked(values)

    def within(budget: float) -> dict[str, Any]:
        return {line.setting: line.value for line in within_bytes(config, engine, examples, budget)}

    plenty, less, little, least = (within(everything / k) for k in (0.32, 8, 100, 3000))
    assert plenty == {"codec.name": "float32", "cohort": 12}
    assert less["codec.levels"] > little["codec.levels"] >= least["codec.levels"] == 1
    assert least["rounds"] < 60
    with pytest.raises(ConfigError, match="one round of 5 messages takes"):
        within(20)
    budget = everything / 100
    advised = Config.checked(advise(values, target_bytes=budget).values)
    assert advised.train(advised.build()).traffic.uplink.sum() <= budget


@pytest.mark.slow
def test_a_target_of_time_counts_real_cohorts() -> None:
    """Clients of other speeds: a run of the rounds that are advised takes as long as it may."""
    slow = {"ratio": 100.0, "client_speed": [10.0] * 3 + [0.1] * 9}
    values = SYNTHETIC | {"method": {"name": "fedavg"}, "network": slow}
    config = Config.checked(values)
    engine = config.build()
    lines = {s: v for s, v, _ in within_seconds(config, engine, sent_examples(engine), 200.0)}
    codec = {"name": lines["codec.name"]}
    if "codec.levels" in lines:
        codec["levels"] = lines["codec.levels"]
    method = {"name": "fedavg", "tau": lines["method.tau"]}
    advised = Config.checked(values | {"codec": codec, "method": method, "rounds": lines["rounds"]})
    seconds = advised.train(advised.build()).costs.seconds
    assert seconds is not None
    assert 100 < seconds[-1] < 230
    with pytest.raises(ConfigError, match="a single round takes longer"):
        within_seconds(config, engine, sent_examples(engine), 1e-6)


def test_a_second_message_is_counted() -> None:
    alone, both = (
        Config.checked(SYNTHETIC | {"method": {"name": "per-fedavg", "send_iterate": sent}}).build()
        for sent in (False, True)
    )
    assert message_bytes(0, sent_examples(both)) == 2 * message_bytes(0, sent_examples(alone))


@pytest.mark.slow
def test_targets_are_kept_whatever_was_given() -> None:
    """Another codec's settings are replaced, the downlink is kept, recipes are resolved."""
    sparse = {"method": {"name": "fedavg"}, "codec": {"name": "top-k", "fraction": 0.05}}
    counted = Config.checked(advise(SYNTHETIC | sparse, target_bytes=1e5).values)
    assert counted.train(counted.build()).traffic.uplink.sum() <= 1e5
    recipe = {"method": {"name": "fedpaq", "lr": 0.01, "r": 5},
              "codec": {"downlink": {"name": "float16"}}}  # fmt: skip
    own = {key: value for key, value in SYNTHETIC.items() if key != "cohort"} | recipe
    advised = advise(own, target_bytes=1e9).values
    assert advised["codec"]["downlink"] == {"name": "float16"}
    assert (advised["method"]["name"], advised["cohort"]) == ("fedavg", 12)


def test_targets_that_make_no_sense_are_refused_at_once() -> None:
    network = {"ratio": 1.0}
    for values, target, said in (
        ({"method": {"name": "fedavg"}}, {"target_seconds": 20.0}, "network"),
        (
            {"method": {"name": "fedavg"}, "network": network},
            {"target_seconds": 1.0, "target_bytes": 1.0},
            "give one of",
        ),
        ({"method": {"name": "local"}}, {"target_bytes": 1e6}, "sends nothing"),
        ({"method": {"name": "fedavg"}, "network": {"ratio": 1.0}}, {"target_seconds": 0.0}, "0.0"),
        ({"method": {"name": "fedavg"}}, {"target_bytes": float("nan")}, "nan"),
    ):
        with pytest.raises(ConfigError, match=said):
            advise(SYNTHETIC | values, **target)  # type: ignore[arg-type]


@pytest.mark.slow
def test_advice_for_all_clients_at_once_and_for_a_validated_run() -> None:
    """A client with one example drops out of the pilot; `validation` stays out of choosing."""
    rng = np.random.default_rng(0)
    parts = [(rng.normal(size=(n, 60)).astype(np.float32), rng.integers(0, 10, n))
             for n in (1, *[30] * 11)]  # fmt: skip
    federation = Federation.from_arrays(parts, parts, classes=10)
    values = SYNTHETIC | {"cohort": 12, "rounds": 5, "method": {"name": "local", "lr": 0.001}}
    assert advise(values, federation=federation).values["cohort"] == 12
    validated = SYNTHETIC | {"validation": 0.3, "method": {"name": "local"}}
    assert advise(validated).values["validation"] == 0.3


@pytest.mark.parametrize("curvature", [1.0, 0.2, 30.0])
def test_every_candidate_meets_its_own_limits(curvature: float) -> None:
    """pFedMe's inner rate is for the candidate's own lambda, not for the smallest one."""
    values = SYNTHETIC | {"method": {"name": "pfedme"}}
    L = np.array([0.3, 1.0, 1.0, 1.0, 2.0]) * curvature
    constants = replace(some_constants(L=float(L.max())), client_L=L)
    _, tried = candidates(Config.checked(values), constants)
    assert len({c["lam"] for c in tried}) == 3
    for chosen in tried:
        made = Config.checked(values | {"method": {"name": "pfedme"} | chosen}).build_preset()
        found = diagnose(experiment(made.method), replace(constants, q=0.0), 60)
        for text in ("inner_lr", "eta lambda"):
            assert named(found, text).holds


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fedavg", "pfedme"])
def test_advice_never_sees_held_out_data(name: str) -> None:
    """All held-out rows replaced by noise: the same choices, to the last digit."""
    values = SYNTHETIC | {"rounds": 20, "method": {"name": name}}
    data = Config.checked(values).build_federation()
    one, other = (advise(values, federation=federation) for federation in (data, noisy(data)))
    assert one.values == other.values
    assert one.trials == other.trials
    assert one.reasons == other.reasons


def test_nothing_is_advised_where_nothing_can_be_measured() -> None:
    """Inputs so large that softmax is flat: an error that says what to do."""
    rng = np.random.default_rng(0)
    parts = [((1e25 * rng.normal(size=(9, 60))).astype(np.float32), rng.integers(0, 10, 9))
             for _ in range(12)]  # fmt: skip
    values = SYNTHETIC | {"method": {"name": "local"}}
    with pytest.raises(ConfigError, match="standardize"):
        advise(values, federation=Federation.from_arrays(parts, parts, classes=10))


def of(method: Any, rounds: int = 100, cohort: int = 5, **constants: float) -> Diagnosis:
    made = experiment(method, cohort=cohort)
    return diagnose(
        made, replace(some_constants(**constants), q=made.pipeline.variance((4,))), rounds
    )


def terms(diagnosis: Diagnosis, which: int = 0) -> dict[str, float]:
    return diagnosis.bounds[which].terms


def named(diagnosis: Diagnosis, start: str) -> Condition:
    (found,) = [c for c in diagnosis.conditions if c.text.startswith(start)]
    return found


def test_conditions_are_the_papers() -> None:
    """Each limit with constants of other sizes, and factors on both sides of it."""
    per = of(PerFedAvg(alpha=0.5, beta=0.01, tau=5), L=4, rho=2, B=3)
    alpha, beta = named(per, "alpha"), named(per, "beta <= 1/(10")
    assert (alpha.limit, alpha.factor, alpha.holds) == (0.25, 2.0, False)
    L_F = 4 * 4 + 0.5 * 2 * 3
    assert beta.limit == pytest.approx(1 / (10 * 5 * L_F))
    assert beta.factor == pytest.approx(0.01 * 50 * L_F)
    assert per.derived["L_F"] == L_F
    assert of(PerFedAvg(alpha=0.2), L=4).broken[0].text.startswith("beta")

    nonconvex = of(PFedMe(lam=20, eta=1e-8, local_rounds=2, beta=2), L=10, mu=-1)
    assert nonconvex.bounds[0].source == "pFedMe, Theorem 2 (a)"
    assert named(nonconvex, "lambda >=").limit == pytest.approx(801**0.5)
    assert named(nonconvex, "lambda > 2").limit == pytest.approx(800**0.5)
    assert named(nonconvex, "eta <=").limit == pytest.approx(1 / (75 * 20**3) / 4)
    assert named(nonconvex, "eta <=").holds
    assert (terms(nonconvex)["sampling"], terms(nonconvex)["drift"]) == (0, inf)
    some = of(PFedMe(lam=20), L=10, mu=-1, cohort=2)
    assert terms(some)["sampling"] == inf
    convex = of(PFedMe(lam=6, eta=1e-3, local_rounds=2, beta=2, inner_lr=0.05), L=10, mu=3)
    assert convex.bounds[0].source == "pFedMe, Theorem 1 (a)"
    assert convex.derived["mu_F"] == pytest.approx(2)
    assert convex.derived["kappa"] == pytest.approx(16 / 9)
    assert named(convex, "inner_lr").limit == pytest.approx(2 / 16)
    assert named(convex, "eta lambda").value == pytest.approx(0.006)
    assert not named(of(PFedMe(beta=0.5), mu=1), "beta >=").holds
    assert named(of(PFedMe(beta=1.0), mu=1), "beta >=").holds

    avg = of(FedAvg(lr=0.1, tau=4), rounds=25, cohort=2, L=3)
    assert named(avg, "lr <= 1/(L sqrt(T))").limit == pytest.approx(1 / 30)
    assert named(avg, "lr < 2/L").limit == pytest.approx(2 / 3)
    lost = 4 * 3 / (2 * 4)
    assert named(avg, "tau").limit == pytest.approx(((lost**2 + 0.8) ** 0.5 - lost) / 8 * 10)
    slow = of(FedAvg(lr=8.0, tau=4, schedule=Harmonic()), mu=0.5, L=1)
    assert named(slow, "4/lr").factor == pytest.approx(1)
    assert (
        slow.derived["k_0"]
        == of(FedAvg(lr=8.0, tau=4, schedule=Harmonic()), mu=9.0, L=1).derived["k_0"]
    )
    assert not any(c.text.startswith("lr <") for c in slow.conditions)
    first_order = of(PerFedAvg(variant="fo", adapt_steps=3))
    assert {"the Hessian term is kept", "one adaptation step"} <= {
        c.text for c in first_order.broken
    }
    decaying = of(PerFedAvg(schedule=Polynomial(0.5)), rounds=4)
    assert (decaying.bounds, named(decaying, "a constant beta").holds) == ([], False)
    run = experiment(PFedMe(), weighting="size", sampling="epochs", codec=LowPrecision(1))
    broken = {c.text for c in diagnose(run, some_constants(), 10).broken}
    assert {"uniform averages", "independent batches", "messages without loss"} <= broken


def test_a_biased_codec_has_no_bound() -> None:
    made = experiment(FedAvg(), codec=Sign())
    found = diagnose(made, replace(some_constants(), q=None), 10)
    assert not found.bounds
    assert not named(found, "the codec is unbiased").holds
    quantized = experiment(FedAvg(), codec=LowPrecision(1))
    q = quantized.pipeline.variance((4,))
    assert diagnose(quantized, replace(some_constants(), q=q), 10).derived["q"] == q == 2


def test_inner_steps_leave_a_tenth() -> None:
    """On a quadratic in its worst direction, K steps leave at most a tenth, and K - 1 more."""
    lam, L, mu = 2.0, 10.0, 0.5
    rate = 1 / (lam + L)
    K = inner_steps(lam, L, mu)
    left = 1 - rate * (lam + mu)
    assert left**K <= 0.1 < left ** (K - 1)
    assert inner_steps(lam, L, mu, inner_lr=1.0) == inf  # it diverges
    left = 1.9 - 1  # in the sharpest direction
    K = inner_steps(lam, L, mu, inner_lr=1.9 / (lam + L))
    assert left**K <= 0.1 < left ** (K - 1)
    flat = of(PFedMe(lam=1.0, inner_lr=0.5, inner_steps=5), L=1, mu=-1)
    assert not named(flat, "K leaves").holds


def test_breaking_a_condition_tenfold_diverges() -> None:
    """Plain steps below 2/L settle; ten times above, the loss grows without bound."""
    data = federation(4)
    L = max(np.linalg.eigvalsh(client.A).max() for client in quadratics(data))
    for factor, settles in ((0.5, True), (10.0, False)):
        made = experiment(FedAvg(lr=2 * factor / L, tau=5, batch="full"), data, task=QUADRATIC)
        limit = named(diagnose(made, replace(some_constants(L=L), q=0.0), 30), "lr < 2/L")
        assert limit.holds == settles
        engine = Vectorized(made)
        if settles:
            before, after = (engine.advance(engine.init(), k).params for k in (0, 30))
            assert np.abs(after).max() < 10 * np.abs(before).max()
        else:
            with pytest.raises(DivergedError, match="perfed diagnose"):
                engine.advance(engine.init(), 60)


CONFIG = """
rounds = 30
cohort = 5
[data]
source = "synthetic"
alpha = 0.5
beta = 0.5
clients = 12
[model]
name = "mlr"
[method]
name = "per-fedavg"
"""


@pytest.mark.slow
def test_diagnose_and_advise_from_the_command_line(tmp_path: Path) -> None:
    """Real processes: a diagnosis, a run with its panel, advice that runs as it was written."""
    (tmp_path / "c.toml").write_text(CONFIG)
    config, out = tmp_path / "c.toml", tmp_path / "out"
    files = ("--out", tmp_path / "t.json", "--picture", tmp_path / "d.png")
    options = ("--after", 5, "--distances", "features")
    found = perfed("diagnose", config, *files, *options, COLUMNS="120")
    assert found.returncode == 0, found.stderr
    for said in ("sigma_H", "beta <= 1/(10 tau L_F)", "broken", "clients drift apart", "groups"):
        assert said in found.stdout
    theory = json.loads((tmp_path / "t.json").read_text())
    assert (tmp_path / "d.png").stat().st_size > 10_000
    assert theory["distance"]["on"] == "features"
    assert "after 5 rounds" in theory["at"]
    assert theory["bounds"][0]["source"] == "Per-FedAvg, Theorem 4.5"
    assert len(theory["distance"]["value"]) == len(theory["client_L"]) == 12

    assert perfed("run", config, "--out", out).returncode == 0
    assert 'id="theory"' not in (out / "report.html").read_text()
    of_run = perfed("diagnose", out)
    assert of_run.returncode == 0, of_run.stderr
    page = (out / "report.html").read_text()
    assert 'id="theory"' in page
    assert "What breaking it risks" in page
    none = perfed("diagnose", tmp_path)
    assert none.returncode == 2
    assert "is not a run folder" in none.stderr
    wrong = perfed("diagnose", out, "--after", 3)
    assert wrong.returncode == 2
    assert "--after" in wrong.stderr

    advised = perfed("advise", config, COLUMNS="120")
    assert advised.returncode == 0, advised.stderr
    assert "best of 21 candidates" in advised.stdout
    again = perfed("advise", config)
    assert again.returncode == 2
    assert "--overwrite" in again.stderr
    ran = perfed("run", tmp_path / "c-advised.toml")
    assert ran.returncode == 0, ran.stderr
    text = (tmp_path / "c-advised.toml").read_text()
    assert text.startswith("# Advised for")
    assert "validation loss" in text
