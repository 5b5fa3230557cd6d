"""The commands of a federation: what they refuse at once, and what they say."""

import socket
from pathlib import Path

import pytest
import tomli_w
from click.testing import Result
from typer.testing import CliRunner

from federations import NAMES, settings, write_clients
from perfed.cli import app
from perfed.flower.keys import make_keys
from perfed.flower.plan import PLAN
from test_cli import perfed

FEDAVG = {"name": "fedavg", "lr": 0.1, "tau": 3, "batch": 5}


def here(*arguments: object) -> Result:
    """The command in this process: it takes seconds to start one of its own."""
    return CliRunner().invoke(app, [str(word) for word in arguments], env={"COLUMNS": "1000"})


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
        (["CONFIG", "--out", "OUT", "--keys", "KEYS", "--set", "data.standardise=feature"],
         "data.standardise"),
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
        (["--server", "host", "--data", "DATA", "--home", "HOME", "--keys", "KEYS"], "HOST:PORT"),
        (["--server", "h:1", "--data", "HOME", "--home", "HOME", "--keys", "KEYS"], "--data"),
        (["--server", "h:1", "--data", "DATA", "--home", "HOME"], "--keys"),
        (["--server", "h:1", "--data", "DATA", "--home", "HOME", "--insecure"], "--name"),
        (["--server", "h:1", "--data", "DATA", "--home", "HOME", "--keys", "HOME"], "perfed keys"),
        (["--server", "h:1", "--data", "DATA", "--home", "DATA", "--keys", "KEYS"], "--home"),
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


def test_a_taken_port_is_named(place: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        done = perfed(
            "serve", place / "config.toml", "--out", tmp_path / "run",
            "--keys", place / "keys" / "server", "--listen", address,
        )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert address in done.stderr
    assert (tmp_path / "run" / PLAN).exists()  # it can be begun by --resume on another port


def test_a_client_that_nobody_answers_gives_up_when_asked_to(place: Path, tmp_path: Path) -> None:
    done = perfed(
        "join", "--server", "127.0.0.1:9", "--data", place / "data" / "client-0.npz",
        "--home", tmp_path / "home", "--keys", place / "keys" / "clients" / "client-0",
        "--patience", 4,
    )  # fmt: skip
    assert done.returncode == 1
    assert "has not let us in" in done.stderr


def test_federate_needs_data_of_numbers(place: Path, tmp_path: Path) -> None:
    done = here("federate", place / "config.toml", "--out", tmp_path / "x", "--set", "method.lr=-1")
    assert done.exit_code == 2
    assert "method.lr" in done.stderr
    assert not (tmp_path / "x").exists()
