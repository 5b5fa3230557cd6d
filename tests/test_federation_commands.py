"""The commands of a federation: what they refuse at once, and what they say."""

import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import tomli_w

from federations import NAMES, settings, write_clients
from perfed.federation.server.plan import PLAN, FederationPlan
from perfed.federation.server.serve import Server
from perfed.federation.transport.keys import ServerKeys, make_keys
from perfed.federation.trial import TRIAL, Trial, trial_config
from perfed.runs import Config
from perfed.runs.saved_model import saved_model
from test_cli import here, perfed

FEDAVG = {"name": "fedavg", "lr": 0.1, "tau": 3, "batch": 5}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("federation")
    write_clients(path / "data")
    (path / "config.toml").write_text(tomli_w.dumps(settings(path / "data", FEDAVG)))
    make_keys(path / "keys", ["127.0.0.1"], NAMES)
    return path


def test_keys_are_made_and_added_to(tmp_path: Path) -> None:
    made = here("keys", tmp_path / "keys", "--host", "fed.example.org", "--client", "north")
    assert made.exit_code == 0, made.stderr
    assert "north" in made.stdout.replace("\n", "")
    key = (tmp_path / "keys" / "clients" / "north" / "client.key").read_bytes()
    more = here("keys", tmp_path / "keys", "--host", "fed.example.org", "--client", "south")
    assert more.exit_code == 0, more.stderr
    assert (tmp_path / "keys" / "clients" / "south" / "client.key").exists()
    assert (tmp_path / "keys" / "clients" / "north" / "client.key").read_bytes() == key
    assert here("keys", tmp_path / "keys", "--client", "../x").exit_code == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["CONFIG", "--keys", "KEYS"], "--out"),
        (["CONFIG", "--out", "OUT"], "--keys"),
        (["CONFIG", "--out", "OUT", "--insecure"], "--clients"),
        (["CONFIG", "--out", "OUT", "--keys", "KEYS", "--insecure"], "--insecure"),
        (["CONFIG", "--out", "OUT", "--keys", "OUT"], "perfed keys"),
        (["CONFIG", "--out", "OUT", "--keys", "KEYS", "--listen", "9443"], "HOST:PORT"),
        (["--resume", "OUT", "--keys", "KEYS"], "CONFIG"),
        (["CONFIG", "--out", "OUT", "--keys", "KEYS", "--set", "cohort=4"], "cohort = 4"),
        (["CONFIG", "--out", "OUT", "--keys", "KEYS", "--set", "federation.minimum=4"],
         "federation.minimum = 4"),
        (["CONFIG", "--out", "OUT", "--keys", "KEYS", "--set", "data.standardize=feature"],
         "data.standardize"),
        (["CONFIG", "--out", "OUT", "--keys", "KEYS", "--set", "network.ratio=10"], "network"),
    ],
)  # fmt: skip
def test_serve_refuses_at_once(place: Path, arguments: list[str], said: str) -> None:
    stands_for = {
        "CONFIG": place / "config.toml",
        "KEYS": place / "keys" / "server",
        "OUT": place / "nothing",
    }
    done = here("serve", *(stands_for.get(word, word) for word in arguments))
    assert done.exit_code == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert not (place / "nothing").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["--server", "host", "--data", "DATA", "--client-dir", "HOME", "--keys", "KEYS"],
            "HOST:PORT",
        ),
        (["--server", "h:1", "--data", "HOME", "--client-dir", "HOME", "--keys", "KEYS"], "--data"),
        (["--server", "h:1", "--data", "DATA", "--client-dir", "HOME"], "--keys"),
        (["--server", "h:1", "--data", "DATA", "--client-dir", "HOME", "--insecure"], "--name"),
        (
            ["--server", "h:1", "--data", "DATA", "--client-dir", "HOME", "--keys", "HOME"],
            "perfed keys",
        ),
        (
            ["--server", "h:1", "--data", "DATA", "--client-dir", "DATA", "--keys", "KEYS"],
            "--client-dir",
        ),
    ],
)
def test_join_refuses_at_once(place: Path, arguments: list[str], said: str) -> None:
    stands_for = {
        "DATA": place / "data" / "client-0.npz",
        "KEYS": place / "keys" / "clients" / "client-0",
        "HOME": place / "home",
    }
    done = here("join", *(stands_for.get(word, word) for word in arguments))
    assert done.exit_code == 2, done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_taken_port_is_named(place: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        done = perfed(
            "serve", place / "config.toml", "--out", tmp_path / "run",
            "--keys", place / "keys" / "server", "--listen", address,
        )  # fmt: skip
    assert done.returncode == 1, done.stderr  # it may be free when it is tried again
    assert address in done.stderr
    assert (tmp_path / "run" / PLAN).exists()  # it can be begun by --resume on another port


def test_on_resuming_the_terms_are_those_of_now(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("perfed.cli.federation._federate", lambda *_: None)
    config, keys = place / "config.toml", place / "keys" / "server"
    resumed = ["--resume", tmp_path / "run", "--keys", keys]
    assert here("serve", config, *resumed).exit_code == 0
    begun = FederationPlan.read(tmp_path / "run")
    done = here("serve", config, *resumed, "--set", "federation.timeout=77.0")
    assert done.exit_code == 0, done.stderr
    assert FederationPlan.read(tmp_path / "run").config().federation.timeout == 77.0
    for file in ([], [config]):
        done = here("serve", *file, *resumed, "--set", "method.lr=0.5")
        assert done.exit_code == 2
        assert "method.lr = 0.5: the run was started with 0.1" in done.stderr
    assert here("serve", *resumed).exit_code == 0  # as it was left
    assert FederationPlan.read(tmp_path / "run").config().federation.timeout == 77.0
    assert here("serve", config, *resumed).exit_code == 0
    assert FederationPlan.read(tmp_path / "run") == begun


@pytest.mark.slow
def test_a_client_that_nobody_answers_gives_up_when_asked_to(place: Path, tmp_path: Path) -> None:
    done = perfed(
        "join", "--server", "127.0.0.1:9", "--data", place / "data" / "client-0.npz",
        "--client-dir", tmp_path / "home", "--keys", place / "keys" / "clients" / "client-0",
        "--patience", 4,
    )  # fmt: skip
    assert done.returncode == 1
    assert "cannot join" in done.stderr


def test_a_model_for_inputs_that_each_client_scales_predicts_for_nobody(
    place: Path, tmp_path: Path
) -> None:
    values = settings(place / "data", FEDAVG)
    values["data"]["standardize"] = "client"
    config = Config.checked(values)
    federation = config.build_federation()
    experiment = config.build_experiment(federation)
    saved = saved_model(experiment.init_params(), experiment, config.resolved())
    (tmp_path / "model.safetensors").write_bytes(saved.to_bytes())
    rows = place / "data" / "client-0.npz"
    done = here("predict", tmp_path, "--data", rows)
    assert done.exit_code == 2
    assert "perfed adapt" in done.stderr
    own = here("adapt", tmp_path, "--data", rows, "--out", tmp_path / "own.safetensors")
    assert own.exit_code == 0, own.stderr
    assert here("predict", tmp_path / "own.safetensors", "--data", rows).exit_code == 0


def test_a_trial_replaces_an_earlier_one(tmp_path: Path) -> None:
    for clients in (3, 2):
        trial = Trial.create(trial_config(None, clients, []), tmp_path)
        keys = ServerKeys.read(tmp_path / TRIAL / "keys" / "server")
        assert tuple(keys.clients) == trial.names == NAMES[:clients]
        assert len(list((tmp_path / TRIAL / "data").iterdir())) == clients
        FederationPlan.create(trial.config, tmp_path, clients, trial.names)
    # A folder of that name that no trial has made is left alone.
    (tmp_path / "mine" / TRIAL).mkdir(parents=True)
    (tmp_path / "mine" / TRIAL / "notes").touch()
    Trial.create(trial_config(None, 2, []), tmp_path / "mine")
    assert (tmp_path / "mine" / TRIAL / "notes").exists()


def test_resume_hint_is_what_one_can_do(tmp_path: Path) -> None:
    trial = Server(tmp_path, "127.0.0.1", 1, None, trial=True)
    assert "perfed federate --overwrite" in trial._resume_hint
    assert "--resume" not in trial._resume_hint
    assert f"perfed serve --resume {tmp_path}" in replace(trial, trial=False)._resume_hint


@pytest.mark.slow
def test_a_trials_clients_end_with_it(tmp_path: Path) -> None:
    """Even if it is killed."""
    Trial.create(trial_config(None, 2, []), tmp_path)
    code = (
        "import sys, time\nfrom pathlib import Path\nfrom perfed.federation.trial import Trial\n"
        "from perfed.runs.config import Config\n"
        "folder, names = Path(sys.argv[1]), ('client-0', 'client-1')\n"
        "config = Config.load(folder / 'trial' / 'config.toml')\n"
        "with Trial(folder, config, names)._clients(9) as members:\n"
        "    print(*(member.pid for member in members), flush=True)\n    time.sleep(100)\n"
    )
    command = [sys.executable, "-P", "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as trial:
        assert trial.stdout is not None
        members = [psutil.Process(int(pid)) for pid in trial.stdout.readline().split()]
        assert len(members) == 2
        assert members[0].environ()["PERFED_DEVICES"]
        trial.kill()
    _, left = psutil.wait_procs(members, timeout=60)
    for member in left:
        member.kill()
    assert not left


def test_federate_needs_data_of_numbers(place: Path, tmp_path: Path) -> None:
    done = here("federate", place / "config.toml", "--out", tmp_path / "x", "--set", "method.lr=-1")
    assert done.exit_code == 2
    assert "method.lr" in done.stderr
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("missing", "command"),
    [
        ("cryptography", "keys k --client a"),
        ("cryptography", "serve c.toml --insecure --clients 1 --out o"),
        ("httpx", "serve c.toml --insecure --clients 1 --out o"),
        ("uvicorn", "federate"),
        ("flwr", "federate"),
    ],
)
def test_without_the_extra_it_is_said_what_to_install(
    tmp_path: Path, missing: str, command: str
) -> None:
    code = (
        f"import sys; sys.modules[{missing!r}] = None; sys.argv = {['perfed', *command.split()]}\n"
        "from perfed.cli import main\nmain()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2, done.stderr
    assert 'pip install "perfed[flower]"' in done.stderr
    assert not list(tmp_path.iterdir())
