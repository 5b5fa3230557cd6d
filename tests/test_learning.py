"""The methods learn: the papers' own setting, and the digits."""

from typing import Any

import numpy as np
import pytest

from perfed import (
    APFL,
    MLP,
    MLR,
    Ditto,
    FedAdam,
    FedAvg,
    FedAvgM,
    FedProx,
    FedYogi,
    Local,
    Method,
    PerFedAvg,
    PFedMe,
    Scaffold,
    load,
    simulate,
    synthetic,
)

PFEDME = PFedMe(lam=20, eta=0.01, local_rounds=20, inner_steps=5, inner_lr=0.01, beta=2, batch=20)
FEDAVG = FedAvg(lr=0.02, tau=20, batch=20)


def curves(method: Method, seeds: range, weighting: Any) -> dict[str, np.ndarray]:
    """Size-weighted accuracy on held-out data: one row per seed, one column for every 20 rounds."""
    data = synthetic(alpha=0.5, beta=0.5)
    found: dict[str, list[list[float]]] = {"global": [], "personalized": []}
    for seed in seeds:
        result = simulate(
            data,
            MLR(60, 10),
            method,
            rounds=600,
            cohort=10,
            eval_every=20,
            seed=seed,
            weighting=weighting,
        )
        for kind, rows in found.items():
            rows.append(
                [e.scores[kind].summary()["accuracy"].weighted for e in result.history]  # type: ignore[index]
            )
    return {kind: np.array(rows) for kind, rows in found.items()}


@pytest.mark.slow
def test_pfedme_table_1_synthetic_mlr() -> None:
    """The paper prints PM 83.20 and GM 78.65 on this very data set.

    Those are means over runs of the best round of each, with a mean over clients weighted by their
    sizes: so does the authors' code. Neither is perfed's default (the last round; Algorithm 1's
    uniform mean), so both are asked for here, and the last round is held to a little less.
    """
    found = curves(PFEDME, range(3), "size")
    assert found["personalized"].max(axis=1).mean() >= 0.832
    assert found["personalized"][:, -1].mean() >= 0.829
    assert found["global"][:, -1].mean() >= 0.786


@pytest.mark.slow
def test_fedavg_table_1_synthetic_mlr() -> None:
    """The paper prints 77.62."""
    assert 0.76 <= curves(FEDAVG, range(2), "size")["global"][:, -1].mean() <= 0.80


@pytest.mark.slow
def test_personalization_pays_with_the_uniform_mean_too() -> None:
    found = curves(PFEDME, range(2), "uniform")
    assert found["personalized"][:, -1].min() >= 0.82
    assert found["personalized"][:, -1].mean() > found["global"][:, -1].mean() + 0.02


@pytest.mark.slow
def test_every_method_on_the_digits() -> None:
    """Personal models beat the one global model; the steady methods beat learning alone."""
    federation, model = load("digits", clients=20, test_fraction=0.5), MLP(64, 10, (80, 60), "elu")

    def mean(method: Any, kind: Any = "personalized", cohort: int = 10) -> float:
        result = simulate(federation, model, method, rounds=150, cohort=cohort)
        return float(result.scores[kind].accuracy.mean())

    meta: dict[str, Any] = {"alpha": 0.1, "beta": 0.05, "tau": 10, "batch": 20}
    fedavg = mean(FedAvg(lr=0.05, tau=10, batch=20), "global")
    alone = mean(Local(lr=0.05, tau=10, batch=20), cohort=20)
    assert alone > fedavg
    assert mean(PerFedAvg("fo", **meta)) > fedavg + 0.01  # which suffers when alpha is large
    for variant in ("hf", "exact"):
        assert mean(PerFedAvg(variant, **meta)) > max(fedavg + 0.04, alone)
    assert mean(PFedMe(lam=15, eta=0.03, inner_lr=0.05)) > max(fedavg + 0.04, alone)


WORK: dict[str, Any] = {"lr": 0.1, "tau": 5, "batch": 20}


@pytest.mark.parametrize(
    ("method", "bound"),
    [
        pytest.param(FedProx(mu=0.1, **WORK), 0.75, marks=pytest.mark.slow),  # FedAvg: 0.776
        (Scaffold(**WORK), 0.89),
        (FedAvgM(momentum=0.7, **WORK), 0.8),
        (FedAdam(server_lr=0.03, **WORK), 0.86),
        pytest.param(FedYogi(server_lr=0.03, **WORK), 0.86, marks=pytest.mark.slow),
        (Ditto(personal_lr=0.1, lam=0.3, personal_steps=5, **WORK), 0.94),  # Local: 0.948
        (APFL(**WORK), 0.94),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_a_linear_model_of_the_digits(method: Any, bound: float) -> None:
    """Forty rounds of half of ten clients, who have two classes or five each."""
    data = load("digits", clients=10, test_fraction=0.5)
    result = simulate(data, MLR(64, 10), method, rounds=40, cohort=5)
    scores = {kind: float(score.accuracy.mean()) for kind, score in result.scores.items()}
    assert scores["personalized"] > bound
    if isinstance(method, Ditto | APFL):
        assert scores["personalized"] > scores["global"] + 0.1
