"""The methods learn: the papers' own setting, and the digits."""

from typing import Any

import pytest

from perfed import MLP, MLR, FedAvg, Local, PerFedAvg, PFedMe, digits, simulate, synthetic


def accuracy(result: Any, kind: Any) -> float:
    return float(result.scores[kind].summary()["accuracy"].weighted)


@pytest.fixture(scope="module")
def data() -> Any:
    return synthetic(alpha=0.5, beta=0.5)


def test_pfedme_table_1_synthetic_mlr(data: Any) -> None:
    """The paper prints PM 83.20 and GM 78.65 (Table 1).

    Its code weights the mean by data size, and so does this run; the paper's Algorithm 1 does not,
    and neither does perfed by default.
    """
    method = PFedMe(
        lam=20, eta=0.01, local_rounds=20, inner_steps=5, inner_lr=0.01, beta=2, batch=20
    )
    result = simulate(data, MLR(60, 10), method, rounds=600, cohort=10, weighting="size")
    assert accuracy(result, "personalized") >= 0.832
    assert accuracy(result, "global") >= 0.786


def test_fedavg_table_1_synthetic_mlr(data: Any) -> None:
    """The paper prints 77.62."""
    method = FedAvg(lr=0.02, tau=20, batch=20)
    result = simulate(data, MLR(60, 10), method, rounds=600, cohort=10, weighting="size")
    assert 0.76 <= accuracy(result, "global") <= 0.80


def test_personalisation_pays_with_a_uniform_mean_too(data: Any) -> None:
    method = PFedMe(
        lam=20, eta=0.01, local_rounds=20, inner_steps=5, inner_lr=0.01, beta=2, batch=20
    )
    result = simulate(data, MLR(60, 10), method, rounds=600, cohort=10)
    assert accuracy(result, "personalized") >= 0.82
    assert accuracy(result, "personalized") > accuracy(result, "global") + 0.02


def test_every_method_on_the_digits() -> None:
    """Personal models beat the one global model, and learning together beats learning alone."""
    federation, model = digits(clients=20, test_fraction=0.5), MLP(64, 10, (80, 60), "elu")

    def mean(method: Any, kind: Any = "personalized", cohort: int = 10) -> float:
        result = simulate(federation, model, method, rounds=150, cohort=cohort)
        return float(result.scores[kind].accuracy.mean())

    meta = {"alpha": 0.1, "beta": 0.05, "tau": 10, "batch": 20}
    fedavg = mean(FedAvg(lr=0.05, tau=10, batch=20), "global")
    alone = mean(Local(lr=0.05, tau=10, batch=20), cohort=20)
    for variant in ("fo", "hf", "exact"):
        assert mean(PerFedAvg(variant, **meta)) > max(fedavg + 0.04, alone)  # type: ignore[arg-type]
    assert mean(PFedMe(lam=15, eta=0.03, inner_lr=0.05)) > max(fedavg + 0.04, alone)
