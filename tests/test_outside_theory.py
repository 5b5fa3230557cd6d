"""`diagnose` and `advise` on methods from outside the package."""

from typing import Any, final

import numpy as np
import pytest

from outside.fedadam import FedAdam
from outside.fedrep import FedRep
from outside.scaffold import Scaffold
from perfed import MLP, Ditto, Experiment, Method, Task, Vectorized, register
from perfed.core.errors import ConfigError
from perfed.data import Federation
from perfed.methods import LocalUpdate, method, registry
from perfed.report.tables import theory_tables
from perfed.runs.config import Config
from perfed.theory import Effort, advise, decay, study

QUICK = Effort(steps=3, examples=4, hessian_examples=1, hessian_clients=2, hessian_steps=2,
               tensor_starts=1, tensor_steps=1)  # fmt: skip
VALUES: dict[str, Any] = {
    "rounds": 20,
    "cohort": 3,
    "data": {"source": "synthetic", "alpha": 0.5, "beta": 0.5, "clients": 5, "sizes": "pfedme"},
    "model": {"name": "mlr"},
}


@final
@method("still")
class Still(Method):
    """Names none of its settings."""

    def local_update(
        self, objective: Any, received: Any, client_state: Any, context: Any
    ) -> LocalUpdate:
        return LocalUpdate(received.params)


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_REGISTERED", {})
    for cls in (FedAdam, Scaffold, Still):
        register(cls)


def engine(method: Method) -> Vectorized:
    rng = np.random.default_rng(0)
    parts = [(rng.normal(size=(n, 4)).astype(np.float32), rng.integers(0, 3, n)) for n in (9, 14)]
    data = Federation.from_arrays(parts, parts, classes=3)
    return Vectorized(Experiment(data, Task(MLP(4, 3, (5,))), method, 2))


def test_a_diagnosis_of_step_sizes_alone() -> None:
    """SCAFFOLD: its step size is held against 2/L, and no theorem is claimed."""
    sharp = study(engine(Scaffold(lr=1e3)), 10, effort=QUICK)
    (condition,) = sharp.diagnosis.conditions
    assert (condition.text, condition.holds) == ("lr < 2/L", False)
    assert condition.limit == pytest.approx(2 / sharp.constants.L.value)
    page = sharp.as_json()
    assert page["bounds"] == []
    assert "do not cover outside-scaffold" in page["note"]
    assert "only lr can be checked" in page["note"]
    assert len(theory_tables(page)) == 2


def test_a_penalty_adds_to_the_curvature() -> None:
    """Ditto's personal steps: 0.05 is below 2/L, and above 2/(L + lam)."""
    found = study(engine(Ditto(lr=0.05, personal_lr=0.05, lam=100.0)), 10, effort=QUICK)
    plain, held = found.diagnosis.conditions
    assert (plain.text, plain.holds) == ("lr < 2/L", True)
    assert (held.text, held.holds) == ("personal_lr < 2/(L + lam)", False)
    assert held.limit == pytest.approx(2 / (found.constants.L.value + 100))


def test_a_diagnosis_with_personal_leaves() -> None:
    """FedRep: constants are of the whole model; the decay is that of its plain problem."""
    made = engine(FedRep(lr=1e-3, head_steps=1, tau=1, head="1"))
    found = study(made, 10, effort=QUICK)
    assert found.constants.parameters == 4 * 5 + 5 + 5 * 3 + 3
    assert found.diagnosis.conditions[0].holds
    assert np.isfinite(decay(made, 2).squared).all()


def test_a_diagnosis_of_a_method_that_names_no_step_size() -> None:
    found = study(engine(Still()), 10, effort=QUICK)
    assert found.diagnosis.conditions == []
    assert "no step size can be checked" in found.diagnosis.note
    assert "Method.step_sizes" in found.diagnosis.note


@pytest.mark.usefixtures("registered")
@pytest.mark.slow
def test_advice_on_a_method_from_outside() -> None:
    """FedAdam: its local step size is chosen by the pilot, and the result is ready to run."""
    values = VALUES | {"method": {"name": "outside-fedadam", "lr": 1e-5, "tau": 2}}
    advice = advise(values)
    assert len(advice.trials) == 6
    assert advice.trials[0].loss < advice.given.loss
    chosen = Config.checked(advice.values).build().experiment.method
    assert isinstance(chosen, FedAdam)
    assert chosen.lr == advice.trials[0].settings["lr"] != 1e-5


@pytest.mark.usefixtures("registered")
def test_advice_that_cannot_be_given_is_an_error_that_says_so() -> None:
    values = VALUES | {"method": {"name": "still"}}
    with pytest.raises(ConfigError, match="still does not name its step sizes"):
        advise(values)
    with pytest.raises(ConfigError, match="still does not name the setting that counts its local"):
        advise(values | {"network": {"ratio": 1.0}}, target_seconds=5.0)
    advice = advise(values, target_bytes=1e5)
    assert any(reason.setting == "codec.name" for reason in advice.reasons)
    assert "does not name its step sizes" in advice.reasons[-1].why
    assert Config.checked(advice.values).method_name == "still"
