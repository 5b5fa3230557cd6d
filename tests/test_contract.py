"""Methods from outside the package: SCAFFOLD, FedAdam and FedRep need nothing of its inside."""

import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from typer.testing import CliRunner

from federations import NAMES, distance, federation, simulated
from outside.fedadam import FedAdam
from outside.fedrep import FedRep
from outside.scaffold import Scaffold
from perfed import MLP, Config, Experiment, Pipeline, Sequential, Task, Vectorized, load
from perfed.cli.app import app
from perfed.core.random import Purpose
from perfed.core.trees import tree_sub
from perfed.evaluation.evaluator import SimulationEvaluator
from perfed.methods.registry import find_method, method_names
from perfed.pipeline.codecs import CODECS, Codec, LowPrecision, RandomK, TopK
from perfed.runs.files import read_json
from perfed.runs.run_dir import read_run
from test_engines import assert_close

METHODS = [
    Scaffold(lr=0.05, server_lr=0.9, tau=3, batch=8),
    FedAdam(lr=0.05, server_lr=0.02, tau=3, batch=8),
    FedRep(lr=0.05, head_steps=2, tau=3, batch=8, head="1"),
]
SETTINGS: dict[str, dict[str, Any]] = {
    "outside-scaffold": {"lr": 0.05, "server_lr": 0.9, "tau": 3, "batch": 5},
    "outside-fedadam": {"lr": 0.05, "server_lr": 0.02, "tau": 3, "batch": 5},
    "outside-fedrep": {"lr": 0.05, "head_steps": 2, "tau": 3, "batch": 5, "head": "1"},
}
CODEC_SETTINGS: dict[str, Codec] = {
    "low-precision": LowPrecision(7),
    "top-k": TopK(0.3),
    "random-k": RandomK(0.3),
}
HIDDEN = (8,)
NETWORK = MLP(64, 10, HIDDEN)
BODY, HEAD = 64 * 8 + 8, 8 * 10 + 10


@pytest.fixture(scope="module")
def data() -> Any:
    return load("digits", clients=6, split="dirichlet", seed=1)


def make(data: Any, method: Any, **options: Any) -> Experiment:
    return Experiment(data, Task(NETWORK), method, **({"cohort": 3, "seed": 4} | options))


def install(folder: Path) -> Path:
    """The methods as another distribution has them: modules, and entry points that name them."""
    shutil.copytree(Path(__file__).parent / "outside", folder / "outside")
    info = folder / "outside_methods-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: outside-methods\nVersion: 1.0\n")
    points = {m.name: f"{type(m).__module__}:{type(m).__name__}" for m in METHODS}
    lines = ["[perfed.methods]", *(f"{name} = {where}" for name, where in points.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For this process and those it starts."""
    folder = install(tmp_path / "site")
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=":")


@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.name)
def test_each_is_a_short_file(method: Any) -> None:
    path = Path(__file__).parent / "outside" / f"{type(method).__module__.split('.')[-1]}.py"
    assert len(path.read_text().splitlines()) < 120


@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.name)
def test_shared_leaves_alone_are_sent(data: Any, method: Any) -> None:
    """In float32: a header of 7 bytes and 4 for each entry; SCAFFOLD's variates go beside."""
    engine = Sequential(make(data, method))
    state, traffic = engine.run(engine.init(), 2)
    shared = BODY if method.name == "outside-fedrep" else BODY + HEAD
    messages = 2 if method.name == "outside-scaffold" else 1
    np.testing.assert_array_equal(traffic.uplink, (7 + 4 * shared) * messages)
    np.testing.assert_array_equal(traffic.downlink, (7 + 4 * shared) * messages)
    at_server = jax.tree.leaves((state.params, state.server_state))
    entries = {
        "outside-scaffold": 2 * shared,
        "outside-fedadam": 3 * shared + 1,
        "outside-fedrep": shared,
    }
    assert sum(leaf.size for leaf in at_server) == entries[method.name]


@pytest.mark.slow
@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.name)
def test_every_codec_with_each(data: Any, method: Any, name: str) -> None:
    """Two engines agree, and what they count is the length of messages that can be decoded."""
    codec = CODEC_SETTINGS.get(name) or CODECS[name]()
    setup = make(data, method, pipeline=Pipeline.of(codec, error_feedback=name == "top-k"))
    plain, engine = Sequential(setup), Vectorized(setup, 2, 2)
    expected, traffic = plain.run(plain.init(), 2)
    state, same = engine.run(engine.init(), 2)
    assert_close(state, expected, 2e-5)
    np.testing.assert_array_equal(traffic.uplink, same.uplink)

    delta = tree_sub(expected.params, plain.init().params)
    key = setup.client_key(Purpose.UPLINK, 0, 0)
    for tree in [delta] if method.name != "outside-scaffold" else [delta, expected.server_state]:
        message, sent = codec.encode(key, tree), codec.send(key, tree)
        assert len(message) == int(sent.bytes)
        assert_close(codec.decode(message, tree), sent.received, 1e-6)


def test_personal_leaves_stay_with_their_clients(data: Any) -> None:
    """FedRep: each client of the cohort has a head of its own; the others have the first one."""
    setup = make(data, METHODS[2])
    engine = Sequential(setup)
    first = np.asarray(setup.init_params()[1]["w"])
    state = engine.advance(engine.init(), 1)
    personal: Any = state.clients.personal
    heads = np.asarray(personal[1]["w"])
    moved = {i for i in range(6) if np.abs(heads[i] - first).max() > 1e-4}
    assert moved == set(np.asarray(setup.sample_cohort(0)).tolist())
    assert state.params[1] == {"w": None, "b": None}
    scores = SimulationEvaluator(engine)(state).scores
    assert set(scores) == {"personalized"}


def test_scaffold_keeps_the_mean_of_its_variates(data: Any) -> None:
    """C is the mean of all c_i, which line 17 keeps it to be from the first round on."""
    setup = make(data, METHODS[0])
    engine = Vectorized(setup)
    state = engine.advance(engine.init(), 4)
    mean = jax.tree.map(lambda c: c.mean(axis=0), state.clients.state)
    assert_close(state.server_state, mean, 1e-4)


@pytest.mark.usefixtures("installed")
def test_entry_points_are_found_by_name() -> None:
    assert {m.name for m in METHODS} <= set(method_names())
    assert find_method("outside-scaffold") is Scaffold
    assert find_method("scaffold") is not Scaffold
    config = Config.checked(
        {
            "data": {"source": "digits"},
            "model": {"name": "mlr"},
            "rounds": 1,
            "method": {"name": "outside-fedadam", "server_optimizer": {"name": "yogi", "b2": 0.99}},
        }
    )
    assert config.build().experiment.method.server_optimizer.b2 == 0.99  # type: ignore[attr-defined]


PERSONAL = """
rounds = 2
cohort = 3
eval_every = 1
[data]
source = "digits"
clients = 4
[model]
name = "mlp"
hidden = [4]
[method]
name = "outside-fedrep"
tau = 1
head_steps = 1
head = "1"
"""


@pytest.mark.slow
@pytest.mark.usefixtures("installed")
def test_runs_without_a_global_model_are_summarized_reported_and_swept(tmp_path: Path) -> None:
    config = tmp_path / "fedrep.toml"
    config.write_text(PERSONAL)
    local = ["--set", "method={name='local', lr=0.05}"]
    runs = [tmp_path / "fedrep", tmp_path / "local"]
    for out, settings in zip(runs, ([], local), strict=True):
        done = invoke("run", config, "--out", out, *settings)
        assert "personalized" in done
        assert " global " not in done
        summary = read_json(out / "summary.json")
        assert "global" not in summary
        assert all("global" not in point for point in summary["history"])
        assert len(summary["personalized"]["accuracy"]["clients"]) == 4
        assert list(read_run(out).scores) == ["personalized"]
    page = tmp_path / "report.html"
    invoke("report", *runs, "--out", page, "--figures", tmp_path / "figures")
    text = page.read_text(encoding="utf-8")
    assert "fedrep" in text
    assert 'id="gain"' not in text
    assert (tmp_path / "figures" / "clients.png").exists()
    assert not (tmp_path / "figures" / "gain.png").exists()
    out = tmp_path / "sweep"
    swept = invoke("sweep", config, "--grid", "method.lr=0.01,0.1", "--seeds", 1, "--out", out)
    assert "held-out" in swept
    assert "failed" not in swept


def invoke(*arguments: object) -> str:
    done = CliRunner().invoke(app, [str(part) for part in arguments])
    assert done.exit_code == 0, done.output
    return done.output


@pytest.mark.slow
@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("name", SETTINGS)
def test_a_real_federation_ends_where_a_simulation_ends(tmp_path: Path, name: str) -> None:
    method = {"name": name} | SETTINGS[name]
    model = {"name": "mlp", "hidden": [5]}
    codec = {"name": "low-precision", "levels": 15}
    with federation(tmp_path, method, model=model, codec=codec) as run:
        run.serve()
        for client in NAMES:
            run.join(client)
        run.finish()
    expected = simulated(run.values)
    for i, client in enumerate(NAMES):
        assert distance(run.own_model(client), expected.personal_model(i)) < 1e-5
    summary = run.summary()
    assert summary["uplink_bytes"] == expected.costs.uplink_bytes[-1]
    assert summary["downlink_bytes"] == expected.costs.downlink_bytes[-1]
