"""A federation that is read as it is needed gives what one in memory gives, in bounded memory."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from perfed import (
    APFL,
    MLP,
    Config,
    ConfigError,
    DataError,
    DivergedError,
    Experiment,
    FedAvg,
    Federation,
    FieldError,
    Local,
    LowPrecision,
    PerFedAvg,
    PFedMe,
    Pipeline,
    Task,
    TopK,
    Vectorized,
    load,
    simulate,
)
from perfed.data import FederationWriter, FlatExamples, store
from perfed.evaluation.evaluator import SimulationEvaluator, sample_clients
from perfed.runs import recording
from perfed.runs.recording import Recording
from perfed.runs.run_dir import read_run
from perfed.simulation import ClientRecord, Streamed, engine_for
from perfed.simulation import auto as chooser
from perfed.simulation import client_store as storing
from perfed.simulation import cohort_reader as reading
from perfed.simulation.client_store import ClientStore
from perfed.simulation.cohort_reader import _Source
from test_engines import assert_close
from test_recording import same, started

PFEDME = PFedMe(local_rounds=2, inner_start="kept", inner_steps=3, inner_lr=0.05, batch=8)


@pytest.fixture(scope="module")
def on_disk(tmp_path_factory: pytest.TempPathFactory) -> Federation:
    """Uneven clients, whose inputs are each scaled by their own data."""
    root = tmp_path_factory.mktemp("stored") / "digits"
    data = load("digits", clients=12, split="dirichlet", seed=1, standardize="client")
    store(data, root)
    return load("stored", root=str(root))


def make(data: Federation, method: Any, **options: Any) -> Experiment:
    options = {"cohort": 5, "seed": 4} | options
    return Experiment(data, Task(MLP(64, 10, (16,))), method, **options)


@pytest.mark.parametrize(
    ("method", "options"),
    [
        (FedAvg(lr=0.05, tau=3, batch=8), {"weighting": "size", "sampling": "epochs"}),
        pytest.param(
            PerFedAvg("hf", alpha=0.05, beta=0.05, tau=2, batch=8, send_iterate=True),
            {},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            PFEDME,
            {"pipeline": Pipeline.of(TopK(0.3), True), "downlink": LowPrecision(15)},
            marks=pytest.mark.slow,
        ),
        pytest.param(Local(lr=0.05, tau=3, batch="full"), {}, marks=pytest.mark.slow),
        pytest.param(APFL(lr=0.05, tau=3, batch=8), {}, marks=pytest.mark.slow),
    ],
    ids=["fedavg", "per-fedavg", "pfedme", "local", "apfl"],
)
def test_as_if_all_were_in_memory(
    on_disk: Federation, method: Any, options: dict[str, Any]
) -> None:
    """Model, messages, personal models and scores; any devices, chunks and parts of a run."""
    setup = make(on_disk, method, **options)
    whole = Vectorized(setup)
    expected, sent = whole.run(whole.init(), 5)
    scores = SimulationEvaluator(whole, keep_models=True)(expected)
    for engine, parts in ((Streamed(setup), (5,)), (Streamed(setup, 1, 2), (1, 3, 1))):
        state, traffic = engine.init(), []
        for part in parts:
            state, more = engine.run(state, part)
            traffic.append(more)
        assert_close((state.params, state.server_state), (expected.params, expected.server_state))
        for got, due in zip(zip(*traffic, strict=True), sent, strict=True):
            np.testing.assert_array_equal(np.concatenate(got), due)
        found = SimulationEvaluator(engine, keep_models=True)(state)
        assert_close(found.models, scores.models)
        for kind, score in found.scores.items():
            np.testing.assert_allclose(score.loss, scores.scores[kind].loss, rtol=1e-4)


def test_only_the_rows_of_the_cohort_are_read(
    on_disk: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cohort by cohort, two of them ahead; and nobody's held-out rows."""
    read: list[tuple[int, int]] = []
    copy = reading._Source.copy

    def watched(self: Any, starts: list[int], sizes: list[int], to: np.ndarray) -> None:
        read.extend(zip(starts, sizes, strict=True))
        copy(self, starts, sizes, to)

    monkeypatch.setattr(reading._Source, "copy", watched)
    setup = make(on_disk, FedAvg(tau=1), cohort=3)
    engine = Streamed(setup)
    _, traffic = engine.run(engine.init(), 2)
    engine._pool.shutdown()
    train = on_disk.train
    ahead = [int(i) for round in (2, 3) for i in setup.sample_cohort(round)]
    due = [(int(train.start[i]), int(train.size[i])) for i in (*traffic.cohort.ravel(), *ahead)]
    assert sorted(read) == sorted(2 * due)  # inputs and labels


def test_files_that_change_under_a_run_are_noticed(tmp_path: Path) -> None:
    store(load("digits", clients=4), tmp_path / "d")
    engine = Streamed(make(load("stored", root=str(tmp_path / "d")), FedAvg(tau=1), cohort=4))
    os.truncate(tmp_path / "d" / "train_x.bin", 4096)
    with pytest.raises(DataError, match=r"train_x\.bin has become shorter"):
        engine.advance(engine.init(), 1)


@pytest.mark.parametrize("method", [FedAvg(lr=1e30, tau=5), PFedMe(lam=1.0, eta=1e30, batch=5)])
def test_divergence_is_named_as_in_memory(on_disk: Federation, method: Any) -> None:
    said = []
    for kind in (Vectorized, Streamed):
        engine = kind(make(on_disk, method))
        with pytest.raises(DivergedError) as error:
            engine.advance(engine.init(), 20)
        said.append(str(error.value))
    assert said[0] == said[1]


def test_what_does_not_fit_is_streamed(
    on_disk: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = make(on_disk, PFEDME)
    assert isinstance(engine_for(setup), Vectorized)
    needed = chooser.resident_bytes(setup, 2)
    rows = sum(part.x.nbytes + part.y.nbytes for part in (on_disk.train, on_disk.test))
    theta = 4 * (64 * 16 + 16 + 16 * 10 + 10)
    assert needed == rows + 2 * 12 * theta  # rows once, the rest on each of two devices
    monkeypatch.setattr(chooser, "memory_limit", lambda: needed)
    assert isinstance(engine_for(setup), Vectorized)
    monkeypatch.setattr(chooser, "memory_limit", lambda: needed - 1)
    assert isinstance(engine_for(setup), Streamed)
    told = Federation.remote(["a"], [3], [1], (64,), "float32", ("0", "1"))
    with pytest.raises(FieldError, match="not here to be read"):
        Streamed(make(told, PFEDME, cohort=1))


# What clients keep.

FIRST = ClientRecord({"a": np.array([1, 2, 3], np.float32), "b": np.array(7, np.int32)}, None, None)


def kept(*values: int) -> ClientRecord:
    numbers = np.array(values, np.int32)
    return ClientRecord(
        {"a": np.repeat(numbers[:, None], 3, 1).astype(np.float32), "b": numbers}, None, None
    )


def clients_of(store: ClientStore, n: int = 6) -> list[int]:
    memory: Any = store.read(np.arange(n)).state
    assert ((memory["a"] == memory["b"][:, None]) | (memory["b"] == 7)[:, None]).all()
    return [int(v) for v in memory["b"]]


def test_a_store_goes_back_to_any_round_since_the_last_checkpoint(tmp_path: Path) -> None:
    """Whatever was on the disk when it was left; and not beyond the checkpoint."""
    first = ClientStore(tmp_path / "s", 6, FIRST)
    np.testing.assert_array_equal(first.read(np.array([4])).state["a"], [[1, 2, 3]])
    stages = [clients_of(first)]
    for round, clients in enumerate(([0, 1], [1, 2], [5, 0], [1, 3])):
        first.write(round, np.array(clients), kept(*(10 * round + c for c in clients)))
        stages.append(clients_of(first))
    assert stages[-1] == [20, 31, 12, 33, 7, 25]
    for round in (4, 3, 2):
        again = ClientStore(tmp_path / "s", 6, FIRST)  # as a program does that goes on
        again.rewind(round)
        assert clients_of(again) == stages[round]
    again.write(2, np.array([5, 0]), kept(25, 20))
    again.flush()
    again.settle(3)
    with pytest.raises(DataError, match="as of rounds 3 to 3, but the run stands at round 2"):
        again.rewind(2)
    assert clients_of(again) == stages[3]
    with pytest.raises(DataError, match="of another run"):
        ClientStore(tmp_path / "s", 7, FIRST)
    again.remove()
    assert not (tmp_path / "s").exists()


def test_a_client_whose_place_was_lost_with_its_first_turn_harms_nobody(tmp_path: Path) -> None:
    """A power failure: of what came after the checkpoint, only a part has reached the disk."""
    made = ClientStore(tmp_path, 6, FIRST)
    made.write(0, np.array([4, 2]), kept(4, 2))
    made.flush()
    made.settle(1)
    made.write(1, np.array([5, 2]), kept(15, 12))
    made.write(2, np.array([5, 4]), kept(25, 24))
    made.flush()
    places = np.memmap(tmp_path / storing.PLACES, np.int32, "r+")
    assert list(places) == [0, 0, 2, 0, 1, 3]  # by first turns
    places[5] = 0
    places.flush()
    again = ClientStore(tmp_path, 6, FIRST)
    again.rewind(1)
    assert clients_of(again) == [7, 7, 2, 7, 4, 7]
    again.write(1, np.array([0]), kept(10))
    assert clients_of(again) == [10, 7, 2, 7, 4, 7]
    again.write(2, np.array([1, 3]), kept(21, 23))
    again.rewind(2)
    again.write(2, np.array([5]), kept(25))
    assert list(places) == [3, 0, 2, 0, 1, 4]


def test_half_a_note_is_no_round(tmp_path: Path) -> None:
    """A kill while it is noted what a round overwrites: that round has not overwritten it."""
    made = ClientStore(tmp_path, 6, FIRST)
    made.write(0, np.array([2]), kept(2))
    whole = (tmp_path / storing.UNDO).read_bytes()
    made.write(1, np.array([2, 3]), kept(12, 13))
    made.rewind(1)
    longer = whole + (whole[-20:] + b"x" * 50)
    for end in (whole + b"", longer, longer[:-30]):
        (tmp_path / storing.UNDO).write_bytes(end)
        again = ClientStore(tmp_path, 6, FIRST)
        again.rewind(1)
        assert clients_of(again)[2:4] == [2, 7]


CONFIG = """
rounds = 40
cohort = 4
eval_every = 20
[data]
source = "synthetic"
clients = 12
sizes = "fedprox"
[model]
name = "mlr"
[method]
name = "pfedme"
local_rounds = 3
inner_start = "kept"
[engine]
name = "streamed"
[output]
checkpoint_rounds = 3
keep = 2
"""


@pytest.mark.slow
def test_a_recorded_run_is_that_of_another_engine(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text(CONFIG)
    for name in ("streamed", "vectorized"):
        config = Config.load(tmp_path / "c.toml", [f"engine.name={name}", "rounds=7"])
        Recording.begin(config, tmp_path / name).train()
    runs = [read_run(tmp_path / name) for name in ("streamed", "vectorized")]
    for kind, scores in runs[0].scores.items():
        for score, values in scores.items():
            np.testing.assert_allclose(values, runs[1].scores[kind][score], rtol=1e-5)
    models = [load_file(run.path / "clients.safetensors") for run in runs]
    assert_close(models[0], models[1])
    assert not (tmp_path / "streamed" / "kept").exists()


def test_an_interruption_and_a_resume_in_one_breath(tmp_path: Path) -> None:
    """The store is rounds ahead of the checkpoint that an interruption leaves behind."""
    (tmp_path / "c.toml").write_text(CONFIG)
    config = Config.load(tmp_path / "c.toml", ["output.checkpoint_rounds=1000"])
    Recording.begin(config, tmp_path / "whole").train()
    recording = Recording.begin(config, tmp_path / "left")
    write, count = ClientStore.write, 0

    def interrupted(self: ClientStore, *arguments: Any) -> None:
        nonlocal count
        count += 1
        write(self, *arguments)
        if count == 17:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ClientStore, "write", interrupted)
        with pytest.raises(KeyboardInterrupt):
            recording.train()
    left = sorted(path.name for path in (tmp_path / "left" / "checkpoints").iterdir())
    assert int(left[-1][6:15]) < 17
    Recording.resume(tmp_path / "left").train()
    for name in ("model.safetensors", "clients.safetensors"):
        whole, resumed = (tmp_path / run / name for run in ("whole", "left"))
        assert whole.read_bytes() == resumed.read_bytes()


def test_too_much_to_undo_asks_for_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storing, "_UNDO_BYTES", 20_000)
    (tmp_path / "c.toml").write_text(CONFIG)
    settings = ["rounds=30", "output.checkpoint_rounds=1000", "output.keep=100"]
    recording = Recording.begin(Config.load(tmp_path / "c.toml", settings), tmp_path / "run")
    recording.train()
    assert len(list((tmp_path / "run" / "checkpoints").iterdir())) >= 2


@pytest.mark.slow
def test_killed_again_and_again(tmp_path: Path) -> None:
    """SIGKILL at random moments: each time it goes on with what clients kept, to the same end."""
    (tmp_path / "c.toml").write_text(CONFIG.replace("rounds = 40", "rounds = 600"))
    cache, chance = tmp_path / "cache", random.Random(0)
    whole = started("run", tmp_path / "c.toml", "--out", tmp_path / "whole", cache=cache)
    assert whole.wait(timeout=300) == 0
    out = tmp_path / "killed"
    process = started("run", tmp_path / "c.toml", "--out", out, cache=cache)
    for _ in range(5):
        before = {p.name for p in (out / "checkpoints").glob("*.checkpoint")}
        deadline = time.monotonic() + 120
        while {p.name for p in (out / "checkpoints").glob("*.checkpoint")} <= before:
            assert process.poll() is None, process.stderr and process.stderr.read()
            assert time.monotonic() < deadline
            time.sleep(0.002)
        time.sleep(chance.uniform(0, 0.05))
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert not (out / "summary.json").exists(), "it was faster than the test"
        process = started("resume", out, cache=cache)
    assert process.wait(timeout=300) == 0, process.stderr and process.stderr.read()
    same(tmp_path / "whole", out)


# A sample of clients.


@pytest.mark.slow
def test_a_sample_of_clients_is_scored(tmp_path: Path) -> None:
    """The same clients whatever the seed, with the scores they have among all."""
    assert sample_clients(10, None) is None
    assert sample_clients(10, 10) is None
    (tmp_path / "c.toml").write_text(CONFIG)
    settings = ["rounds=2", "engine.name=vectorized"]
    everyone = Config.load(tmp_path / "c.toml", settings)
    some = Config.load(tmp_path / "c.toml", [*settings, "eval_clients=5"])
    of_all = Recording.begin(everyone, tmp_path / "all").train()
    Recording.begin(some, tmp_path / "some").train()
    chosen = sample_clients(12, 5)
    assert chosen is not None
    assert len(set(chosen)) == 5
    recorded, federation = read_run(tmp_path / "some"), of_all.experiment.federation
    assert recorded.names == tuple(federation.names[i] for i in chosen)
    np.testing.assert_array_equal(recorded.sizes, federation.test.size[chosen])
    for kind, scores in of_all.scores.items():
        np.testing.assert_allclose(
            recorded.scores[kind]["loss"][-1], scores.loss[chosen], rtol=1e-6
        )
    summary = recorded.summary
    assert summary["clients"] == 12
    assert len(summary["traffic"]["client_uplink_bytes"]) == 5
    assert sum(summary["traffic"]["round_uplink_bytes"]) == of_all.costs.uplink_bytes[-1]
    models = of_all.personal_models(chosen)
    own = simulate(
        federation,
        of_all.experiment.task.model,
        of_all.experiment.method,
        rounds=2,
        cohort=4,
        eval_clients=5,
    )
    assert_close(own.personal_models(own.evaluator.clients), models)
    assert len(own.scores["global"].loss) == 5
    with pytest.raises(FieldError, match="eval_clients = 0"):
        SimulationEvaluator(Vectorized(of_all.experiment), count=0)


# Bounds.


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_grows_with_the_cohort_and_not_with_the_federation(tmp_path: Path) -> None:
    """A hundred times the clients, of 480 MB: as much memory, file pages aside, as of 4.8 MB."""
    code = (
        "import sys, perfed\n"
        "from perfed.simulation import Streamed\n"
        "from perfed.evaluation import SimulationEvaluator\n"
        "def held():\n"
        "    text = open('/proc/self/status').read()\n"
        "    return int(text.split('RssAnon:')[1].split()[0])\n"
        "data = perfed.load('stored', root=sys.argv[1])\n"
        "task = perfed.Task(perfed.MLR(300, 2))\n"
        "method = perfed.PFedMe(local_rounds=2, batch=4)\n"
        "engine = Streamed(perfed.Experiment(data, task, method, 20))\n"
        "state = engine.advance(engine.init(), 5)\n"
        "SimulationEvaluator(engine, count=20)(state)\n"
        "print(held())"
    )
    held = []
    for clients in (2_000, 200_000):
        root = tmp_path / str(clients)
        _many_clients(root, clients)
        done = subprocess.run(
            [sys.executable, "-c", code, str(root)], capture_output=True, text=True, check=True
        )
        held.append(int(done.stdout))
    # Names, sizes and places in the files are kept: some 200 bytes a client.
    assert held[1] - held[0] < 60 * 1024, held


def _many_clients(root: Path, clients: int) -> None:
    """Two rows each: written as one client, and then cut up, for speed."""
    rng = np.random.default_rng(0)
    with FederationWriter(root, labels=("0", "1")) as writer:
        x = rng.random((2 * clients, 300), np.float32)
        y = (x[:, 0] > 0.5).astype(np.int32)
        writer.add((x[clients:], y[clients:]), (x[:clients], y[:clients]))
        for part in ("train", "test"):
            column = writer._files[f"{part}_size"]
            column._file.seek(0)
            column._rows = 0
            column.append(np.ones(clients, np.int32))
        writer._names = [None] * clients


def test_rows_beyond_what_32_bits_count() -> None:
    """Places in the files are 64 bits wide where they must be."""
    sizes = np.full(3, 2**30, np.int32)

    class Long:
        dtype, shape = np.dtype(np.uint8), (3 * 2**30, 1)

        def __len__(self) -> int:
            return 3 * 2**30

    flat = FlatExamples.from_rows(Long(), Long(), sizes)
    assert flat.start.tolist() == [0, 2**30, 2**31]


def test_a_federation_of_some_clients(on_disk: Federation) -> None:
    some = on_disk.select(np.array([7, 2]))
    assert some.names == ("7", "2")
    for part, whole in ((some.train, on_disk.train), (some.test, on_disk.test)):
        for i, j in ((0, 7), (1, 2)):
            for a, b in zip(part.client(i), whole.client(j), strict=True):
                np.testing.assert_array_equal(a, b)
    assert some.scaling is not None
    assert on_disk.scaling is not None
    np.testing.assert_array_equal(some.scaling.shift, on_disk.scaling.shift[[7, 2]])
    assert some.checksum() != on_disk.checksum()
    assert jax.tree.leaves(some.train.x)


def test_rows_of_an_array_far_into_a_file(tmp_path: Path) -> None:
    """What is mapped from beyond a file's first pages is read from there."""
    x = np.arange(6 * 4000, dtype=np.float32).reshape(6, 4000)
    (tmp_path / "rows").write_bytes(bytes(3 * 2**16 + 64) + x.tobytes())
    mapped = np.memmap(tmp_path / "rows", np.float32, "r", 3 * 2**16 + 64, (6, 4000))
    to = np.zeros((3, 4000), np.float32)
    _Source(mapped[1:]).copy([3, 0], [1, 2], to)
    np.testing.assert_array_equal(to, x[[4, 1, 2]])


def test_more_personal_models_than_fit_are_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "c.toml").write_text(CONFIG)
    monkeypatch.setattr(recording, "memory_limit", lambda: 10_000)
    with pytest.raises(ConfigError, match=r"take 0 GiB of memory; score a sample by eval_clients"):
        Recording.prepare(Config.load(tmp_path / "c.toml"), tmp_path / "run")
    for setting in ("eval_clients=2", "output.personal_models=none"):
        Recording.prepare(Config.load(tmp_path / "c.toml", [setting]), tmp_path / "run")


def test_room_is_that_of_the_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(chooser, "_CONTAINER", (str(limit), str(tmp_path / "none")))
    machine = chooser.memory_limit()
    limit.write_text("max\n")
    assert chooser.memory_limit() == machine
    limit.write_text("4096000\n")
    assert chooser.memory_limit() == 1024000
