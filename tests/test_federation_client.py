"""A client of a federation, and the server's rounds with such clients, without the network.

The clients are the real ones, with files and folders of their own; what stands in for Flower is a
grid that hands messages over. `test_federation_processes` has the same with real processes.
"""

import json
import shutil
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from flwr.app import Context, Error, Message, RecordDict
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

from federations import NAMES, distance, params, settings, simulated, write_clients
from perfed.core.errors import ConfigError, DataError
from perfed.core.trees import row
from perfed.federation.client.client import Client
from perfed.federation.client.client_dir import CONFIG, STATE, ClientDir
from perfed.federation.client.local_experiment import read_client_file
from perfed.federation.protocol.errors import public_message
from perfed.federation.protocol.framing import pack, unpack
from perfed.federation.protocol.messages import (
    ClientInfo,
    EvaluateReply,
    JoinRequest,
    TrainReply,
    TrainRequest,
)
from perfed.federation.server import clients as clients_module
from perfed.federation.server import engine as remote_module
from perfed.federation.server import session
from perfed.federation.server.clients import ClientManager
from perfed.federation.server.engine import RemoteEngine, RemoteEvaluator, TooFewClientsError
from perfed.federation.server.plan import FederationPlan, federated_settings
from perfed.federation.server.session import run_federation
from perfed.federation.transport import flower_runtime as runtime
from perfed.federation.transport.messenger import TYPES, Messenger, blob_of, record
from perfed.pipeline.codecs import Float32
from perfed.runs import Config
from perfed.runs.adapt import client_rows, load_model
from perfed.simulation.round import broadcast, client_update
from perfed.training import Progress, Result, Trainer, trainer
from perfed.training import Run as TrainingRun
from perfed.training.callbacks import OnTrainState
from perfed.training.trainer import TrainOptions

FEDAVG = {"name": "fedavg", "lr": 0.1, "tau": 3, "batch": 5}
STEPS = {"lr": 0.1, "tau": 3, "batch": 5}
SERVER_STEPS = STEPS | {"server_lr": 0.1}
# Two of three clients a round: somebody's state is older than the server's model.
SOME: dict[str, Any] = {"cohort": 2}
SOME_WITH_BODY = SOME | {"model": {"name": "mlp", "hidden": [5]}}
OTHER_METHODS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"name": "fedprox"} | STEPS, SOME),
    ({"name": "fedavgm"} | SERVER_STEPS, SOME),
    ({"name": "fedyogi"} | SERVER_STEPS, SOME),
    ({"name": "apfl"} | STEPS, SOME),
    ({"name": "fedala"} | STEPS, SOME),
    *(
        ({"name": name} | STEPS, SOME_WITH_BODY)
        for name in ("fedper", "fedbabu", "lg-fedavg", "fedrod")
    ),
    (
        {"name": "fedrep", "lr": 0.1, "head_steps": 3, "body_steps": 2, "batch": 5},
        SOME_WITH_BODY,
    ),
]
PFEDME = {"name": "pfedme", "lam": 15.0, "eta": 0.05, "local_rounds": 3, "batch": 5, "beta": 1.5}


class HandedOver(Grid):
    """ClientManager in this process; a test can make a node's answers fail or vanish."""

    def __init__(self, clients: dict[int, Client]) -> None:
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
        self.clients, self.replies = clients, dict[str, Message]()
        self.down: set[int] = set()
        self.lost: set[tuple[int, str]] = set()  # (node, group): the answer gets lost on its way
        self.seen: list[bytes] = []

    def get_nodes(self) -> Iterable[NodeInfo]:
        return [
            NodeInfo(node_id=node, public_key=f"key {node}".encode())
            for node in self.clients
            if node not in self.down
        ]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        ids = []
        kinds = {flower: ours for ours, flower in TYPES.items()}
        for message in messages:
            node, group = message.metadata.dst_node_id, message.metadata.group_id
            id = f"{len(self.replies)}-{node}"
            message.metadata.__dict__["_message_id"] = id
            try:
                kind = kinds[message.metadata.message_type]
                blob = self.clients[node].handle(blob_of(message.content), kind)
                self.seen.append(blob)
                reply = Message(record(blob), reply_to=message)
            except Exception as error:
                reply = Message(Error(2, public_message(error)), reply_to=message)
            if (node, group) not in self.lost:
                self.replies[id] = reply
            else:
                self.replies[id + "-lost"] = reply
            ids.append(id)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return [self.replies.pop(id) for id in list(message_ids) if id in self.replies]

    def set_run(self, run: Run) -> None:
        raise NotImplementedError

    @property
    def run(self) -> Run:
        raise NotImplementedError

    def create_message(self, *_: Any, **__: Any) -> Message:
        raise NotImplementedError

    def get_node_ids(self) -> Iterable[int]:
        raise NotImplementedError

    def send_and_receive(self, *_: Any, **__: Any) -> Iterable[Message]:
        raise NotImplementedError


@pytest.fixture
def data(tmp_path: Path) -> Path:
    write_clients(tmp_path / "data")
    return tmp_path / "data"


def client_of(data: Path, name: str) -> Client:
    file = next(data.glob(f"{name}.*"))
    return Client(ClientDir(data.parent / "homes" / name), file)


KEYS = {name: f"key {i}".encode() for i, name in enumerate(NAMES)}


def greeting(values: dict[str, Any], grid: Grid, said: list[str] | None = None) -> ClientManager:
    """The server's side, before anyone is there."""
    say = (said if said is not None else []).append
    settings = federated_settings(Config.checked(values))
    return ClientManager(Messenger(grid), "trial-1", settings, NAMES, KEYS, 30.0, say)


def remote_of(values: dict[str, Any], grid: Grid, said: list[str] | None = None) -> RemoteEngine:
    """The server's side of a run, with everyone greeted."""
    config = Config.checked(values)
    clients = greeting(values, grid, said)
    clients.wait_for(3)
    labels = values["data"].get("labels")
    federation = clients.federation(None if labels is None else tuple(labels))
    return RemoteEngine(config.build_experiment(federation), clients, config.federation)


def federated_run(values: dict[str, Any], data: Path, said: list[str] | None = None) -> Result:
    grid = HandedOver({i: client_of(data, name) for i, name in enumerate(NAMES)})
    remote = remote_of(values, grid, said)
    config = Config.checked(values)
    evaluator = RemoteEvaluator(remote, config.eval_training)
    return Trainer(config.train_options()).train(TrainingRun(remote, evaluator))


def own_model(data: Path, name: str) -> dict[str, np.ndarray]:
    return params(data.parent / "homes" / name / "trial-1" / "model.safetensors")


@pytest.mark.parametrize(
    ("method", "more"),
    [
        (FEDAVG, {}),
        (FEDAVG, {"weighting": "size", "sampling": "epochs", "cohort": 2}),
        (FEDAVG, {"codec": {"name": "low-precision", "levels": 3, "error_feedback": True}}),
        (FEDAVG, {"codec": {"name": "top-k", "fraction": 0.3, "error_feedback": True}}),
        (FEDAVG, {"codec": {"name": "float32", "downlink": {"name": "float16"}}}),
        ({"name": "fedpaq", "lr": 0.1, "tau": 3, "batch": 5, "s": 2, "r": 2}, {}),
        pytest.param(
            {"name": "per-fedavg", "variant": "hf", "alpha": 0.05, "beta": 0.1, "tau": 3},
            {},
            marks=pytest.mark.slow,
        ),
        (
            {"name": "per-fedavg", "variant": "exact", "tau": 3, "send_iterate": True},
            {"codec": {"name": "low-precision", "levels": 9}},
        ),
        (PFEDME, {"model": {"name": "mlr", "l2": 0.01}, "eval_training": True}),
        ({"name": "local", "lr": 0.1, "tau": 3}, {}),
        ({"name": "scaffold", "lr": 0.1, "tau": 3, "batch": 5}, {"cohort": 2}),
        ({"name": "fedadam", "lr": 0.1, "tau": 3, "batch": 5, "server_lr": 0.1}, {}),
        ({"name": "ditto", "lr": 0.1, "tau": 3, "batch": 5}, {"cohort": 2, "rounds": 1}),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in OTHER_METHODS),
    ],
    ids=lambda value: value["name"] if "name" in value else "-".join(value) or "plain",
)
def test_a_federation_ends_where_the_simulation_ends(
    data: Path, method: dict[str, Any], more: dict[str, Any]
) -> None:
    values = settings(data, method, **more)
    if "r" in method:
        values.pop("cohort")
    due, found = simulated(values), federated_run(values, data)
    assert distance(flat(found.global_model), flat(due.global_model)) < 1e-6
    for i, name in enumerate(NAMES):
        assert distance(own_model(data, name), flat(due.personal_model(i))) < 1e-6
    for kind, scores in due.scores.items():
        assert set(scores.values) == set(found.scores[kind].values)
        for score, each in scores.values.items():
            np.testing.assert_allclose(found.scores[kind].values[score], each, rtol=2e-5)
    np.testing.assert_array_equal(found.traffic.uplink, due.traffic.uplink)
    np.testing.assert_array_equal(found.traffic.cohort, due.traffic.cohort)
    np.testing.assert_array_equal(found.traffic.downlink, due.traffic.downlink)
    states = (jax.tree.leaves(result.state.server_state) for result in (found, due))
    for leaf, wanted in zip(*states, strict=True):
        np.testing.assert_allclose(leaf, wanted, rtol=1e-4, atol=1e-7)


def flat(tree: Any) -> dict[str, np.ndarray]:
    from perfed.runs.saved_model import named_leaves

    return named_leaves(tree, "params.")


def join(client: Client, values: dict[str, Any], experiment: str = "trial-1") -> ClientInfo:
    told = JoinRequest(
        experiment=experiment, config=federated_settings(Config.checked(values)), name="client-0"
    )
    return unpack(client.handle(pack(told), "join"), ClientInfo)[0]


def train(client: Client, w: Any, round: int, counted: int) -> tuple[bytes, TrainReply]:
    asked = TrainRequest(experiment="trial-1", round=round, number=0, last_accepted=counted)
    message = Float32().encode(jax.random.key(0), w)
    answer = client.handle(pack(asked, message), "train")
    return answer, unpack(answer, TrainReply)[0]


@pytest.fixture
def pfedme(data: Path) -> tuple[Client, dict[str, Any], Any]:
    values = settings(data, PFEDME)
    client = client_of(data, "client-0")
    join(client, values)
    return client, values, Config.checked(values).build().experiment.init_state().params


def test_what_is_kept_advances_only_when_the_answer_counted(data: Path) -> None:
    codec = {"name": "low-precision", "levels": 1, "error_feedback": True}
    values = settings(data, FEDAVG, codec=codec)
    client = client_of(data, "client-0")
    join(client, values)
    w = Config.checked(values).build().experiment.init_state().params
    first, _ = train(client, w, 0, -1)
    again, _ = train(client, w, 0, -1)  # asked once more: the server never heard it
    assert again == first
    counted, _ = train(client, w, 1, 0)
    client = client_of(data, "client-0")  # a new process
    assert train(client, w, 1, 0)[0] == counted
    # Round 1 did not count; round 2 goes on from what was kept after round 0.
    lost, _ = train(client, w, 2, 0)
    client = client_of(data, "client-0")
    assert train(client, w, 2, 0)[0] == lost
    # What is kept makes a difference; and a server that goes back too far is told so.
    homes = data.parent / "homes"
    shutil.copytree(homes, data.parent / "copy")
    heard, _ = train(client, w, 3, 2)
    with pytest.raises(DataError, match="only those after rounds"):
        train(client, w, 3, 0)
    shutil.rmtree(homes)
    (data.parent / "copy").rename(homes)
    assert train(client_of(data, "client-0"), w, 3, 0)[0] != heard


def _like(client: Client) -> Any:
    work = client._loaded["trial-1"]
    return jax.tree.map(lambda leaf: leaf[0], work.first_state.clients)


def test_a_full_disk_loses_nothing(data: Path, pfedme: tuple[Client, dict[str, Any], Any]) -> None:
    client, _, w = pfedme
    train(client, w, 0, -1)
    folder = client.client_dir.experiment_dir("trial-1")
    before = (folder / STATE).read_bytes()
    (folder / f"{STATE}.partial").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        train(client, w, 1, 0)
    assert (folder / STATE).read_bytes() == before
    (folder / f"{STATE}.partial").unlink()
    answer, _ = train(client, w, 1, 0)
    fresh = client_of(data, "client-0")
    assert train(fresh, w, 1, 0)[0] == answer


def test_a_damaged_memory_is_refused(pfedme: tuple[Client, dict[str, Any], Any]) -> None:
    client, _, w = pfedme
    train(client, w, 0, -1)
    path = client.client_dir.experiment_dir("trial-1") / STATE
    broken = bytearray(path.read_bytes())
    broken[-3] ^= 1
    path.write_bytes(broken)
    with pytest.raises(DataError, match=r"damaged.*remove it"):
        train(client, w, 1, 0)
    path.unlink()
    train(client, w, 1, 0)


def test_an_experiment_has_to_be_begun(data: Path, pfedme: tuple[Client, Any, Any]) -> None:
    client, values, w = pfedme
    other = client_of(data, "client-1")
    with pytest.raises(DataError, match="unknown experiment"):
        train(other, w, 0, -1)
    changed = settings(data, PFEDME | {"lam": 16.0})
    with pytest.raises(DataError, match="with other settings"):
        join(client, changed)
    join(client, values)
    assert join(client, changed, "trial-2").train_examples == 20


def test_terms_may_change_while_a_run_goes_on(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are the server's: clients are not told of them, and keep on with what they keep."""
    grid = HandedOver({i: client_of(data, name) for i, name in enumerate(NAMES)})
    folder, said = data.parent / "run", list[str]()
    terms = {"timeout": 20.0}
    values = settings(data, PFEDME, federation=terms)
    FederationPlan.create(Config.checked(values), folder, 3, NAMES)

    def stop(progress: Progress) -> None:
        if progress.round == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_federation(grid, folder, KEYS, said.append, stop)
    client_dir = grid.clients[0].client_dir
    experiment = FederationPlan.read(folder).experiment
    facts = json.loads((client_dir.experiment_dir(experiment) / CONFIG).read_text())
    assert facts["config"]["method"]["lam"] == 15.0
    assert not {"federation", "output"} & set(facts["config"])
    overrides = ["federation.timeout=25.0", "federation.minimum=1", "output.keep=2"]
    plan = FederationPlan.read(folder).with_settings(None, overrides)
    assert (plan.config().federation.timeout, plan.config().federation.minimum) == (25.0, 1)
    assert (plan.config().output.keep, plan.config().output.checkpoint_rounds) == (2, 1)
    plan.write(folder)
    # One whose folder says more of an experiment than is told now: it was begun by another version.
    facts["config"] |= {"federation": terms, "output": {}}
    (client_dir.experiment_dir(plan.experiment) / CONFIG).write_text(json.dumps(facts))
    grid.clients[0] = client_of(data, "client-0")
    for module in (session, remote_module):
        monkeypatch.setattr(module, "RECONNECT_TIME", 5.0)  # nobody is waited for who is refused
    result = run_federation(grid, folder, KEYS, said.append)
    assert "going on from round 2" in said
    assert distance(flat(result.global_model), flat(simulated(values).global_model)) < 1e-6


def test_nothing_but_terms_may(data: Path) -> None:
    values = settings(data, PFEDME)
    plan = FederationPlan.create(Config.checked(values), data.parent / "run", 3, NAMES)
    with pytest.raises(ConfigError, match=r"lam = 16.0: the run was started with 15.0") as no:
        plan.with_settings(None, ["method.lam=16.0", "rounds=9", "federation.timeout=9.0"])
    assert "rounds = 9: the run was started with 3" in str(no.value)
    assert "timeout" not in str(no.value)
    with pytest.raises(ConfigError, match=r"federation.minimum = 4"):
        plan.with_settings(None, ["federation.minimum=4"])


@pytest.mark.parametrize("name", ["../out", "/etc/x", "a/b", ".", "a\0b", "x" * 121, ""])
def test_an_experiments_name_cannot_lead_out_of_the_home(data: Path, name: str) -> None:
    client = client_of(data, "client-0")
    with pytest.raises((DataError, ValueError)):
        client.client_dir.experiment_dir(name)
    assert not (data.parent / "out").exists()


def test_the_answers_hold_nothing_that_stays_with_the_client(data: Path) -> None:
    values = settings(data, PFEDME)
    grid = HandedOver({i: client_of(data, name) for i, name in enumerate(NAMES)})
    remote = remote_of(values, grid)
    Trainer(TrainOptions(3, 1)).train(TrainingRun(remote, RemoteEvaluator(remote, False)))
    said = b"".join(grid.seen)
    for i, name in enumerate(NAMES):
        theta = jax.tree.leaves(
            grid.clients[i].client_dir.read_records("trial-1", _like(grid.clients[i]))
        )
        own = [*own_model(data, name).values(), *(np.asarray(leaf) for leaf in theta[1:])]
        rows = np.load(data / f"{name}.npz")
        own += [rows["x"][:1], rows["x_test"][:1]]
        for array in own:
            assert array.astype("<f4").tobytes()[:16] not in said
    # What is sent can be found in this way.
    reply = next(blob for blob in grid.seen if b'"kind":"train-reply"' in blob)
    assert unpack(reply, TrainReply)[1][0][-16:] in said


def test_no_error_tells_of_the_data(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is wrong with a file is said to its owner alone."""
    rows = [*(f"{i},{i % 3}" for i in range(20)), "HIV+,1", "1,SYPHILIS"]
    values = settings(data, FEDAVG)
    hi = pack(
        JoinRequest(
            experiment="trial-1", config=federated_settings(Config.checked(values)), name="c"
        )
    )
    sent: list[tuple[str, str]] = []
    monkeypatch.setattr(runtime, "_heartbeat", lambda _: SimpleNamespace(is_running=False))
    monkeypatch.setattr(
        runtime, "push_message", lambda _, reply, __: sent.append(("reply", reply.error.reason))
    )
    monkeypatch.setattr(
        runtime, "push_task_output", lambda _, __, ___, details: sent.append(("details", details))
    )
    HandedOver({})  # a run, in which messages are
    asked = Message(record(hi), 1, TYPES["join"], group_id="join")
    context = Context(1, 1, {}, RecordDict(), {})
    monkeypatch.setattr(runtime, "pull_task_input", lambda _: (asked, context, None, None))
    link: Any = SimpleNamespace(client=lambda *_: nullcontext())
    for odd in (rows[:21], [*rows[:20], rows[21]]):
        file = data / "patients.csv"
        file.write_text("\n".join(["a,label", *odd]))
        client = Client(ClientDir(data.parent / "homes" / "c"), file)

        def app(message: Message, _: Context, client: Client = client) -> Message:
            return Message(record(client.handle(blob_of(message.content), "join")), reply_to=asked)

        said: list[str] = []
        runtime._serve_task(link, "token", app, lambda: True, said.append)  # type: ignore[arg-type]
        assert any(word in said[0] for word in ("HIV+", "SYPHILIS"))
        for _, text in sent:
            assert text == "its data do not fit the configuration; see the client's log"
    assert len(sent) == 4


@pytest.mark.parametrize(
    ("error", "due"),
    [
        (ValueError("could not convert 'HIV+'"), "ValueError: see the client's log"),
        (DataError("patients.csv: HIV+"), "DataError: see the client's log"),
        (OSError(28, "HIV+", "/a/patients.csv"), "OSError: [Errno 28] No space left on device"),
        (OSError("HIV+"), "OSError: see the client's log"),
        (ConfigError("rounds = 0:\n too few"), "ConfigError: rounds = 0: too few"),
    ],
)
def test_of_other_errors_only_our_own_words_are_told(error: Exception, due: str) -> None:
    assert public_message(error) == due


def test_what_a_client_keeps_is_its_owners_alone(pfedme: tuple[Client, Any, Any]) -> None:
    home = pfedme[0].client_dir
    for folder in (home.path, home.experiment_dir("trial-1")):
        assert folder.stat().st_mode & 0o777 == 0o700


class Failing:
    """A client that is there, but never takes a turn."""

    def __init__(self, client: Client) -> None:
        self.client, self.asked = client, 0

    def handle(self, blob: bytes, kind: str) -> bytes:
        if kind == "train":
            self.asked += 1
            raise MemoryError
        return self.client.handle(blob, kind)


def test_one_that_fails_gives_its_seat_to_the_next(data: Path) -> None:
    values = settings(data, FEDAVG, cohort=2, federation={"attempts": 2, "minimum": 2})
    grid = HandedOver({i: client_of(data, name) for i, name in enumerate(NAMES)})
    remote = remote_of(values, grid)
    first = remote._cohort(0)
    failing: Any = Failing(grid.clients[first[0]])
    grid.clients[first[0]] = failing
    _, traffic = remote.run(remote.init(), 1)
    assert failing.asked == 1
    assert set(traffic.cohort[0]) == {0, 1, 2} - {first[0]}
    assert remote._cohort(0) == first  # the next time it is asked as ever


def test_every_round_with_clients_elsewhere_is_heard_of(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However short rounds are, each is kept before the next."""
    monkeypatch.setattr(trainer, "_BLOCK_SECONDS", 1e6)
    grid = HandedOver({i: client_of(data, name) for i, name in enumerate(NAMES)})
    remote = remote_of(settings(data, FEDAVG), grid)
    heard: list[int] = []
    listener = OnTrainState(lambda state: heard.append(state.round))
    run = TrainingRun(remote, RemoteEvaluator(remote, False), [listener])
    Trainer(TrainOptions(4, 4)).train(run)
    assert heard == [0, 1, 2, 3, 4]


def test_a_client_away_gives_its_seat_to_the_next(data: Path) -> None:
    values = settings(data, FEDAVG, cohort=2, rounds=6)
    grid = HandedOver({i: client_of(data, name) for i, name in enumerate(NAMES)})
    remote = remote_of(values, grid)
    state = remote.init()
    full = [sorted(remote._cohort(k)) for k in range(6)]
    grid.down = {1}
    remote.clients.update()
    assert [sorted(remote._cohort(k)) for k in range(6)] == [[0, 2]] * 6
    state, traffic = remote.run(state, 1)
    assert sorted(traffic.cohort[0]) == [0, 2]
    grid.down = {1, 2}
    remote.clients.update()
    assert remote._cohort(0) == [0]
    grid.down = set()
    remote.clients.update()
    assert [sorted(remote._cohort(k)) for k in range(6)] == full


@pytest.mark.slow
def test_partial_answers_are_averaged_and_too_few_stop_the_run(data: Path) -> None:
    values = settings(data, FEDAVG, federation={"attempts": 2, "minimum": 2})
    said: list[str] = []
    grid = HandedOver({i: client_of(data, name) for i, name in enumerate(NAMES)})
    remote = remote_of(values, grid, said)
    setup = Config.checked(values).build().experiment
    first = remote.init()
    grid.lost, remote.clients.timeout = {(1, "train 0")}, 3.0
    state, traffic = remote.run(first, 1)
    sent_to_all, record = broadcast(setup, first), row(setup.init_state().clients, 0)
    deltas = [
        client_update(setup, setup.device_data(), sent_to_all, record, 0, i).delta for i in (0, 2)
    ]
    due = jax.tree.map(lambda w, a, b: w + (a + b) / 2, first.params, *deltas)
    assert distance(flat(state.params), flat(due)) < 1e-6
    sent = dict(zip(traffic.cohort[0].tolist(), traffic.uplink[0].tolist(), strict=True))
    assert sent[1] == 0
    assert sent[0] == sent[2] > 0
    assert any("no update from client-1: no reply within" in line for line in said)
    np.testing.assert_array_equal(state.clients.state, [0, -1, 0])
    grid.lost = {(0, "train 1"), (1, "train 1")}
    with pytest.raises(TooFewClientsError, match=r"fewer than 2 valid updates.*client-0"):
        remote.run(state, 1)


def test_a_removed_home_is_greeted_anew(data: Path) -> None:
    values = settings(data, PFEDME)
    grid = HandedOver({i: client_of(data, name) for i, name in enumerate(NAMES)})
    said: list[str] = []
    remote = remote_of(values, grid, said)
    state, _ = remote.run(remote.init(), 1)
    home = data.parent / "homes" / "client-2" / "trial-1"
    for file in home.iterdir():
        file.unlink()
    home.rmdir()
    grid.clients[2] = client_of(data, "client-2")
    state, traffic = remote.run(state, 1)
    assert any("no update from client-2" in line for line in said)
    state, traffic = remote.run(state, 1)
    assert (traffic.uplink[0] > 0).all()


def test_own_models_predict(data: Path) -> None:
    values = settings(data, PFEDME)
    values["data"]["standardize"] = "client"
    federated_run(values, data)
    file = data.parent / "homes" / "client-0" / "trial-1" / "model.safetensors"
    model = load_model(file)
    rows = client_rows(model.uses, data / "client-0.npz")
    result = simulated(values)
    np.testing.assert_array_equal(model.predict(rows.x), result.predict(0, rows.x))


def test_a_regression_and_a_table(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    rng = np.random.default_rng(3)
    for i, name in enumerate(NAMES):
        x = rng.normal(size=(30, 2))
        y = x @ [1.0, -2.0] + 0.3 * i
        part = np.where(np.arange(30) < 24, "train", "test")
        lines = [
            "a,b,label,part",
            *(f"{r[0]},{r[1]},{v},{p}" for r, v, p in zip(x, y, part, strict=True)),
        ]
        (data / f"{name}.csv").write_text("\n".join(lines))
    values = settings(data, FEDAVG | {"lr": 0.05})
    values["data"] = {"source": "folder", "root": str(data), "task": "regression", "part": "part"}
    due, found = simulated(values), federated_run(values, data)
    assert distance(flat(found.global_model), flat(due.global_model)) < 1e-6
    for name in ("r2", "rmse", "loss"):
        values_ = found.scores["personalized"].values[name]
        np.testing.assert_allclose(values_, due.scores["personalized"].values[name], rtol=1e-5)


@pytest.mark.parametrize(
    ("data_settings", "named"),
    [
        ({"source": "digits", "split": "dirichlet"}, "data.source"),
        ({"source": "folder", "root": "."}, "data.labels"),
        ({"source": "folder", "root": ".", "labels": ["a", "b"], "standardize": "feature"},
         "data.standardize"),
        ({"source": "folder", "root": ".", "task": "regression", "standardize_target": True},
         "data.standardize_target"),
    ],
)  # fmt: skip
def test_what_takes_all_data_in_one_place_is_refused(
    tmp_path: Path, data_settings: dict[str, Any], named: str
) -> None:
    values = settings(tmp_path, FEDAVG) | {"data": data_settings}
    with pytest.raises(ConfigError, match=named):
        FederationPlan.create(Config.checked(values), tmp_path / "run", 3, NAMES)
    assert not (tmp_path / "run").exists()


def test_a_client_reads_no_file_but_its_own(data: Path) -> None:
    values = settings(Path("/etc"), FEDAVG)
    config = Config.checked(values)
    own = read_client_file(config, data / "client-0.npz", "me")
    assert own.names == ("me",)
    assert int(own.train.size[0]) == 20
    told = federated_settings(config)
    assert "/etc" not in json.dumps(told)
    assert str(Path.cwd()) not in json.dumps(told)


def test_clients_must_be_alike(data: Path) -> None:
    with np.load(data / "client-2.npz") as old:
        arrays = {k: v[:, :5] if k.startswith("x") else v for k, v in old.items()}
    np.savez(data / "client-2.npz", **arrays)
    grid = HandedOver({i: client_of(data, name) for i, name in enumerate(NAMES)})
    said: list[str] = []
    clients = greeting(settings(data, FEDAVG), grid, said)
    clients.update()
    assert clients.connected() == [0, 1]
    assert said[-1] == (
        "client-2 cannot join: the shape of its inputs is (5,), but that of client-0 is (6,); the "
        "files of all clients need the same columns"
    )
    # It comes back with another file.
    write_clients(data)
    grid.down = {2}
    clients.update()
    grid.down, grid.clients[2] = set(), client_of(data, "client-2")
    clients.update()
    assert clients.connected() == [0, 1, 2]


def test_a_file_may_be_put_right_until_the_run_begins(data: Path) -> None:
    grid = HandedOver({i: client_of(data, name) for i, name in enumerate(NAMES)})
    said: list[str] = []
    clients = greeting(settings(data, FEDAVG), grid, said)

    def come_back_with(examples: int) -> None:
        write_clients(data, examples=examples)
        grid.down = {1}
        clients.update()
        grid.down, grid.clients[1] = set(), client_of(data, "client-1")
        clients.update()

    clients.update()
    come_back_with(50)
    assert clients.connected() == [0, 1, 2]
    assert clients.infos["client-1"].train_examples == 50
    clients.start()
    come_back_with(60)
    assert clients.connected() == [0, 2]
    assert "its data have changed since the run began" in said[-1]


def test_scores_of_a_client_that_is_away_are_not_defined(data: Path) -> None:
    values = settings(data, FEDAVG)
    grid = HandedOver({i: client_of(data, name) for i, name in enumerate(NAMES)})
    remote = remote_of(values, grid)
    scorer = RemoteEvaluator(remote, False)
    grid.down = {1}
    (evaluation,) = scorer.evaluate_runs([scorer], [remote.init()])
    accuracy = evaluation.scores["global"].accuracy  # type: ignore[union-attr]
    np.testing.assert_array_equal(np.isnan(accuracy), [False, True, False])
    assert np.isfinite(evaluation.scores["global"].summary()["accuracy"].mean)  # type: ignore[union-attr]


def test_the_last_scoring_waits_for_those_who_are_away(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It gives them the models they are left with."""
    monkeypatch.setattr(clients_module, "_PAUSE", 0.0)
    grid = HandedOver({i: client_of(data, name) for i, name in enumerate(NAMES)})
    said: list[str] = []
    remote = remote_of(settings(data, FEDAVG), grid, said)
    scorer = RemoteEvaluator(remote, False, last=0)
    looks = 0
    there = grid.get_nodes

    def later() -> Iterable[NodeInfo]:
        nonlocal looks
        looks += 1
        grid.down = {1} if looks < 4 else set()
        return there()

    monkeypatch.setattr(grid, "get_nodes", later)
    (evaluation,) = scorer.evaluate_runs([scorer], [remote.init()])
    assert np.isfinite(evaluation.scores["global"].values["loss"]).all()  # type: ignore[union-attr]
    assert not any("no model of the last round" in line for line in said)
    monkeypatch.setattr(grid, "get_nodes", there)
    monkeypatch.setattr(remote_module, "RECONNECT_TIME", 0.0)  # not for ever
    grid.down = {1}
    scorer.evaluate_runs([scorer], [remote.init()])
    assert "these clients have no model of the last round: client-1;" in said[-1]


def test_the_home_must_be_writable(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="--client-dir"):
        ClientDir(tmp_path / "file" / "home")


def test_messages_say_what_they_are() -> None:
    blob = pack(EvaluateReply(experiment="x", round=1, scores={"global": {"loss": None}}))
    assert unpack(blob, EvaluateReply)[0].scores == {"global": {"loss": None}}
    assert len(pack(TrainReply(experiment="trial-1", round=100), b"x" * 100)) < 100 + 100
