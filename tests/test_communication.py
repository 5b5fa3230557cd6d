"""What is sent in a round: every method with every codec, its bytes, and what it costs in time."""

import dataclasses
from collections.abc import Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import problems
from perfed import (
    APFL,
    MLP,
    MLR,
    BFloat16,
    Codec,
    Config,
    ConfigError,
    DataError,
    Ditto,
    Experiment,
    FedAdam,
    FedALA,
    FedAvg,
    FedAvgM,
    FedBABU,
    Federation,
    FedPer,
    FedProx,
    FedRep,
    FedRoD,
    FedYogi,
    FieldError,
    Float16,
    Float32,
    LGFedAvg,
    Local,
    LowPrecision,
    Method,
    Network,
    PerFedAvg,
    PFedMe,
    Pipeline,
    RandomK,
    Result,
    Scaffold,
    Sequential,
    Sign,
    Task,
    TopK,
    Vectorized,
    fedpaq,
    load,
    qsgd,
    simulate,
    synthetic,
)
from perfed.core.random import Purpose, fold
from perfed.core.trees import row
from perfed.evaluation import SimulationEvaluator
from perfed.methods import Received, find_method, method_names
from perfed.methods.schedules import Harmonic
from perfed.pipeline.codecs import CODECS
from perfed.report.figures import curve_picture
from perfed.runs.summary import summarize
from perfed.simulation import Traffic
from perfed.simulation.experiment import NO_RECORD
from perfed.simulation.round import train_client

METHODS_TRIED: list[Method] = [
    FedAvg(lr=0.1, tau=5, batch=20),
    PerFedAvg("hf", alpha=0.05, beta=0.1, tau=5, batch=20),
    PFedMe(lam=5.0, eta=0.05, local_rounds=5, inner_lr=0.1),
    Local(lr=0.1, tau=5),
    FedProx(lr=0.1, tau=5),
    Scaffold(lr=0.1, tau=5),
    FedAvgM(lr=0.1, tau=5, momentum=0.5),
    FedAdam(lr=0.1, tau=5, server_lr=0.1),
    FedYogi(lr=0.1, tau=5, server_lr=0.1),
    Ditto(lr=0.1, personal_lr=0.1, tau=5),
    APFL(lr=0.1, tau=5),
    FedPer(lr=0.1, tau=5),
    FedRep(lr=0.1, head_steps=5, body_steps=2),
    FedBABU(lr=0.1, tau=5, adapt_steps=1),
    LGFedAvg(lr=0.1, tau=5),
    FedRoD(lr=0.1, tau=5),
    FedALA(lr=0.1, tau=5),
]
# They need a body below the head.
WITH_BODY = (FedPer, FedRep, FedBABU, LGFedAvg)
PIPELINES_TRIED = [
    Pipeline(),
    Pipeline.of(Float16()),
    Pipeline.of(BFloat16()),
    Pipeline.of(LowPrecision(4)),
    Pipeline.of(Sign(), error_feedback=True),
    Pipeline.of(TopK(0.2, LowPrecision(7)), error_feedback=True),
    Pipeline.of(RandomK(0.3)),
]


@pytest.fixture(scope="module")
def data() -> Federation:
    return synthetic(clients=8, features=12, classes=4, sizes="fedprox", seed=1)


# All of them. Quickly, each codec with FedAvg and the quantizer with each method. That it learns is
# seen with every codec of a method of each kind, and with the quantizer of all.
SCORED = (FedAvg, PerFedAvg, PFedMe, Local, Scaffold)


def pairs() -> Iterator[Any]:
    for method, pipeline in product(METHODS_TRIED, PIPELINES_TRIED):
        name = f"{method.name}, {pipeline.codec.name}"
        quantized = isinstance(pipeline.codec, LowPrecision)
        quick = isinstance(method, FedAvg) or (quantized and isinstance(method, SCORED))
        marks = () if quick else pytest.mark.slow
        if not (quantized or isinstance(method, SCORED)):
            yield pytest.param(method, pipeline, False, id=f"{name}, bytes", marks=marks)
            continue
        yield pytest.param(method, pipeline, True, id=name, marks=marks)
        if quantized and not quick:
            yield pytest.param(method, pipeline, False, id=f"{name}, bytes")


@pytest.mark.parametrize(("method", "pipeline", "scored"), list(pairs()))
def test_every_method_with_every_codec(
    data: Federation, method: Method, pipeline: Pipeline, scored: bool
) -> None:
    """It learns, and a round's bytes are the lengths of the messages that `encode` makes."""
    model = MLP(12, 4, (8,)) if isinstance(method, WITH_BODY) else MLR(12, 4)
    experiment = Experiment(data, Task(model), method, 4, seed=3, pipeline=pipeline)
    engine = (
        Vectorized(experiment) if scored else Sequential(experiment)
    )  # compiled in half the time
    first = engine.init()
    state, traffic = engine.run(first, 1)
    sends = not isinstance(method, Local)
    whole = len(Float32().encode(fold(0, Purpose.INIT), first.params)) if sends else 0
    messages = 2 if isinstance(method, Scaffold) else 1  # its variates go beside
    assert traffic.downlink[0] == messages * whole
    plain = dataclasses.replace(experiment, pipeline=Pipeline())
    train = jax.jit(partial(train_client, plain))
    record = row(plain.init_state().clients, 0)
    received = plain.received(first, record)
    for client, length in zip(traffic.cohort[0], traffic.uplink[0], strict=True):
        trained = train(plain.device_data(), received, record, 0, client)
        keys = [
            jax.random.fold_in(fold(3, Purpose.UPLINK, 0, int(client)), i) for i in range(messages)
        ]
        if not sends:
            assert (jax.tree.leaves(trained.written), length) == ([], 0)
            continue
        message = pipeline.codec.encode(keys[0], trained.written)
        beside = [pipeline.extra_codec.encode(key, trained.extra) for key in keys[1:]]
        assert length == sum(map(len, [message, *beside]))
        decoded = pipeline.codec.decode(message, first.params)
        assert jax.tree.map(jnp.shape, decoded) == jax.tree.map(jnp.shape, first.params)
    if not scored:
        return
    score = SimulationEvaluator(engine)
    last = engine.advance(state, 25)
    before, after = (score(s).scores["personalized"].loss.mean() for s in (first, last))
    # Random-k multiplies the noise of what is sent, and that of SCAFFOLD's variates too.
    noisy = isinstance(method, Scaffold) and isinstance(pipeline.codec, RandomK)
    assert after < (0.9 if noisy else 0.8) * before


def test_all_methods_and_codecs_are_tried() -> None:
    ours = {n for n in method_names() if find_method(n).__module__.startswith("perfed.methods.")}
    assert {m.name for m in METHODS_TRIED} == ours
    assert {type(p.codec) for p in PIPELINES_TRIED} == set(CODECS.values())


def test_engines_agree_on_what_is_sent(data: Federation) -> None:
    """One client after another or all at once: the same models, and the same bytes."""
    pipeline = Pipeline.of(LowPrecision(15), error_feedback=True)
    experiment = Experiment(
        data, Task(MLR(12, 4)), PFedMe(), 5, pipeline=pipeline, downlink=LowPrecision(1023)
    )
    engines = (Sequential(experiment), Vectorized(experiment))
    results = [engine.run(engine.init(), 3) for engine in engines]
    (one, sent), (other, sent_too) = results
    np.testing.assert_array_equal(sent.cohort, sent_too.cohort)
    np.testing.assert_array_equal(sent.downlink, sent_too.downlink)
    np.testing.assert_allclose(sent.uplink, sent_too.uplink, atol=2)
    for a, b in zip(*map(jax.tree.leaves, (one, other)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    assert sent.uplink.shape == (3, 5)
    pieces = Vectorized(experiment)
    state, first = pieces.run(pieces.init(), 1)
    _, rest = pieces.run(state, 2)
    for a, b in zip(Traffic.concatenate([first, rest]), sent_too, strict=True):
        np.testing.assert_array_equal(a, b)


def test_every_round_and_message_has_randomness_of_its_own(data: Federation) -> None:
    """Round 1's messages, the iterate among them, by the keys of round 1 and of their number."""
    codec = LowPrecision(2)
    method = PerFedAvg("fo", alpha=0.1, beta=0.1, tau=3, send_iterate=True)
    experiment = Experiment(
        data, Task(MLR(12, 4)), method, 3, pipeline=Pipeline.of(codec), downlink=LowPrecision(9)
    )
    engine = Sequential(experiment)
    state = engine.advance(engine.init(), 1)
    after, traffic = engine.run(state, 1)
    plain = dataclasses.replace(experiment, pipeline=Pipeline())
    down_key = fold(0, Purpose.DOWNLINK, 1)
    w = LowPrecision(9).compress(down_key, state.params)
    assert traffic.downlink[0] == len(LowPrecision(9).encode(down_key, state.params))
    train, rows = jax.jit(partial(train_client, plain)), plain.device_data()
    moves = []
    for client, sent in zip(traffic.cohort[0], traffic.uplink[0], strict=True):
        trained = train(rows, Received(w), NO_RECORD, 1, client)
        key = fold(0, Purpose.UPLINK, 1, int(client))
        first, second = (jax.random.fold_in(key, i) for i in (0, 1))
        lengths = [len(codec.encode(first, trained.written)),
                   len(codec.encode(second, trained.extra))]  # fmt: skip
        assert sent == sum(lengths)
        moves.append(codec.compress(second, trained.extra))
    mean = jax.tree.map(lambda *parts: sum(parts) / 3, *moves)
    found = jax.tree.map(lambda a, b: a - b, after.server_state, state.params)
    for a, b in zip(*map(jax.tree.leaves, (found, mean)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_no_rounds_change_nothing(data: Federation) -> None:
    setup = Experiment(data, Task(MLR(12, 4)), FedAvg(), 2)
    for engine in (Sequential(setup), Vectorized(setup)):
        state, traffic = engine.run(engine.init(), 0)
        assert int(state.round) == 0
        assert traffic.uplink.shape == (0, 2)


def test_more_rounds_than_a_block_records(data: Federation) -> None:
    engine = Vectorized(Experiment(data, Task(MLR(12, 4)), FedAvg(tau=1), 2))
    state, traffic = engine.run(engine.init(), 300)
    assert int(state.round) == 300
    assert traffic.uplink.shape == (300, 2)
    assert len(set(traffic.uplink.ravel())) == 1  # float32: all of one length
    assert len({tuple(c) for c in traffic.cohort}) > 20
    for round in (0, 255, 256, 299):
        np.testing.assert_array_equal(traffic.cohort[round], engine.experiment.sample_cohort(round))


def test_it_is_the_change_that_is_quantized() -> None:
    """One FedPAQ round in NumPy: w + mean of Q(w_i - w); never Q of a model."""
    data = problems.federation(sizes=(30, 40))
    method = FedAvg(lr=0.05, tau=1, batch="full")
    setup = problems.experiment(method, data, codec=LowPrecision(2))
    engine = Sequential(setup)
    first = engine.init()
    w = jnp.full_like(first.params, 3.0)
    after = engine.advance(first._replace(params=w), 1).params
    changes = []
    for client in range(2):
        x, y = (np.asarray(part, np.float64) for part in data.train.client(client))
        gradient = x.T @ (x @ np.asarray(w) - y) / len(y)
        exact = jnp.asarray(-0.05 * gradient, jnp.float32)
        key = jax.random.fold_in(fold(setup.seed, Purpose.UPLINK, 0, client), 0)
        sent = np.asarray(LowPrecision(2).compress(key, exact))
        assert np.abs(sent - exact).max() > 1e-3  # it does lose something
        changes.append(sent)
    np.testing.assert_allclose(after, w + np.mean(changes, axis=0), rtol=1e-5)


def test_error_feedback_stays_with_the_client_and_is_made_up_for() -> None:
    """What a message leaves out is kept, added to the next change, and not sent to anybody."""
    data = problems.federation(sizes=(30, 40))
    method = FedAvg(lr=0.05, tau=1, batch="full")
    codec = TopK(0.3)
    setup = problems.experiment(method, data, codec=codec, error_feedback=True)
    engine = Vectorized(setup)
    state = engine.init()
    plain = dataclasses.replace(setup, pipeline=Pipeline())
    kept = np.zeros((2, *np.shape(state.params)))
    for round in range(3):
        due, sent = [], []
        for client in range(2):
            received = Received(state.params)
            trained = train_client(plain, plain.device_data(), received, NO_RECORD, round, client)
            due.append(np.asarray(trained.written) + kept[client])
            sent.append(np.asarray(codec.compress(jax.random.key(0), jnp.asarray(due[-1]))))
            kept[client] = due[-1] - sent[-1]
        after = engine.advance(state, 1)
        np.testing.assert_allclose(
            after.params, state.params + np.mean(sent, axis=0), rtol=1e-4, atol=1e-6
        )
        residual = np.asarray(after.clients.residual)
        np.testing.assert_allclose(residual, kept, rtol=1e-4, atol=1e-5)
        state = after
    assert np.abs(kept).max() > 0


def test_a_coarse_downlink_is_what_clients_start_from() -> None:
    data = problems.federation(sizes=(30,))
    method = FedAvg(lr=0.05, tau=1, batch="full")
    coarse = LowPrecision(3)
    setup = dataclasses.replace(problems.experiment(method, data), downlink=coarse)
    engine = Sequential(setup)
    first = engine.init()
    w = jnp.arange(1.0, 1.0 + len(first.params))
    state, traffic = engine.run(first._replace(params=w), 1)
    key = fold(setup.seed, Purpose.DOWNLINK, 0)
    received = np.asarray(coarse.compress(key, w))
    assert np.abs(received - w).max() > 0.01
    x, y = (np.asarray(part, np.float64) for part in data.train.client(0))
    step = -0.05 * x.T @ (x @ received - y) / len(y)
    np.testing.assert_allclose(state.params, w + step, rtol=1e-4)
    assert traffic.downlink[0] == len(coarse.encode(key, w))
    for bad in (RandomK(0.1), TopK(0.1)):
        with pytest.raises(FieldError, match="must write all of a model"):
            dataclasses.replace(setup, downlink=bad)


def test_the_iterate_is_sent_and_counted_too(data: Federation) -> None:
    """Per-FedAvg, Remark 4.7: a second message."""
    one, two = (
        Experiment(
            data,
            Task(MLR(12, 4)),
            PerFedAvg(tau=2, send_iterate=send),
            2,
            pipeline=Pipeline.of(Float16()),
        )
        for send in (False, True)
    )
    bytes_of = [Vectorized(e).run(Vectorized(e).init(), 1)[1].uplink[0, 0] for e in (one, two)]
    assert bytes_of[1] == 2 * bytes_of[0]


def test_fedpaq_and_qsgd_are_fedavg_with_the_codec() -> None:
    """Algorithm 1, and the step sizes of Theorems 1 and 2."""
    method, pipeline, cohort = fedpaq(rounds=100, tau=5, r=25, s=3, lr=0.1)
    assert (method, cohort) == (FedAvg(lr=0.1, tau=5, batch=10), 25)
    assert pipeline == Pipeline.of(LowPrecision(3))
    one = fedpaq(rounds=100, tau=5, mu=0.5).method
    assert one == FedAvg(lr=8.0, tau=5, batch=10, schedule=Harmonic())
    two = fedpaq(rounds=20, tau=5, smoothness=2.0).method
    assert isinstance(two, FedAvg)
    assert two.lr == pytest.approx(1 / (2 * np.sqrt(100)))
    assert qsgd(rounds=10, s=2, lr=0.1) == fedpaq(rounds=10, tau=1, s=2, lr=0.1)
    with pytest.raises(FieldError, match="exactly one of lr, mu"):
        fedpaq(rounds=10)
    with pytest.raises(FieldError, match="exactly one of lr, mu"):
        fedpaq(rounds=10, lr=0.1, mu=1.0)


def test_theorem_1_rate_diminishes() -> None:
    """In round k all tau steps are 4 / (mu (k tau + 1)) times the gradient."""
    data = problems.federation(sizes=(30,))
    method = FedAvg(lr=0.1, tau=3, batch="full", schedule=Harmonic())
    engine = Sequential(problems.experiment(method, data))
    state = engine.init()
    x, y = (np.asarray(part, np.float64) for part in data.train.client(0))
    for k in range(3):
        after = engine.advance(state, 1)
        expected = np.asarray(state.params, np.float64)
        for _ in range(3):
            expected = expected - 0.1 / (3 * k + 1) * x.T @ (x @ expected - y) / len(y)
        np.testing.assert_allclose(after.params, expected, rtol=1e-4, atol=1e-6)
        state = after


def traffic_of(uplink: Any, downlink: Any, cohort: Any) -> Traffic:
    return Traffic(np.array(cohort), np.array(uplink), np.array(downlink))


def test_the_time_of_a_round_is_the_papers() -> None:
    """All bits over the shared link, and the slowest of the shifted-exponential computations."""
    traffic = traffic_of([[100, 300], [50, 50]], [10, 10], [[0, 2], [1, 0]])
    gradients = np.array([10, 20, 40])
    network = Network(bandwidth=800.0, shift=0.5, scale=4.0)
    seconds = network.seconds(traffic, gradients, seed=7, first_round=0)
    for k in range(2):
        luck = np.random.default_rng([7, k]).exponential(size=2)
        times = [gradients[c] * (0.5 + e / 4) for c, e in zip(traffic.cohort[k], luck, strict=True)]
        assert seconds[k] == pytest.approx(8 * traffic.uplink[k].sum() / 800 + max(times))
    later = network.seconds(
        traffic_of([[50, 50]], [10], [[1, 0]]), gradients, seed=7, first_round=1
    )
    assert later[0] == seconds[1]  # a run that is taken up again has the same luck
    own = dataclasses.replace(
        network, down_bandwidth=80.0, client_bandwidth=(8.0, 8.0, 16.0), client_speed=(1, 1, 2.0)
    )
    luck = np.random.default_rng([7, 0]).exponential(size=2)
    first = 10 * (0.5 + luck[0] / 4) + 8 * 100 / 8
    second = 40 * (0.5 + luck[1] / 4) / 2 + 8 * 300 / 16
    expected = 8 * 10 / 80 + max(first, second) + 8 * 400 / 800
    assert own.seconds(traffic, gradients, 7, 0)[0] == pytest.approx(expected)


def test_the_mean_computation_is_what_the_ratio_says() -> None:
    """C_comm/C_comp = (p F / BW) / (shift + 1/scale)."""
    network = Network.of_ratio(100, parameters=785, shift=1e-3, scale=500.0)
    assert 785 * 32 / network.bandwidth / (1e-3 + 1 / 500) == pytest.approx(100)
    rounds = 20_000
    nothing = np.zeros((rounds, 1), int)
    traffic = traffic_of(nothing, nothing[:, 0], nothing)
    seconds = network.seconds(traffic, np.array([1]), seed=0, first_round=0)
    assert seconds.mean() == pytest.approx(1e-3 + 1 / 500, rel=0.03)
    assert seconds.min() >= 1e-3


@pytest.mark.parametrize(
    ("method", "gradients"),
    [
        (FedAvg(tau=5, batch=10), 50),
        (FedAvg(tau=5, batch="full"), 500),
        (PerFedAvg("fo", tau=2, batch=10, batch_outer=7), 34),
        (PerFedAvg("hf", tau=2, batch=10, batch_outer=7, batch_hessian=5), 54),
        (PerFedAvg("fo", tau=2, batch=10, adapt_steps=3), 80),
        (PFedMe(local_rounds=3, inner_steps=4, batch=10), 120),
        (Local(tau=5, batch=10), 50),
    ],
    ids=str,
)
def test_gradients_of_a_turn(method: Method, gradients: int) -> None:
    assert method.gradient_count(100) == gradients


@pytest.mark.slow
def test_fedpaq_wins_at_equal_simulated_time() -> None:
    """C_comm/C_comp = 100: s = 1 and tau = 5 against no quantizer (FedAvg) and tau = 1 (QSGD)."""
    data = load("digits", split="iid", clients=20, examples=1600)
    network = Network.of_ratio(100, 650, shift=1e-4, scale=1e4)
    shared: dict[str, Any] = {"cohort": 10, "l2": 1e-3, "network": network, "eval_every": 5}
    paq, sgd = fedpaq(rounds=200, tau=5, s=1, lr=0.2), qsgd(rounds=200, s=1, lr=0.2)

    def run_of(method: Method, codec: Codec, rounds: int) -> Result:
        return simulate(data, MLR(64, 10), method, rounds=rounds, codec=codec, **shared)

    runs = {
        "fedpaq": run_of(paq.method, paq.pipeline.codec, 200),
        "fedavg": run_of(paq.method, Float32(), 60),
        "qsgd": run_of(sgd.method, sgd.pipeline.codec, 200),
    }
    seconds = {name: run.costs.seconds for name, run in runs.items()}
    # All of them as far as the one that stops first.
    end = min(s[-1] for s in seconds.values() if s is not None)

    def loss(name: str) -> float:
        clock = seconds[name]
        assert clock is not None
        reached = [e for e in runs[name].history if clock[e.round] <= end]
        return float(reached[-1].scores["global"].loss.mean())

    assert loss("fedpaq") < loss("fedavg")
    assert loss("fedpaq") < loss("qsgd")


CONFIG = """
rounds = 4
cohort = 3
[data]
source = "synthetic"
clients = 6
sizes = "fedprox"
[model]
name = "mlr"
[method]
name = "fedavg"
"""


def config(tmp_path: Path, text: str, *overrides: str) -> Config:
    path = tmp_path / "run.toml"
    path.write_text(text)
    return Config.load(path, overrides)


def test_codecs_from_a_file(tmp_path: Path) -> None:
    text = CONFIG + (
        '[codec]\nname = "top-k"\nfraction = 0.2\nerror_feedback = true\n'
        'inner = { name = "low-precision", levels = 3 }\n'
        '[codec.downlink]\nname = "float16"\n[network]\nratio = 100\n'
    )
    run = config(tmp_path, text)
    setup = run.build().experiment
    assert setup.pipeline == Pipeline.of(TopK(0.2, LowPrecision(3)), error_feedback=True)
    assert setup.downlink == Float16()
    result = run.train(run.build())
    assert result.costs.seconds is not None
    assert result.costs.seconds[-1] > 0
    changed = config(tmp_path, text, "codec.downlink.name=low-precision", "codec.downlink.levels=9")
    assert changed.build().experiment.downlink == LowPrecision(9)


def test_fedpaq_from_a_file(tmp_path: Path) -> None:
    text = CONFIG.replace('"fedavg"', '"fedpaq"\ntau = 3\nr = 2\ns = 5\nlr = 0.1')
    setup = config(tmp_path, text.replace("cohort = 3\n", "")).build().experiment
    assert setup.method == FedAvg(lr=0.1, tau=3, batch=10)
    assert setup.pipeline.codec == LowPrecision(5)
    assert setup.cohort == 2
    loaded = config(tmp_path, text.replace("cohort = 3\n", ""), "codec.downlink.name=float16")
    assert loaded.build().experiment.downlink == Float16()
    again = Config.checked(loaded.resolved())  # what a run's folder keeps says the same
    assert again.build_preset() == loaded.build_preset()
    assert loaded.resolved()["codec"]["levels"] == 5


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["codec.name=zip"], "codec.name = 'zip': must be one of 'float32', "),
        (["codec.name=low-precision", "codec.level=3"], "codec.level: no such setting; did you"),
        (["codec.name=low-precision", "codec.levels=0"], "codec.levels = 0: must be"),
        (["codec.name=sign", "codec.downlink.name=zip"], "codec.downlink.name = 'zip': must be"),
        (["codec.name=sign", "codec.downlink.name=top-k"], "codec.downlink.name = 'top-k': must"),
        (["codec.name=sign", "codec.downlink.name=float16", "codec.downlink.x=1"],
         "codec.downlink.x: no such setting"),
        (["codec.name=top-k", "codec.inner.name=low-precision", "codec.inner.levels=0"],
         "codec.inner.levels = 0: must be"),
        (["network.ratio=1.0", "network.client_speed=[1.0, 2.0]"], "one number for each of 6"),
        (["codec.name=float16", "codec.inner.name=sign"], "codec.inner: no such setting"),
        (["network.ratio=1.0", "network.scale=0.0"], "network.scale = 0.0: must be"),
        (["network.ratio=1.0", "network.shift=-1.0"], "network.shift = -1.0: must be"),
        (["network.ratio=1.0", "network.client_speed=[1.0, nan]"], "network.client_speed = (1.0,"),
        (["method.name=fedpaq", "method.lr=0.1", "method.s=70000"], "method.s = 70000: must be"),
        (["codec.name=low-precision", "codec.norm=layer"], "codec.norm = 'layer': must be"),
        (["network.ratio=0"], "network.ratio = 0"),
        (["network.shift=1.0"], "network.ratio = None: give either ratio"),
        (["network.ratio=1.0", "network.bandwidth=1.0"], "give either ratio"),
        (["method.name=fedpaq"], "method.lr = None: give exactly one of lr"),
        (["method.name=fedpaq", "method.lr=0.1", "codec.name=sign"], "codec: fedpaq brings its"),
        (["method.name=fedpaq", "method.lr=0.1", "method.r=2"], "method.r = 2: cohort is 3"),
        (["method.name=qsgd", "method.lr=0.1", "method.tau=2"], "method.tau: no such setting"),
    ],
)  # fmt: skip
def test_faults_are_named(tmp_path: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config(tmp_path, CONFIG, *overrides)
    assert message in str(caught.value)


@pytest.mark.slow
def test_loss_against_simulated_time_is_drawn(tmp_path: Path, data: Federation) -> None:
    network = Network.of_ratio(100, 52, shift=1e-4, scale=1e4)
    timed, untimed = (
        summarize(
            simulate(data, MLR(12, 4), FedAvg(), rounds=2, cohort=2, network=n, codec=Float16())
        )
        for n in (network, None)
    )
    curve_picture({"a": timed}, tmp_path / "time.png", "simulated_seconds")
    assert (tmp_path / "time.png").read_bytes().startswith(b"\x89PNG")
    assert timed["history"][-1]["simulated_seconds"] == timed["simulated_seconds"] > 0
    assert sum(timed["traffic"]["client_uplink_bytes"]) == timed["uplink_bytes"]
    assert sum(timed["traffic"]["round_uplink_bytes"]) == timed["uplink_bytes"]
    assert sum(timed["traffic"]["client_downlink_bytes"]) == timed["downlink_bytes"]
    assert timed["downlink_bytes"] > 1.9 * timed["uplink_bytes"]  # float32 down, float16 up
    with pytest.raises(DataError, match="has no simulated_seconds"):
        curve_picture({"b": untimed}, tmp_path / "no.png", "simulated_seconds")
    alone = summarize(simulate(data, MLR(12, 4), Local(), rounds=1, cohort=2))
    with pytest.raises(DataError, match="c has no global model"):
        curve_picture({"c": alone}, tmp_path / "no.png", kind="global")
