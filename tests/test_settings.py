"""What the parts are set to if nobody says otherwise, schedules and optimizers by their formulas.

All is compared with values that are written out here: a default is a promise, too.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from perfed import (
    APFL,
    Ditto,
    FedAdam,
    FedALA,
    FedAvg,
    FedAvgM,
    FedBABU,
    FedPer,
    FedProx,
    FedRep,
    FedRoD,
    FedYogi,
    LGFedAvg,
    Local,
    Method,
    PerFedAvg,
    PFedMe,
    Scaffold,
    method,
    register,
)
from perfed.core.errors import FieldError
from perfed.evaluation.metrics import mean_defined, named_scores, score_names, score_order
from perfed.methods.base import batch_examples
from perfed.methods.optimizers import SGD, Adam, AdamW, Optimizer, Yogi
from perfed.methods.registry import find_method, method_names
from perfed.methods.schedules import Constant, Cosine, Exponential, Harmonic, Polynomial
from perfed.pipeline import STAGES, Clip, Encode, ErrorFeedback, Mean, Pipeline
from perfed.pipeline.codecs import CODECS

PLAIN = "SGD(momentum=0.0, nesterov=False, weight_decay=0.0)"
DEFAULTS: dict[Callable[[], Any], str] = {
    FedAvg: f"FedAvg(lr=0.02, tau=10, batch=20, optimizer={PLAIN}, schedule=Constant(), "
    "alpha=None, adapt_steps=1, adapt_batch='full')",
    Local: f"Local(lr=0.02, tau=10, batch=20, optimizer={PLAIN}, schedule=Constant())",
    PerFedAvg: "PerFedAvg(variant='hf', alpha=0.01, beta=0.001, schedule=Constant(), tau=10, "
    "batch=40, batch_outer=None, batch_hessian=None, delta=0.001, adapt_steps=1, "
    "adapt_batch='full', send_iterate=False)",
    PFedMe: "PFedMe(lam=15.0, eta=0.01, local_rounds=20, inner_solver='gd', inner_steps=5, "
    "inner_lr=0.01, nu=None, inner_start='received', beta=1.0, batch=20)",
    FedProx: "FedProx(lr=0.02, mu=0.1, tau=10, batch=20)",
    Scaffold: "Scaffold(lr=0.02, server_lr=1.0, tau=10, batch=20, variate='path')",
    FedAvgM: "FedAvgM(lr=0.02, server_lr=1.0, tau=10, batch=20, momentum=0.9)",
    FedAdam: "FedAdam(lr=0.02, server_lr=0.01, tau=10, batch=20, beta_1=0.9, beta_2=0.99, "
    "adaptivity=0.001)",
    FedYogi: "FedYogi(lr=0.02, server_lr=0.01, tau=10, batch=20, beta_1=0.9, beta_2=0.99, "
    "adaptivity=0.001)",
    Ditto: "Ditto(lr=0.02, personal_lr=0.02, lam=1.0, tau=10, personal_steps=10, batch=20)",
    APFL: "APFL(lr=0.02, alpha=0.5, adaptive=True, tau=10, batch=20)",
    FedPer: f"FedPer(lr=0.02, tau=10, batch=20, head='head', optimizer={PLAIN}, "
    "schedule=Constant())",
    LGFedAvg: f"LGFedAvg(lr=0.02, tau=10, batch=20, head='head', optimizer={PLAIN}, "
    "schedule=Constant())",
    FedRep: "FedRep(lr=0.02, head_steps=10, body_steps=1, batch=20, head='head')",
    FedBABU: "FedBABU(lr=0.02, tau=10, batch=20, head='head', schedule=Constant(), "
    "adapt_part='all', alpha=None, adapt_steps=10, adapt_batch=20)",
    FedRoD: "FedRoD(lr=0.02, head_lr=None, tau=10, batch=20, head='head', adapt_steps=None)",
    FedALA: "FedALA(lr=0.02, tau=10, batch=20, head='head', weight_lr=1.0, fraction=0.8, "
    "weight_batch='full', weight_steps=1, first_weight_steps=50, threshold=0.1, adapt_steps=None)",
    SGD: PLAIN,
    Adam: "Adam(b1=0.9, b2=0.999, eps=1e-08)",
    AdamW: "AdamW(b1=0.9, b2=0.999, eps=1e-08, weight_decay=0.0001)",
    Yogi: "Yogi(b1=0.9, b2=0.999, eps=0.001)",
    Polynomial: "Polynomial(power=0.5)",
    Exponential: "Exponential(rate=0.99)",
    Cosine: "Cosine(rounds=100, final=0.0)",
}
# What other parts read of a method: does it have a global model, the step sizes and the number of
# local steps, the step size and the number of steps of personalization.
DECLARED: dict[type[Method], tuple[bool, tuple[str, ...], str, str, str]] = {
    FedAvg: (True, ("lr",), "tau", "alpha", "adapt_steps"),
    Local: (False, ("lr",), "tau", "", ""),
    PerFedAvg: (True, ("beta",), "tau", "alpha", "adapt_steps"),
    PFedMe: (True, (), "local_rounds", "", "local_rounds"),
    FedProx: (True, ("lr",), "tau", "", ""),
    Scaffold: (True, ("lr",), "tau", "", ""),
    FedAvgM: (True, ("lr",), "tau", "", ""),
    FedAdam: (True, ("lr",), "tau", "", ""),
    FedYogi: (True, ("lr",), "tau", "", ""),
    Ditto: (True, ("lr", "personal_lr"), "tau", "personal_lr", "personal_steps"),
    APFL: (True, ("lr",), "tau", "", "tau"),
    FedPer: (False, ("lr",), "tau", "", ""),
    LGFedAvg: (False, ("lr",), "tau", "", ""),
    FedRep: (False, ("lr",), "head_steps", "", ""),
    FedBABU: (False, ("lr",), "tau", "alpha", "adapt_steps"),
    FedRoD: (True, ("lr",), "tau", "head_lr", "adapt_steps"),
    FedALA: (True, ("lr",), "tau", "", "adapt_steps"),
}

CODED = {
    "float32": "Float32()",
    "float16": "Float16()",
    "bfloat16": "BFloat16()",
    "low-precision": "LowPrecision(levels=1, norm='whole', code='shortest')",
    "sign": "Sign()",
    "top-k": "TopK(fraction=0.01, inner=Float32())",
    "random-k": "RandomK(fraction=0.01, inner=Float32(), scaled=True)",
}


@pytest.mark.parametrize("cls", DEFAULTS)
def test_defaults(cls: Callable[[], Any]) -> None:
    assert repr(cls()) == DEFAULTS[cls]


def test_defaults_of_the_pipeline() -> None:
    assert {name: repr(codec()) for name, codec in CODECS.items()} == CODED
    stages = {stage.name: (repr(stage()), stage.place) for stage in STAGES.values()}
    assert stages == {
        "clip": ("Clip(norm=1.0)", 0),
        "error-feedback": ("ErrorFeedback()", 1),
        "encode": ("Encode(codec=Float32())", 2),
        "mean": ("Mean()", 4),
    }
    plain = Pipeline()
    assert (plain.names, plain.clip, plain.error_feedback) == ((), None, False)
    assert (repr(plain.codec), repr(plain.extra_codec)) == ("Float32()", "Float32()")
    assert plain.aggregate == Mean()
    assert Pipeline.of() == plain
    assert Pipeline.of(clip=2.0, error_feedback=True).names == ("clip", "error-feedback")


@pytest.mark.parametrize("cls", DECLARED)
def test_declarations(cls: type[Method]) -> None:
    one = cls()
    found = (one.has_global_model, one.step_sizes, one.local_steps, one.adapt_step_size)
    assert (*found, one.adapt_work) == DECLARED[cls]


def test_counts() -> None:
    """Of a client with 7 examples."""
    assert (batch_examples("full", 7), batch_examples(3, 7)) == (7, 3)
    assert FedAvg(tau=3, batch=5).gradient_count(7) == 15
    assert Local(tau=3, batch="full").gradient_count(7) == 21
    steps: Any = {"adapt_steps": 2, "batch": 5, "batch_outer": 3, "batch_hessian": 4}
    assert PerFedAvg("fo", tau=3, **steps).gradient_count(7) == 3 * (2 * 5 + 3)
    assert PerFedAvg("hf", tau=3, **steps).gradient_count(7) == 3 * (2 * (5 + 8) + 3)
    assert PFedMe(local_rounds=2, inner_steps=3, batch=5).gradient_count(7) == 30
    assert FedProx(tau=3, batch=5).gradient_count(7) == 15
    assert Scaffold(tau=3, batch=5).gradient_count(7) == 15
    assert Scaffold(tau=3, batch=5, variate="gradient").gradient_count(7) == 15 + 7
    assert FedYogi(tau=3, batch=5).gradient_count(7) == 15
    assert Ditto(tau=3, personal_steps=4, batch=5).gradient_count(7) == (3 + 4) * 5
    assert APFL(tau=3, batch=5).gradient_count(7) == 2 * 15
    assert FedRep(head_steps=3, body_steps=2, batch=5).gradient_count(7) == 25
    assert FedRoD(tau=3, batch=5).gradient_count(7) == 30
    ala: dict[str, Any] = {"tau": 3, "batch": 5, "fraction": 0.5, "weight_steps": 2}
    assert FedALA(**ala).gradient_count(7) == 3 * 5 + 2 * 4
    assert FedALA(**ala, weight_batch=3).gradient_count(7) == 3 * 5 + 2 * 3
    assert FedRep(head_steps=3, body_steps=2).step_count == 5
    assert FedBABU(adapt_steps=4).adapt_count == 4
    assert (FedRoD().adapt_count, FedRoD(adapt_steps=4).adapt_count) == (0, 4)
    assert (FedALA().adapt_count, FedALA(adapt_steps=4).adapt_count) == (0, 4)
    assert FedAvg(adapt_steps=4).adapt_count == 4
    assert Ditto(personal_steps=4).adapt_count == 4
    assert APFL(tau=4).adapt_count == 4
    assert Scaffold().adapt_count == 0
    assert PFedMe(local_rounds=6).adapt_count == 6
    assert Local().adapt_count == 0


def test_counts_of_a_method_that_says_nothing() -> None:
    @method("silent")
    class Silent(Method):
        def local_update(self, *_: Any) -> Any: ...

        def personalize(self, *_: Any) -> Any: ...

    assert (Silent().step_count, Silent().adapt_count, Silent().gradient_count(7)) == (1, 1, 1)
    assert isinstance(Silent().step_count, int)


@pytest.mark.parametrize(
    ("cls", "settings", "message"),
    [
        (FedProx, {"mu": -0.1}, "mu = -0.1: must be a number, at least 0"),
        (Scaffold, {"variate": "last"}, "variate = 'last': must be"),
        (Scaffold, {"server_lr": 0}, "server_lr = 0: must be a number greater than 0"),
        (FedAvgM, {"momentum": 1.0}, "momentum = 1.0: must be a number from 0 to below 1"),
        (FedAdam, {"beta_1": -0.1}, "beta_1 = -0.1: must be a number from 0 to below 1"),
        (FedYogi, {"adaptivity": 0}, "adaptivity = 0: must be a number greater than 0"),
        (Ditto, {"personal_steps": 0}, "personal_steps = 0: must be"),
        (APFL, {"alpha": 1.5}, "alpha = 1.5: must be a number from 0 to 1"),
    ],
)
def test_invalid_settings_of_methods(cls: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(FieldError) as caught:
        cls(**settings)
    assert message in str(caught.value)


def test_names_of_methods_are_taken_once() -> None:
    @method("net-named-once")
    class First(Method):
        def local_update(self, *_: Any) -> Any: ...

    assert register(First) is First
    assert register(First) is First  # as when a module is loaded again
    for name in ("net-named-once", "fedavg"):
        other: Any = method(name)(type("Other", (Method,), {"local_update": lambda *_: None}))
        with pytest.raises(FieldError, match="is the name of another method"):
            register(other)
    with pytest.raises(FieldError, match="has no name"):
        register(type("Nameless", (Method,), {"local_update": lambda *_: None}))


@pytest.mark.parametrize(
    ("schedule", "factors"),
    [
        (Constant(), [1, 1, 1, 1]),
        (Harmonic(), [1, 1 / 6, 1 / 11, 1 / 16]),
        (Polynomial(), [1, 2**-0.5, 3**-0.5, 1 / 2]),
        (Polynomial(2.0), [1, 1 / 4, 1 / 9, 1 / 16]),
        (Exponential(), [1, 0.99, 0.99**2, 0.99**3]),
        (Exponential(0.5), [1, 1 / 2, 1 / 4, 1 / 8]),
        (Cosine(4), [1, (1 + 0.5**0.5) / 2, 1 / 2, (1 - 0.5**0.5) / 2]),
        (Cosine(2, 0.2), [1, 0.6, 0.2, 0.2]),
    ],
)
def test_schedules(schedule: Any, factors: list[float]) -> None:
    """In rounds 0 to 3, of 5 steps each."""
    rounds = [jnp.asarray(k) for k in range(4)]
    np.testing.assert_allclose([schedule.factor(k, 5) for k in rounds], factors, rtol=1e-6)
    sizes = [0.3 * factor for factor in factors]
    np.testing.assert_allclose([schedule(0.3, k, 5) for k in rounds], sizes, rtol=1e-6)


GRADS = [np.array([1.0, -2.0, 0.5]), np.array([0.5, 1.0, 0.0]), np.array([-1.0, 3.0, 2.0])]
BEGIN, LR = np.array([1.0, 2.0, -1.0]), 0.1


def sgd(momentum: float, nesterov: bool, decay: float) -> np.ndarray:
    w, v = BEGIN, np.zeros(3)
    for grad in GRADS:
        g = grad + decay * w
        v = momentum * v + g
        w = w - LR * (g + momentum * v if nesterov else v)
    return w


def adam(b1: float, b2: float, eps: float, decay: float, yogi: bool) -> np.ndarray:
    w, m, v = BEGIN, np.zeros(3) + (1e-6 if yogi else 0), np.zeros(3) + (1e-6 if yogi else 0)
    for t, g in enumerate(GRADS, 1):
        m = b1 * m + (1 - b1) * g
        v = v - (1 - b2) * np.sign(v - g**2) * g**2 if yogi else b2 * v + (1 - b2) * g**2
        w = w - LR * (m / (1 - b1**t) / (np.sqrt(v / (1 - b2**t)) + eps) + decay * w)
    return w


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [
        (SGD(), sgd(0, False, 0)),
        (SGD(weight_decay=0.3), sgd(0, False, 0.3)),
        (SGD(0.6), sgd(0.6, False, 0)),
        (SGD(0.6, nesterov=True), sgd(0.6, True, 0)),
        (SGD(0.6, nesterov=True, weight_decay=0.3), sgd(0.6, True, 0.3)),
        (Adam(), adam(0.9, 0.999, 1e-8, 0, False)),
        (Adam(0.5, 0.7, 0.2), adam(0.5, 0.7, 0.2, 0, False)),
        (AdamW(), adam(0.9, 0.999, 1e-8, 1e-4, False)),
        (AdamW(0.5, 0.7, 0.2, 0.4), adam(0.5, 0.7, 0.2, 0.4, False)),
        (Yogi(), adam(0.9, 0.999, 1e-3, 0, True)),
        (Yogi(0.5, 0.7, 0.2), adam(0.5, 0.7, 0.2, 0, True)),
    ],
    ids=str,
)
def test_optimizers(optimizer: Optimizer, expected: np.ndarray) -> None:
    """Three steps, by the formulas of their papers."""
    params: Any = {"w": jnp.asarray(BEGIN)}
    state = optimizer.init(params)
    for grad in GRADS:
        params, state = optimizer.step(params, {"w": jnp.asarray(grad)}, state, LR)
    np.testing.assert_allclose(params["w"], expected, rtol=3e-5)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SGD(1.0), "momentum = 1.0: must be a number from 0 to below 1"),
        (lambda: SGD(-0.1), "momentum = -0.1"),
        (lambda: SGD(nesterov=True), "nesterov = True: needs a momentum"),
        (lambda: SGD(weight_decay=-1), "weight_decay = -1: must be a number, at least 0"),
        (lambda: Adam(b1=1), "b1 = 1"),
        (lambda: Adam(b2=True), "b2 = True"),
        (lambda: AdamW(b1=-1.0), "b1 = -1.0"),
        (lambda: AdamW(b2=1.5), "b2 = 1.5"),
        (lambda: Yogi(b1="0.9"), "b1 = '0.9'"),  # type: ignore[arg-type]
        (lambda: Yogi(b2=1), "b2 = 1"),
        (lambda: Adam(eps=0), "eps = 0: must be a number greater than 0"),
        (lambda: FedAvg(lr=float("inf")), "lr = inf"),
        (lambda: FedAvg(lr=True), "lr = True"),
        (lambda: FedAvg(tau=0), "tau = 0"),
        (lambda: FedAvg(batch="all"), "batch = 'all'"),  # type: ignore[arg-type]
        (lambda: FedAvg(optimizer="sgd"), "must be an instance of Optimizer"),  # type: ignore[arg-type]
        (lambda: Clip(0.0), "norm = 0.0: must be a number greater than 0"),
        (lambda: Clip(float("inf")), "norm = inf"),
        (lambda: Encode("float16"), "must be a codec"),  # type: ignore[arg-type]
        (lambda: Pipeline((Clip, Encode())), "must be stages"),  # type: ignore[arg-type]
        (lambda: Pipeline((Clip(), Clip())), "clip must come before clip"),
        (lambda: Pipeline((Encode(), ErrorFeedback())), "error-feedback must come before encode"),
        (lambda: PerFedAvg("newton"), "variant = 'newton'"),  # type: ignore[arg-type]
    ],
)
def test_settings_are_checked(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(FieldError) as caught:
        make()
    assert message in str(caught.value)


def test_settings_at_their_edges() -> None:
    SGD(0.0, weight_decay=0)
    Adam(b1=0, b2=0)
    FedAvg(lr=1e-30, tau=1, batch=1)
    PerFedAvg(batch_outer=None)
    computed: Any = jnp.asarray(0.5)
    assert FedAvg(lr=computed).lr == 0.5  # one of several runs at once


def test_numbers_are_leaves_and_the_rest_is_structure() -> None:
    def structure(one: Any) -> Any:
        return jax.tree.structure(one)

    assert jax.tree.leaves(PFedMe(lam=3.0, eta=0.1, inner_lr=0.2, beta=0.5)) == [3, 0.1, 0.2, 0.5]
    assert structure(FedAvg(lr=0.1)) == structure(FedAvg(lr=0.2))
    assert structure(FedAvg(tau=1)) != structure(FedAvg(tau=2))
    assert structure(FedAvg(optimizer=SGD(0.5))) != structure(FedAvg(optimizer=SGD(0.6)))
    assert structure(FedAvg(schedule=Polynomial(1.0))) == structure(FedAvg(schedule=Polynomial(2)))
    paths = [
        jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(FedAvg())
    ]
    assert paths == [".lr", ".optimizer.weight_decay"]


def test_methods_are_found_by_their_names() -> None:
    names = method_names()
    assert names[:4] == ["fedavg", "per-fedavg", "pfedme", "local"]
    assert isinstance(names, list)
    assert len(names) == len(set(names))
    assert [find_method(name) for name in names[:4]] == [FedAvg, PerFedAvg, PFedMe, Local]
    with pytest.raises(KeyError):
        find_method("nothing-of-the-kind")


def test_clipping() -> None:
    """To the norm of all entries together, and no further; zeros stay."""
    delta = {"a": jnp.array([3.0, 0.0]), "b": jnp.array(4.0, jnp.float16)}
    found = Clip(2.5)(delta)
    np.testing.assert_allclose(found["a"], [1.5, 0.0])
    assert (float(found["b"]), found["b"].dtype) == (2.0, jnp.float16)
    for norm in (5.0, 6.0):
        np.testing.assert_allclose(Clip(norm)(delta)["a"], [3.0, 0.0])
    np.testing.assert_array_equal(Clip()({"a": jnp.zeros(2)})["a"], np.zeros(2))


def test_which_scores_there_are() -> None:
    assert score_names(classes=True, training=False, penalty=True) == ("accuracy", "loss")
    assert score_names(classes=False, training=False, penalty=False) == ("r2", "rmse", "loss")
    everything = ("accuracy", "loss", "train_accuracy", "train_loss", "train_objective")
    assert score_names(classes=True, training=True, penalty=True) == everything
    assert score_names(classes=True, training=True, penalty=False) == everything[:-1]
    names = ["train_loss", "loss", "train_accuracy", "accuracy", "train_objective"]
    assert sorted(names, key=score_order) == [everything[i] for i in (0, 1, 2, 3, 4)]
    assert mean_defined(np.array([1.0, np.nan, 2.0])) == 1.5
    assert np.isnan(mean_defined(np.array([np.nan])))


def test_names_of_scores() -> None:
    """R2 is 1 - MSE / Var(y); nothing where all targets are alike."""
    error = np.array([1.0, 4.0, 0.25])
    targets = [np.array([0.0, 4.0]), np.array([3.0, 3.0]), np.array([1.0, 2.0, 3.0])]
    found = named_scores(error, targets, spread=3.0)
    np.testing.assert_allclose(found["r2"], [0.75, np.nan, 1 - 0.25 * 1.5])
    np.testing.assert_allclose(found["rmse"], [3.0, 6.0, 1.5])
    np.testing.assert_allclose(named_scores(error, targets)["rmse"], [1.0, 2.0, 0.5])
    assert named_scores(error) == {"accuracy": error}
