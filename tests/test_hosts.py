"""One run by several processes on loopback: the result of one process, whatever happens to them."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from safetensors.numpy import load_file

from federations import started, wait
from perfed import ConfigError, FieldError, load
from perfed.data import store
from perfed.simulation import hosts
from perfed.simulation.hosts import Hosts, free_port
from test_cli import perfed

COMMAND = [sys.executable, "-P", "-m", "perfed"]
CONFIG = """
rounds = {rounds}
cohort = 5
eval_every = {rounds}
eval_clients = 7
[data]
source = "stored"
root = "{root}"
[model]
name = "mlr"
[method]
name = "pfedme"
local_rounds = 2
inner_start = "kept"
batch = 8
[codec]
name = "top-k"
fraction = 0.3
error_feedback = true
[output]
checkpoint_rounds = 2
"""


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hosts")
    store(load("synthetic", clients=12, sizes="fedprox"), folder / "stored")
    (folder / "c.toml").write_text(CONFIG.format(rounds=5, root=folder / "stored"))
    return folder / "c.toml"


def assert_same(one: Path, other: Path) -> None:
    """To 1e-5 of the largest entry; and the same messages."""
    for name in ("model.safetensors", "clients.safetensors"):
        got, due = load_file(one / name), load_file(other / name)
        assert got.keys() == due.keys()
        for key, array in due.items():
            assert np.abs(got[key] - array).max() <= 1e-5 * np.abs(array).max()
    ours, theirs = (json.loads((run / "summary.json").read_text()) for run in (one, other))
    assert ours["traffic"] == theirs["traffic"]
    assert ours["names"] == theirs["names"]


@pytest.fixture(scope="module")
def alone(config: Path) -> Path:
    out = config.parent / "alone"
    done = perfed("run", config, "--out", out)
    assert done.returncode == 0, done.stderr
    return out


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
def test_several_processes_end_where_one_does(
    tmp_path: Path, config: Path, alone: Path, count: int
) -> None:
    """Model, personal models of a method that remembers, and messages."""
    out = tmp_path / "out"
    done = perfed("run", config, "--out", out, "--hosts", count, PERFED_DEVICES="1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0].startswith("pfedme, round 5")
    assert done.stdout.count("written to") == 1  # one speaks for all
    assert_same(out, alone)
    assert not list(out.glob("kept*"))
    assert "devices" in json.loads((out / "environment.json").read_text())


READS = """
import sys
from perfed.simulation import Streamed, cohort_reader as reader, hosts
from perfed import FedAvg, MLR, Experiment, Task, load
hosts.Hosts(("127.0.0.1", "127.0.0.1"), int(sys.argv[2]), int(sys.argv[3])).connect()
read, copy = [], reader._Source.copy
def watched(self, starts, sizes, to):
    read.extend(starts)
    copy(self, starts, sizes, to)
reader._Source.copy = watched
engine = Streamed(Experiment(load("stored", root=sys.argv[1]), Task(MLR(60, 10)), FedAvg(tau=1), 5))
_, traffic = engine.run(engine.init(), 1)
engine._pool.shutdown()
rounds = [*traffic.cohort.tolist(), *(engine.experiment.sample_cohort(k).tolist() for k in (1, 2))]
starts = engine.experiment.federation.train.start
print([[int(starts[i]) for i in cohort] for cohort in rounds], "|", sorted(set(read)))
"""


@pytest.mark.slow
def test_each_reads_the_rows_of_its_own_clients(config: Path) -> None:
    port = free_port()
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", READS, str(config.parent / "stored"), str(port), str(rank)],
            env=os.environ | {"PERFED_DEVICES": "1"}, stdout=subprocess.PIPE, text=True,
        )
        for rank in (0, 1)
    ]  # fmt: skip
    said = [process.communicate(timeout=120)[0].strip().splitlines()[-1] for process in processes]
    cohorts = json.loads(said[0].partition("|")[0])
    read = [set(json.loads(line.partition("|")[2])) for line in said]
    # Of five seats the first process has three.
    assert read[0] == {start for cohort in cohorts for start in cohort[:3]}
    assert read[1] == {start for cohort in cohorts for start in cohort[3:]}


def together(config: list[Path], devices: str = "11") -> list[subprocess.CompletedProcess[str]]:
    """The same command on several machines, as it were, with so many devices each."""
    names = f"127.0.0.1:{free_port()}" + ",127.0.0.1" * (len(config) - 1)
    processes = [
        subprocess.Popen(
            [*COMMAND, "run", str(own), "--hosts", names, "--rank", str(rank)],
            env=os.environ | {"PERFED_DEVICES": devices[rank]},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank, own in enumerate(config)
    ]  # fmt: skip
    ends = [process.communicate(timeout=200) for process in processes]
    return [
        subprocess.CompletedProcess([], process.returncode, *end)
        for process, end in zip(processes, ends, strict=True)
    ]


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("/stored", "/nowhere", "process 1: data: "),
        pytest.param(
            "lam = ",
            "",
            "process 1 has another configuration than process 0",
            marks=pytest.mark.slow,
        ),
        ("rounds = 5", "rounds = 6", "process 1 has another configuration than process 0"),
        ('"pfedme"', '"pfedmi"', "process 1: method.name"),
    ],
    ids=["data", "same", "configuration", "fault"],
)
def test_a_fault_of_one_is_told_by_the_first(
    tmp_path: Path, config: Path, old: str, new: str, said: str
) -> None:
    other = tmp_path / "other.toml"
    text = config.read_text()
    other.write_text(text.replace(old, new))
    first, second = together([config, other])
    if text == other.read_text():
        assert (first.returncode, second.returncode) == (0, 0)
        return
    assert (first.returncode, second.returncode) == (2, 2)
    assert said in first.stderr
    assert not second.stdout
    assert "Traceback" not in first.stderr + second.stderr


@pytest.mark.slow
def test_a_process_that_is_killed_ends_the_others_and_the_run_goes_on(
    tmp_path: Path, config: Path
) -> None:
    """Again by three, whose first one is killed; by two, with who started them; by one alone.

    To the end that it would have had.
    """
    # Without a codec: three add up in another order than two, and top-k makes much of little.
    head, _, rest = config.read_text().partition("[codec]")
    text = head.replace("= 5\n", "= 3000\n").replace("cohort = 3000", "cohort = 5")
    (tmp_path / "c.toml").write_text(text + rest[rest.index("[output]") :])
    out, log = tmp_path / "out", tmp_path / "log"
    whole = perfed("run", tmp_path / "c.toml", "--out", tmp_path / "whole")
    assert whole.returncode == 0, whole.stderr

    def reached() -> int:
        return max(
            (int(p.name[6:15]) for p in (out / "checkpoints").glob("*.checkpoint")), default=0
        )

    begin = ["run", str(tmp_path / "c.toml"), "--out", str(out), "--hosts", "2"]
    for rank, arguments in (
        ("1", begin),
        ("0", ["resume", str(out), "--hosts", "3"]),
        (None, ["resume", str(out), "--hosts", "2"]),
    ):
        before = reached()
        process = started([*COMMAND, *arguments], log)
        wait(lambda before=before: reached() > before + 20, 200, "checkpoints")  # type: ignore[misc]
        children = psutil.Process(process.pid).children()
        victims = [child for child in children if child.cmdline()[-1] == rank]
        time.sleep(0.05)
        (victims or [process])[0].kill()
        assert process.wait(60) != 0
        _, alive = psutil.wait_procs(children, 30)
        assert not alive
        if rank == "1":
            assert "lost each other" in log.read_text()
    done = perfed("resume", out)
    assert done.returncode == 0, done.stderr
    assert_same(out, tmp_path / "whole")


@pytest.mark.parametrize(
    ("text", "rank", "said"),
    [
        ("somewhere", None, "write HOST:PORT,HOST"),
        ("a:99999,b", 0, "write HOST:PORT,HOST"),
        ("a:80,,b", 0, "write HOST:PORT,HOST"),
        ("a:80,b", 2, "must be between 0 and 1"),
        ("auto", 1, "is set by the launcher"),
        ("127.0.0.1:80,127.0.0.1", None, "this machine is 2 of these; choose one by --rank"),
        ("nowhere.invalid:80,neither.invalid", None, "this machine is 0 of these"),
    ],
)
def test_hosts_that_make_no_sense(text: str, rank: int | None, said: str) -> None:
    with pytest.raises(FieldError, match=said):
        Hosts.read(text, rank)


def test_hosts_that_do(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Hosts.read("a:80, b,c", 2) == Hosts(("a", "b", "c"), 80, 2)
    assert Hosts.read("nowhere.invalid:80,127.0.0.1", None).rank == 1
    assert Hosts.read("[::2]:80,b", 0).names == ("::2", "b")
    monkeypatch.setenv("PERFED_RANK", "1")
    assert Hosts.read("a:80,b", None).rank == 1


def test_all_have_as_many_devices(config: Path) -> None:
    """Processes of one machine are given as many; of others it is said."""
    first, second = together([config] * 2, "12")
    assert (first.returncode, second.returncode) == (2, 2)
    assert (
        "error --hosts: process 0 has 1, process 1 has 2 devices; set PERFED_DEVICES"
        in first.stderr
    )


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="cores cannot be chosen here")
def test_cores_are_dealt_evenly(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[list[int]] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3, 4, 5, 6})
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, cores: given.append(list(cores)))
    for count in (3, 9):
        given.clear()
        for rank in range(count):
            with hosts._on_cores(rank, count):
                pass
        assert len({len(cores) for cores in given[::2]}) == 1


@pytest.mark.slow
def test_nobody_comes() -> None:
    code = (
        "from perfed.simulation.hosts import Hosts\n"
        f"Hosts(('127.0.0.1', 'b'), {free_port()}, 1).connect(2)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode != 0


@pytest.mark.slow
def test_bad_commands_are_refused_at_once(tmp_path: Path, config: Path) -> None:
    for arguments, said in (
        (["run", "--hosts", "2"], "give a CONFIG"),
        (["run", config, "--rank", "1"], "--rank: is one of --hosts"),
        (["run", config, "--hosts", "0"], "--hosts = 0: must be at least 1"),
        (["run", config, "--hosts", "2", "--set", "rounds=0"], "rounds = 0"),
    ):
        done = perfed(*arguments)
        assert done.returncode == 2
        assert said in done.stderr
    (tmp_path / "v.toml").write_text(config.read_text() + '[engine]\nname = "vectorized"\n')
    first, second = together([tmp_path / "v.toml"] * 2)
    assert (first.returncode, second.returncode) == (2, 2)
    assert 'must be "auto" or "streamed" on several hosts' in first.stderr


def test_a_run_goes_on_with_the_engine_that_has_its_memory(tmp_path: Path, config: Path) -> None:
    from perfed import Config
    from perfed.runs.recording import Recording

    settings = ["rounds=4", "engine.name=streamed"]
    recording = Recording.begin(Config.load(config, settings), tmp_path / "run")
    store = recording.engine.run_store
    assert store is not None
    write, count = type(store).write, 0

    def interrupted(self: Any, *arguments: Any) -> None:
        nonlocal count
        count += 1
        write(self, *arguments)
        if count == 3:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(store), "write", interrupted)
        with pytest.raises(KeyboardInterrupt):
            recording.train()
    vectorized = Config.load(config, ["rounds=4", "engine.name=vectorized"])
    with pytest.raises(ConfigError, match='goes on with the engine "streamed" only'):
        Recording.resume(tmp_path / "run", vectorized).train()
    Recording.resume(tmp_path / "run", Config.load(config, ["rounds=4"])).train()
    assert (tmp_path / "run" / "summary.json").exists()
