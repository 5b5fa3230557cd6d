"""Configuration: what a file means, and errors that name field, value and what is allowed."""

import tomllib
from pathlib import Path
from typing import Any

import jax
import pytest

from perfed import (
    CNN,
    MLP,
    MLR,
    Config,
    ConfigError,
    FedAvg,
    Local,
    PerFedAvg,
    PFedMe,
    Sequential,
    Vectorized,
)
from perfed.runs.comparison import comparison

PFEDME = """
seed = 0
rounds = 600
cohort = 10
eval_every = 50
[data]
source = "synthetic"
clients = 100
alpha = 0.5
beta = 0.5
[model]
name = "mlr"
[method]
name = "pfedme"
lam = 20.0
eta = 0.01
local_rounds = 20
inner_steps = 5
inner_lr = 0.01
beta = 2.0
batch = 20
"""

SMALL = """
cohort = 4
[data]
source = "digits"
clients = 10
[model]
name = "mlp"
hidden = [8]
[method]
name = "fedavg"
"""


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def write(text: str) -> Path:
        path = tmp_path / "run.toml"
        path.write_text(text)
        return path

    return write


def test_a_file_says_what_is_run(write: Any) -> None:
    config = Config.load(write(PFEDME))
    assert (config.seed, config.rounds, config.cohort, config.eval_every) == (0, 600, 10, 50)
    assert config.build_preset().method == PFedMe(20.0, 0.01, 20, "gd", 5, 0.01, beta=2.0, batch=20)
    setup = config.build().experiment
    assert setup.federation.clients == 100
    assert setup.task.model == MLR(60, 10)
    assert (setup.weighting, setup.sampling) == ("uniform", "replacement")


@pytest.mark.parametrize(
    ("settings", "method"),
    [
        (["method.lr=1"], FedAvg(lr=1.0)),
        (["method.name=local", "method.tau=3"], Local(tau=3)),
        (
            ["method.name=per-fedavg", "method.variant=exact", "method.batch=full"],
            PerFedAvg("exact", batch="full"),
        ),
        (["method.name='per-fedavg'", "method.delta=1e-4"], PerFedAvg(delta=1e-4)),
        (["method.name=pfedme", "method.nu=0.1"], PFedMe(nu=0.1)),
    ],
)
def test_overrides(write: Any, settings: list[str], method: Any) -> None:
    assert Config.load(write(SMALL), settings).build_preset().method == method


def test_models_take_their_shape_from_the_data(write: Any) -> None:
    def model(*settings: str) -> Any:
        return Config.load(write(SMALL), settings).build().experiment.task.model

    assert model() == MLP(64, 10, (8,), "elu")
    assert model("model.activation=relu") == MLP(64, 10, (8,), "relu")
    assert model("model={name='cnn', channels=[4], hidden=9}") == CNN((8, 8, 1), 10, (4,), 9)
    assert Config.load(write(SMALL), ["model.l2=0.1"]).build().experiment.task.l2 == 0.1


def test_engines_by_name(write: Any) -> None:
    sequential = Config.load(write(SMALL), ["engine.name=sequential"]).build()
    assert isinstance(sequential, Sequential)
    vectorized = Config.load(write(SMALL), ["engine.devices=1", "engine.chunk=2"]).build()
    assert vectorized == Vectorized(vectorized.experiment, 1, 2)


def test_what_was_resolved_can_be_run_again(write: Any) -> None:
    config = Config.load(write(PFEDME))
    again = {k: _without_none(v) for k, v in config.resolved().items() if v is not None}
    assert Config.checked(again) == config


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: v for k, v in value.items() if v is not None}
    return value


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["method.lr=-1"], "method.lr = -1.0: must be a number greater than 0"),
        (["method.lr=nan"], "method.lr = nan: must be a number greater than 0"),
        (["method.lr='fast'"], "method.lr = 'fast': must be a valid number"),
        (["method.tau=0"], "method.tau = 0: must be a whole number, at least 1"),
        (["method.tau=2.5"], "method.tau = 2.5: must be a valid integer"),
        (
            ["method.batch=half"],
            "method.batch = 'half': must be a valid integer, or must be 'full'",
        ),
        (["method.lrr=1"], "method.lrr: no such setting; did you mean 'lr'? (there are: name, lr,"),
        (["method.name=fedsgd"], "method.name = 'fedsgd': must be one of 'fedavg', 'per-fedavg',"),
        (["method=3"], "method = 3: must be a section"),
        (
            ["method.name=pfedme", "method.beta=0"],
            "method.beta = 0.0: must be a number greater than",
        ),
        (
            ["method.name=per-fedavg", "method.variant=second"],
            "method.variant = 'second': must be 'exact', 'fo' or 'hf'",
        ),
        (["data.source=mnits"], "data.source = 'mnits': must be one of 'synthetic', 'digits'"),
        (["data.clients=7"], "data.clients = 7: must be even for the Per-FedAvg split"),
        (["data.clients=true"], "data.clients = True: must be a valid integer"),
        (["data.test_fraction=2"], "data.test_fraction = 2.0: must be between 0 and 1"),
        (["model.hidden=[0]"], "model.hidden = (0,): sizes must be at least 1"),
        (["model.activation=swish"], "model.activation = 'swish': must be 'elu', 'relu',"),
        (["model.l2=-1"], "model.l2 = -1: must be greater than or equal to 0"),
        (["model={name='mlr', hidden=[3]}"], "model.hidden: no such setting (there are: name, l2)"),
        (["rounds=0"], "rounds = 0: must be greater than or equal to 1"),
        (["cohort=11"], "cohort = 11: must be between 1 and the number of clients, 10"),
        (["seed=-1"], "seed = -1: must be greater than or equal to 0"),
        (["adapt_on=validation"], 'adapt_on = \'validation\': must be one of "train", "test"'),
        (["round=5"], "round: no such setting; did you mean 'rounds'?"),
        (["engine.devices=9"], "engine.devices = 9: this process has 2 cpu device(s)"),
        (["engine.chunk=0"], "engine.chunk = 0: must be a whole number, at least 1"),
        (["lr"], "--set lr: write it as section.key=value, or key=value"),
        (["a.b.c.d=1"], "--set a.b.c.d=1: write it as section.key=value, or key=value"),
        (["seed.x=1"], "seed = {'x': 1}: must be a valid integer"),
    ],
)
def test_a_bad_setting_is_named(write: Any, settings: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.load(write(SMALL), settings).build()
    assert str(caught.value).startswith(message)


def test_every_fault_is_listed_at_once(write: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.load(write(SMALL), ["rounds=0", "data.clents=3", "method.batch=x"])
    assert [line.split(":")[0].split(" =")[0] for line in str(caught.value).splitlines()] == [
        "data.clents",
        "rounds",
        "method.batch",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rounds = = 3", "is not valid TOML: Invalid value"),
        ("rounds = 3", "data: is missing"),
        (SMALL.replace('name = "fedavg"', ""), "method: name is missing"),
        (SMALL.replace('source = "digits"', ""), "data: source is missing"),
        (PFEDME.replace('"mlr"', '"cnn"'), "model.name = 'cnn': needs images, but an input"),
    ],
)
def test_a_bad_file(write: Any, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.load(write(text)).build()
    assert message in str(caught.value)


def test_files_that_are_not_there_or_not_text(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*missing.toml: No such file"):
        Config.load(tmp_path / "missing.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not text in UTF-8"):
        Config.load(tmp_path / "binary.toml")


def test_the_comparison_keeps_its_methods_to_itself() -> None:
    with pytest.raises(ConfigError, match="give a CONFIG to run one method"):
        comparison(["method.lr=1"])
    entries = comparison(["data.clients=10", "cohort=3"], seed=5)
    assert {e.config.seed for e in entries} == {5}
    assert [e.config.cohort for e in entries] == [3, 3, 3, 3, 3, 10]


def test_short_products_are_for_accelerators() -> None:
    values = tomllib.loads(SMALL) | {"precision": "tf32"}
    if jax.default_backend() == "cpu":
        with pytest.raises(ConfigError, match="precision = 'tf32': is for accelerators"):
            Config.checked(values)
    else:
        assert Config.checked(values).build().experiment.task.precision == "tf32"
    with pytest.raises(ConfigError, match="precision"):
        Config.checked(values | {"precision": "float64"})
