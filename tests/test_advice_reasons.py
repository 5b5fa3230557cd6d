"""What advice says and why, word for word, from constants that are given here."""

from math import ceil
from typing import Any

import jax
import numpy as np
import pytest

from perfed import Float32, LowPrecision, load
from perfed.core.errors import ConfigError
from perfed.core.random import Purpose, fold
from perfed.runs.config import Config
from perfed.simulation import Simulator, Traffic
from perfed.theory import advice, bounds, targets
from perfed.theory.advice import candidates
from perfed.theory.pilot import PilotTrial
from perfed.theory.targets import Reason
from test_theory import some_constants

CONSTANTS = some_constants(
    L=4.0, mu=0.5, sigma_G=10.0, gamma_G=2.0, client_L=np.array([1.0, 2.0, 2.0, 4.0, 3.0])
)


def config(method: dict[str, Any], **more: Any) -> Config:
    data = {"source": "digits", "clients": 5, "split": "iid"}
    values = {"data": data, "cohort": 2, "model": {"name": "mlr"}, "method": method}
    return Config.checked(values | more)


def batch(value: Any, **constants: float) -> list[tuple[str, Any, str]]:
    given = config({"name": "fedavg", "batch": value})
    c = some_constants(**({"sigma_G": 10.0, "gamma_G": 2.0} | constants))
    return [tuple(reason) for reason in advice._batch(given, c)]


def test_batches() -> None:
    """(10/2)^2 = 25 examples, in tens, at most 100."""
    noisy = "examples make batches as noisy as clients differ"
    enough = "examples on, batches are less noisy than clients are different"
    name, noise = "method.batch", "(sigma_G/gamma_G)^2 ="
    assert batch(20) == [(name, 30, f"{noise} 25 {noisy}")]
    assert batch(29) == [(name, 30, f"{noise} 25 {noisy}")]
    assert batch(30) == [(name, 30, f"enough: from {noise} 25 {enough}")]
    assert batch(20, sigma_G=40.0) == [(name, 100, f"{noise} 4e+02 {noisy}")]
    assert batch(20, gamma_G=0.0) == [(name, 100, f"{noise} inf {noisy}")]
    assert batch(5, sigma_G=6.0) == [(name, 10, f"{noise} 9 {noisy}")]
    assert batch("full") == [(name, "full", "all data: no noise")]


def test_what_was_measured() -> None:
    said = advice._measured(CONSTANTS, load("digits", clients=5, split="iid"))
    assert said == [
        Reason(
            "L",
            4.0,
            "the largest curvature, client 3's; steps above 2/L = 0.5 overshoot there; half of "
            "the clients allow 1",
        ),
        Reason(
            "gamma_G",
            2.0,
            "gradients differ this much between clients, and sigma_G = 10 between examples of one",
        ),
    ]


def test_what_only_a_target_changes() -> None:
    """(5 - 2)/(2 (5 - 1)) 2^2 = 1.5."""
    why = "unchanged: without --target-bytes or --target-time there is no reason for"
    sampled = "clients adds (n - r)/(r (n - 1)) gamma_G^2 ="
    given = config({"name": "fedavg", "tau": 7}, codec={"name": "float16"})
    assert advice._unchanged(given, CONSTANTS) == [
        Reason("cohort", 2, f"unchanged: sampling 2 of 5 {sampled} 1.5 to the gradient's variance"),
        Reason("method.tau", 7, f"{why} longer or shorter periods"),
        Reason("codec", "float16", f"{why} shorter messages"),
    ]
    alone = advice._unchanged(given, some_constants(clients=1))
    assert f"sampling 2 of 1 {sampled} 0 to" in alone[0].why


def test_candidates_of_steps() -> None:
    """From a tenth of 1/L to three times 1/median(L_i), and for the adaptation to that."""
    outer = [0.025, 0.07, 0.19, 0.54, 1.5]
    inner = [0.025, 0.068, 0.18, 0.5]
    c = some_constants(L=4.0, client_L=np.array([1.0, 2.0, 2.0, 4.0, 3.0]))
    fedavg = candidates(config({"name": "fedavg"}), c)
    assert fedavg.base == []
    assert fedavg.grid == [{"lr": a, "alpha": b} for a in outer for b in inner]
    local = candidates(config({"name": "local", "schedule": "harmonic"}), c)
    assert local.base == [
        Reason("method.schedule", "constant", "constant steps: the pilot compares those")
    ]
    assert local.grid == [{"lr": a} for a in outer]
    meta = candidates(config({"name": "per-fedavg"}), c)
    assert meta.grid == [{"alpha": b, "beta": a} for b in inner for a in outer]


def test_candidates_of_pfedme() -> None:
    """Lambda is 0.3, 1 or 3 times the median L_i = 2; inner steps are counted for the smallest."""
    found = candidates(config({"name": "pfedme"}), CONSTANTS)
    assert len(found.grid) == 18
    assert found.grid[0] == {"lam": 0.6, "eta": 0.05, "beta": 1.0, "inner_lr": 0.22}
    assert found.grid[1]["beta"] == 2.0
    assert [g["lam"] for g in found.grid[::6]] == [0.6, 2.0, 6.0]
    assert [g["eta"] for g in found.grid[::2]] == [
        0.05, 0.17, 0.5, 0.015, 0.05, 0.15, 0.005, 0.017, 0.05,
    ]  # fmt: skip
    assert [g["inner_lr"] for g in found.grid[::6]] == [0.22, 0.17, 0.1]
    # kappa = (0.6 + 4)/(0.6 + 0.5)
    (steps,) = found.base
    start = "kappa = 4.2 for lambda = 0.6: after"
    assert steps == Reason(
        "method.inner_steps", steps.value, f"{start} {steps.value} steps a tenth of the first "
        "error is left",
    )  # fmt: skip
    contraction = 1 - (0.6 + 0.5) / (0.6 + 4)
    assert contraction**steps.value <= 0.1 < contraction ** (steps.value - 1)
    (most,) = candidates(config({"name": "pfedme"}), some_constants(L=400.0, mu=0.0)).base
    assert most.value == 20
    assert most.why.endswith("of the first error is left, of which at most 20 are advised")


def trial(settings: dict[str, float], loss: float, uplink: float = 100.0) -> PilotTrial:
    return PilotTrial(settings, 12, loss, uplink)


def test_what_the_pilot_chose() -> None:
    given = config({"name": "fedavg"})

    def said(*trials: PilotTrial) -> list[Reason]:
        return advice._chosen(given, CONSTANTS, trials)

    why = "as given: it does not name its step sizes (Method.step_sizes), so none are compared"
    assert said(trial({}, 0.5)) == [Reason("method.name", "fedavg", why)]
    best = [trial({"lr": 0.5, "alpha": 0.25}, 0.123456), trial({}, 0.75), trial({"lr": 1.0}, 2.0)]
    assert said(*best) == [
        Reason(
            "method.lr",
            0.5,
            "2/L, at most 1/L_i for 60 % of clients; best of 3 candidates in a pilot of 12 rounds: "
            "validation loss 0.1235, 0.75 as given",
        ),
        Reason("method.alpha", 0.25, "1/L, at most 1/L_i for 100 % of clients; chosen with it"),
    ]
    why = "as given: none of 3 candidates does better (0.75)"
    assert said(best[1], best[0], best[2]) == [Reason("method.name", "fedavg", why)]


@pytest.mark.parametrize(
    ("method", "name", "expected"),
    [
        ("pfedme", "lam", "0.25 L"),
        ("pfedme", "beta", "the server's mixing"),
        ("pfedme", "inner_lr", "1/(lambda + L)"),
        ("pfedme", "eta", "4/L, at most 1/L_i for 20 % of clients"),
        ("per-fedavg", "beta", "4/L, at most 1/L_i for 20 % of clients"),
    ],
)
def test_scales(method: str, name: str, expected: str) -> None:
    assert advice._scale(method, name, 1.0, CONSTANTS) == expected


def test_fewer_rounds() -> None:
    def fewer(budget: float, **values: int) -> list[Reason]:
        return advice._fewer_rounds(values, trial({}, 1.0, 1500.0), budget)

    why = "messages of the pilot took 1,500 bytes per round"
    assert fewer(15_000, rounds=10) == []
    assert fewer(14_999, rounds=10) == [Reason("rounds", 9, why)]
    assert fewer(149_999) == [Reason("rounds", 99, why)]  # 100 if nobody says
    assert fewer(10, rounds=10) == [Reason("rounds", 1, why)]


def test_advised_settings_are_written() -> None:
    values: dict[str, Any] = {"codec": {"name": "top-k", "fraction": 0.1, "downlink": "float16"}}
    advice._put(values, [Reason("codec.name", "sign", ""), Reason("cohort", 3, "")])
    assert values == {"codec": {"name": "sign", "downlink": "float16"}, "cohort": 3}
    advice._put(values, [Reason("method.inner.lr", 0.5, "")])
    assert values["method"] == {"inner": {"lr": 0.5}}
    plain: dict[str, Any] = {"codec": {"name": "top-k", "fraction": 0.1}}
    advice._put(plain, [Reason("codec.name", "sign", "")])
    assert plain == {"codec": {"name": "sign"}}


def test_fedpaq_is_advised_as_what_it_is() -> None:
    """FedAvg and a quantizer, with the preset's own numbers; the downlink's codec stays."""
    method = {"name": "fedpaq", "lr": 0.3, "tau": 4, "r": 2}
    plain = {"data": {"source": "digits"}, "model": {"name": "mlr"}, "method": method}
    found = advice._without_preset(plain | {"codec": {"downlink": "float16"}})
    assert {k: found["method"][k] for k in ("name", "lr", "tau", "optimizer")} == {
        "name": "fedavg", "lr": 0.3, "tau": 4, "optimizer": "sgd",
    }  # fmt: skip
    assert "alpha" not in found["method"]  # it is not set
    assert found["codec"]["name"] == "low-precision"
    assert found["codec"]["downlink"] == "float16"
    assert found["codec"]["levels"] == 1
    assert found["cohort"] == 2
    assert "downlink" not in advice._without_preset(plain)["codec"]


def test_two_digits() -> None:
    rounded = [advice._rounded(x) for x in (0.0, 123.4, 0.01264, -5.55, 9.96, float("inf"))]
    assert rounded == [0.0, 120.0, 0.013, -5.5, 10.0, float("inf")]


@pytest.fixture(scope="module")
def engine() -> Simulator:
    return config({"name": "fedavg"}, rounds=7).build()


LEVELS = (0, 127, 15, 4, 1)


def test_how_long_messages_are(engine: Simulator) -> None:
    """The longest of the real ones, and a tenth more where lengths differ."""
    examples = targets.sent_examples(engine)
    assert len(examples) == 5
    for levels in LEVELS:
        codec = LowPrecision(levels) if levels else Float32()
        longest = max(
            len(codec.encode(fold(0, Purpose.UPLINK, 0, i), one.delta))
            for i, one in enumerate(examples)
        )
        expected = ceil(1.1 * longest) if levels else longest
        assert targets.message_bytes(levels, examples) == expected


def test_the_finest_messages_within_a_budget(engine: Simulator) -> None:
    """Each codec from the budget on that 7 rounds of 2 clients take by it."""
    given, examples = config({"name": "fedavg"}, rounds=7), targets.sent_examples(engine)

    def within(budget: float) -> list[Reason]:
        return targets.within_bytes(given, engine, examples, budget)

    lengths = [targets.message_bytes(levels, examples) for levels in LEVELS]
    assert lengths == sorted(lengths, reverse=True)
    fits = "the finest with which 7 rounds of 2 fit into"
    room = "unchanged: the budget has no room for more"
    for levels, finer, length in zip(LEVELS, (None, *LEVELS), lengths, strict=False):
        budget = 14 * length
        reasons = within(budget)
        said = {reason.setting: reason.value for reason in reasons}
        assert said.get("codec.levels", 0) == levels
        assert f"{fits} {budget:,.0f} bytes" in reasons[-2].why
        assert reasons[-1] == Reason("cohort", 2, room)
        if finer is not None:
            assert finer != said.get("codec.levels", 0)
        less = {reason.setting: reason.value for reason in within(budget - 1)}
        assert less.get("codec.levels", 0) != levels or levels == 1
    three = within(21 * lengths[0])
    assert (
        three[0].why
        == f"{fits} {21 * lengths[0]:,} bytes: {lengths[0]:,} bytes per client and round"
    )
    assert three[-1] == Reason("cohort", 3, "the budget has room for 3 messages per round")
    assert within(1000 * lengths[0])[-1].value == 5  # all there are
    *codec, rounds = within(2 * lengths[-1] * 3)
    assert rounds == Reason("rounds", 3, f"as many as {6 * lengths[-1]:,} bytes allow")
    assert [reason.value for reason in codec] == ["low-precision", 1]
    with pytest.raises(ConfigError, match="one round of 2 messages takes"):
        within(2 * lengths[-1] - 1)


@pytest.mark.parametrize(("ratio", "budget"), [(100.0, 2e2), (100.0, 1e5), (1e5, 1e3), (1e5, 3e6)])
def test_most_steps_within_a_time(engine: Simulator, ratio: float, budget: float) -> None:
    """Rounds times tau by 1 + q/r is the largest of all codecs and periods."""
    given = config({"name": "fedavg"}, rounds=7, network={"ratio": ratio})
    examples, experiment = targets.sent_examples(engine), engine.experiment
    found = {r.setting: r.value for r in targets.within_seconds(given, engine, examples, budget)}
    sizes = tuple(leaf.size for leaf in jax.tree.leaves(examples[0].delta))
    down = len(Float32().encode(jax.random.key(0), examples[0].delta))
    cohorts = np.array([experiment.sample_cohort(k) for k in range(40)], np.int32)
    network = given.network_of(experiment)
    assert network is not None
    weights = {}
    for levels in LEVELS:
        q = LowPrecision(levels).variance(sizes) if levels else 0.0
        assert q is not None
        length = targets.message_bytes(levels, examples)
        traffic = Traffic(cohorts, np.full((40, 2), length), np.full(40, down))
        for tau in (1, 2, 5, 10, 20, 50):
            gradients = np.full(5, 20 * tau)
            rounds = int(budget // network.seconds(traffic, gradients, given.seed, 0).mean())
            run = bounds.RunSize(rounds, tau, 2, 5)
            if rounds >= 1 and not 1 < tau > bounds.longest_period(q, run):
                weights[levels, tau] = (rounds * tau / (1 + q / 2), rounds)
    levels, tau = max(weights, key=lambda key: weights[key][0])
    assert len(weights) > 1
    assert found.get("codec.levels", 0) == levels
    assert (found["method.tau"], found["rounds"]) == (tau, weights[levels, tau][1])
    assert found["cohort"] == 2
