"""Federations of real processes whose clients, servers and disks fail: nothing is lost or spoilt.

A round is what the server recorded of it, so a run is replayed here with those who counted in it:
each client goes on with what it kept when it last counted, whatever it has done in between.
"""

import re
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import psutil
import pytest
from safetensors.numpy import load

pytest.importorskip("flwr")

from federations import (
    NAMES,
    Federation,
    children,
    distance,
    federation,
    kill,
    simulated,
    wait,
)
from perfed.core.trees import row, stack
from perfed.evaluation.evaluator import SimulationEvaluator
from perfed.federation.client.client_dir import STATE
from perfed.runs import Config
from perfed.runs.run_dir import read_run
from perfed.simulation.round import broadcast, client_update, server_update

pytestmark = pytest.mark.federation

PFEDME = {
    "name": "pfedme", "lam": 15.0, "eta": 0.05, "local_rounds": 3, "inner_lr": 0.01, "batch": 5,
    "beta": 1.5, "inner_start": "kept",  # so that theta matters
}  # fmt: skip
FEDAVG = {"name": "fedavg", "lr": 0.1, "tau": 3, "batch": 5}
CODEC = {"name": "low-precision", "levels": 4, "error_feedback": True}
# The machine may be busy with anything: what is waited for comes much earlier.
LONG = 180.0
FULL = "OSError: [Errno 28] No space left on device"
# What Ctrl-C sends, unless whoever runs the tests does not want to hear it.
CTRL_C = signal.SIGINT if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN else signal.SIGTERM


def start(run: Federation) -> None:
    run.serve()
    for name in NAMES:
        run.join(name)


def rounds_done(run: Federation) -> int:
    return max((int(n) for n in re.findall(r" round (\d+) of ", run.log)), default=-1)


def next_round(run: Federation, more: int = 1) -> int:
    """Wait until so many more rounds are done; how many that are."""
    due = rounds_done(run) + more
    wait(lambda: rounds_done(run) >= due, LONG, f"round {due}:\n{run.log}")
    return rounds_done(run)


def wait_for_lines(run: Federation, said: str, times: int, who: str | None = None) -> None:
    """Until a log has so many lines of a kind."""

    def enough() -> bool:
        log = run.log if who is None else run.log_of(who)
        return len(re.findall(said, log)) >= times

    wait(enough, LONG, f"{times} times {said!r} of {who or 'the server'}:\n{run.log}")


def node_log(run: Federation, name: str) -> str:
    """What a client's SuperNode says."""
    return (run.path / "homes" / name / "flower" / "log.txt").read_text()


def went_out(run: Federation, name: str, reason: str) -> int:
    """Wait until a client does not count for a reason; the round."""
    line = rf"round (\d+): no update from {name}: {reason}"
    wait_for_lines(run, line, 1)
    return int(re.findall(line, run.log)[0])


@contextmanager
def full_disk(run: Federation, name: str) -> Iterator[None]:
    """What a client keeps goes to a disk that is full: a real ENOSPC."""
    partial = run.home(name) / f"{STATE}.partial"
    member = psutil.Process(run.members[name].pid)

    def put() -> bool:
        """Not while it writes: it would make the link its own."""
        member.suspend()
        try:
            wait(lambda: member.status() == psutil.STATUS_STOPPED, LONG, f"{name} stopped")
            if partial.exists():
                return False
            partial.symlink_to("/dev/full")
            return True
        finally:
            member.resume()

    wait(put, LONG, f"{name} has written what it keeps")
    try:
        yield
    finally:
        partial.unlink()


def family(process: subprocess.Popen[bytes] | None) -> list[psutil.Process]:
    """A process of ours and all that it has started."""
    assert process is not None
    return [psutil.Process(process.pid), *children(process.pid)]


def gone(process: subprocess.Popen[bytes] | None, kin: Sequence[psutil.Process]) -> int:
    """Wait until a process and all its children have ended; its exit status."""
    assert process is not None
    status = process.wait(60)
    _, left = psutil.wait_procs(kin, timeout=60)
    assert not left, left
    return status


def ended(run: Federation, names: Sequence[str], how: signal.Signals) -> dict[str, int]:
    """End clients in good order; their exit status. No process is left behind."""
    kin = {name: family(run.members[name]) for name in names}
    for name in names:
        run.members[name].send_signal(how)
    return {name: gone(run.members[name], kin[name]) for name in names}


def counted(run: Federation) -> list[list[int]]:
    """Who counted in which round, from the server's last checkpoint."""
    last = max((run.run / "checkpoints").glob("round-*.checkpoint"))
    tensors = load(last.read_bytes().partition(b"\n")[2])
    cohort, uplink = tensors["traffic.cohort"], tensors["traffic.uplink"]
    return [sorted(c[b > 0].tolist()) for c, b in zip(cohort, uplink, strict=True)]


def replayed(values: dict[str, Any], rounds: Sequence[Sequence[int]]) -> tuple[Any, list[Any]]:
    """The global model and everyone's own, of a run in whose rounds these clients counted."""
    engine = Config.checked(values).build()
    made, state = engine.experiment, engine.experiment.init_state()
    data, aggregate = made.device_data(), made.pipeline.aggregate
    records = [row(state.clients, i) for i in range(len(NAMES))]
    for round, clients in enumerate(rounds):
        sent = broadcast(made, state)
        updates = [client_update(made, data, sent, records[i], round, i) for i in clients]
        for i, own in zip(clients, updates, strict=True):
            records[i] = own.record
        stacked = stack([(own.delta, own.extra) for own in updates])
        weights = jnp.stack([own.weight for own in updates])
        mean = aggregate.finish(aggregate.total(weights, stacked))
        state = server_update(made, state, mean, state.clients)
    state = state._replace(clients=stack(records))
    models = SimulationEvaluator(engine).personal_models(state)
    return state.params, [row(models, i) for i in range(len(NAMES))]


def check_replayed(run: Federation) -> list[list[int]]:
    """The run has ended where it should, with all that it has to tell; who counted in it."""
    rounds = counted(run)
    total = run.values["rounds"]
    assert len(rounds) == total
    w, own = replayed(run.values, rounds)
    assert distance(run.model(), w) < 1e-6
    for i, name in enumerate(NAMES):
        assert distance(run.own_model(name), own[i]) < 1e-6
    recorded = read_run(run.run)
    assert recorded.rounds.tolist() == [0, total]
    for scores in recorded.scores.values():
        assert all(np.isfinite(values[-1]).all() for values in scores.values())
    logged = [int(n) for n in re.findall(r" round (\d+) of ", run.log)]
    assert sorted(set(logged)) == list(range(total + 1))
    return rounds


class Cable:
    """A port that passes everything on to another one; when it is cut, it answers nothing."""

    def __init__(self, to: int) -> None:
        self._to, self._cut = to, False
        self._ends: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self, cut: bool = True) -> None:
        """Or mend it."""
        self._cut = cut
        for end in self._ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        self._ends.clear()

    def _accept(self) -> None:
        while True:
            near, _ = self._listener.accept()
            self._ends.append(near)
            if self._cut:
                continue
            try:
                far = socket.create_connection(("127.0.0.1", self._to))
            except OSError:
                near.close()
                continue
            self._ends.append(far)
            for ends in ((near, far), (far, near)):
                threading.Thread(target=self._pass, args=ends, daemon=True).start()

    @staticmethod
    def _pass(source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError), source, sink:
            while data := source.recv(1 << 16):
                sink.sendall(data)


def test_clients_fail_in_many_ways_and_come_back(tmp_path: Path) -> None:
    terms = {"timeout": 25.0, "minimum": 2, "attempts": 100}
    with federation(tmp_path, PFEDME, rounds=9, eval_every=9, federation=terms) as run:
        cable = Cable(run.port)
        run.serve()
        for name in NAMES:
            run.join(name, port=cable.port if name == "client-1" else None)
        run.wait_for("round 1 of 9", LONG)

        # A straggler: its answer comes, but too late.
        run.members["client-1"].send_signal(signal.SIGSTOP)
        late = went_out(run, "client-1", "no reply within 25 s")
        before = run.log_of("client-1").count(f"train {late}: done")
        run.members["client-1"].send_signal(signal.SIGCONT)
        wait_for_lines(run, f"train {late}: done", before + 1, "client-1")
        next_round(run, 2)

        # A crash in the middle of a round. It is started again at once, but Flower believes its key
        # to be in use for a minute.
        kill(run.members["client-0"])
        run.join("client-0")
        went_out(run, "client-0", "no reply within 25 s")

        # A full disk. Rounds have too few updates now, until the crashed one is back.
        with full_disk(run, "client-2"):
            run.wait_for("No space left on device", LONG, "client-2")

            # A network without an answer: Flower gives up, and is started anew.
            cable.cut()
            lost = node_log(run, "client-1").count("handshake error") + 1
            wait(lambda: node_log(run, "client-1").count("handshake error") == lost, LONG, "an end")
            cable.cut(False)
            run.wait_for(f"disconnected from 127.0.0.1:{cable.port}: the network", LONG, "client-1")
            wait_for_lines(run, "joined", 2, "client-1")

            # A restart in good order: by the same key it is let in at once, with what it kept.
            refused = run.log_of("client-1").count("cannot join")
            assert ended(run, ["client-1"], signal.SIGTERM) == {"client-1": 128 + signal.SIGTERM}
            run.join("client-1", port=cable.port)
            wait_for_lines(run, "joined", 3, "client-1")
            assert run.log_of("client-1").count("cannot join") == refused

            wait_for_lines(run, "joined", 2, "client-0")
            went_out(run, "client-2", re.escape(FULL))
            next_round(run)
        run.finish()
        assert "updates are valid, 2 are needed; retrying" in run.log
        assert "cannot join" in run.log_of("client-0")
        assert "regards it as still in use" in run.log_of("client-0")
        ended(run, NAMES, signal.SIGTERM)
    rounds = check_replayed(run)
    assert all(any(i not in who for who in rounds) for i in range(3))
    assert rounds[-1] == [0, 1, 2]


def test_a_client_goes_on_with_what_its_messages_left_out(tmp_path: Path) -> None:
    """And while it comes back and does not answer, nobody waits for it."""
    terms = {"timeout": 2 * LONG, "minimum": 2, "attempts": 100}
    with federation(tmp_path, FEDAVG, rounds=7, eval_every=7, codec=CODEC, federation=terms) as run:
        start(run)
        run.wait_for("round 1 of 7", LONG)
        with full_disk(run, "client-1"):  # no round is closed meanwhile
            kin = family(run.members["client-2"])
            run.members["client-2"].kill()
            assert gone(run.members["client-2"], kin) == -signal.SIGKILL
            run.wait_for("client-2 disconnected", LONG)
            run.join("client-2")
            wait(lambda: len(family(run.members["client-2"])) > 1, LONG, "a SuperNode")
            run.members["client-2"].send_signal(signal.SIGSTOP)
            wait(lambda: node_log(run, "client-2").count("SuperNode ID:") == 2, LONG, "let in")
        next_round(run, 2)  # though its greeting is not answered
        assert run.log.count("client-2 joined with") == 1
        with full_disk(run, "client-1"):
            run.members["client-2"].send_signal(signal.SIGCONT)
            wait_for_lines(run, "client-2 joined with", 2)
            next_round(run)
        run.finish()
        assert ended(run, ["client-0"], CTRL_C) == {"client-0": 128 + CTRL_C}
        ended(run, ["client-1", "client-2"], signal.SIGTERM)
    rounds = check_replayed(run)
    assert any(2 not in who for who in rounds)
    assert any(1 not in who for who in rounds)
    assert rounds[-1] == [0, 1, 2]


def test_a_server_that_ends_in_any_way_is_resumed(tmp_path: Path) -> None:
    terms = {"timeout": LONG, "minimum": 3, "attempts": 2}
    with federation(tmp_path, PFEDME, rounds=4, eval_every=4, codec=CODEC, federation=terms) as run:
        start(run)
        run.wait_for("round 1 of 4", LONG)

        # Too few clients answer, again and again.
        kin = family(run.server)
        with full_disk(run, "client-2"):
            assert gone(run.server, kin) == 1
        for tried in ("retrying", "giving up"):
            assert f"2 of 3 updates are valid, 3 are needed; {tried}" in run.log
        last = run.log.splitlines()[-1]
        assert f"fewer than 3 valid updates after 2 attempts (client-2: {FULL})" in last
        assert run.log.count(f"go on with: perfed serve --resume {run.run}") == 1

        # The server is killed.
        kin = resumed(run)
        kin[0].kill()
        assert gone(run.server, kin) == -signal.SIGKILL

        # The SuperLink is killed.
        kin = resumed(run)
        kin[1].kill()
        assert gone(run.server, kin) == 1
        assert "ended: LinkLostError: the SuperLink has ended" in run.log.splitlines()[-1]
        assert run.log.count(f"go on with: perfed serve --resume {run.run}") == 2

        # The server is told to end.
        kin = resumed(run)
        next_round(run)
        kin[0].terminate()
        assert gone(run.server, kin) == 128 + signal.SIGTERM
        assert run.log.count(f"go on with: perfed serve --resume {run.run}") == 3

        resumed(run)
        run.finish()
        ended(run, NAMES, signal.SIGTERM)
    assert check_replayed(run) == [[0, 1, 2]] * 4
    due = simulated(run.values)
    assert distance(run.model(), due.global_model) < 1e-6
    for i, name in enumerate(NAMES):
        assert distance(run.own_model(name), due.personal_model(i)) < 1e-6
        assert run.log_of(name).count("joined") == 1  # it has come back by itself
    assert run.summary()["uplink_bytes"] == due.costs.uplink_bytes[-1]


def resumed(run: Federation) -> list[psutil.Process]:
    """Go on with a run, and wait until a client has had its turn; the server and its SuperLink."""
    turn = f"train {rounds_done(run)}: done"
    before = run.log_of("client-0").count(turn)
    run.serve(resume=True)
    wait_for_lines(run, turn, before + 1, "client-0")
    kin = family(run.server)
    assert len(kin) == 2
    return kin


def test_a_namesake_waits_until_the_name_is_free(tmp_path: Path) -> None:
    """Without keys, a client that comes again is another node, and its old one may still be known.

    And no process is left behind where a server ends before its run has begun.
    """
    with federation(tmp_path, FEDAVG, plain=True) as run:
        run.serve()
        run.wait_for("waiting for clients: 0 of 3", LONG)
        kin = family(run.server)
        kin[1].kill()
        assert gone(run.server, kin) == 1
        assert "ended: LinkLostError: the SuperLink has ended" in run.log.splitlines()[-1]

        run.serve(resume=True)
        run.join("client-0")
        run.wait_for("client-0 joined with", LONG)
        first = run.members["client-0"]
        run.join("client-0", "--client-dir", str(tmp_path / "homes" / "again"))
        again = run.members["client-0"]
        run.wait_for("client-0 cannot join: there is already a client client-0", LONG)
        run.members["client-0"] = first
        ended(run, ["client-0"], signal.SIGTERM)
        run.members["client-0"] = again
        wait_for_lines(run, "client-0 joined with", 2)

        kin = family(run.server)
        kin[0].send_signal(CTRL_C)
        assert gone(run.server, kin) == 128 + CTRL_C
        # Its server is not there any more.
        assert ended(run, ["client-0"], CTRL_C) == {"client-0": 128 + CTRL_C}
