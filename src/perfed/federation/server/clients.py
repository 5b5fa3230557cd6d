"""The clients of a federation as the server knows them."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, Final, Literal, final

from perfed.data import Federation
from perfed.data.files import canonical_names
from perfed.federation.protocol.errors import UNKNOWN_EXPERIMENT
from perfed.federation.protocol.framing import pack
from perfed.federation.protocol.messages import ClientInfo, JoinRequest
from perfed.federation.server.checks import read_client_info
from perfed.federation.transport.messenger import Failure, LinkLostError, Messenger, Reply

Log = Callable[[str], None]
Activity = Literal["away", "connected", "working", "replied", "late", "failed"]

_PAUSE: Final = 0.5
# How long all wait for the reply to a join request, and until a refused node is asked again.
_JOIN_WAIT: Final = 5.0
_RETRY_AFTER: Final = 60.0
# After a restart, the server's or their own, clients reconnect within a minute, as Flower does.
RECONNECT_TIME: Final = 90.0


@final
@dataclass
class ClientStatus:
    """What one client does at the moment, for the operator.

    Attributes:
        activity: what it does.
        since: when that began, on the monotonic clock.
        rounds: the number of its updates that were accepted.
        uplink_bytes: the length of these updates.
        downlink_bytes: the length of the models it was sent for training.
        fault: why its last reply was not accepted, if it was not.
    """

    activity: Activity = "away"
    since: float = field(default_factory=time.monotonic)
    rounds: int = 0
    uplink_bytes: int = 0
    downlink_bytes: int = 0
    fault: str = ""

    def set(self, activity: Activity, fault: str = "") -> None:
        """Change what it does."""
        if activity != self.activity:
            self.activity, self.since = activity, time.monotonic()
        self.fault = fault


@final
@dataclass(frozen=True, eq=False)
class _PendingJoin:
    """A join request without a reply; the client's name, if there are keys."""

    name: str


@final
class ClientManager:
    """Lets clients join as they connect, and sends requests to those that have joined.

    A client that does not reply to the join request holds up the others for a moment only.

    Args:
        messenger: sends the requests.
        experiment: the experiment's name.
        config: what is trained (`client_config`).
        names: the clients, in the order of their numbers; None: the first that connect, by names
            of their own.
        keys: the clients' public keys; None: there are no keys.
        timeout: the seconds that a client has for a reply.
        log: called with messages for the operator.
    """

    def __init__(
        self,
        messenger: Messenger,
        experiment: str,
        config: dict[str, Any],
        names: Sequence[str] | None,
        keys: Mapping[str, bytes] | None,
        timeout: float,
        log: Log,
    ) -> None:
        self.experiment, self.timeout, self.log = experiment, timeout, log
        self.names: tuple[str, ...] = tuple(names or ())
        self.infos: dict[str, ClientInfo] = {}
        self._started = False
        self.statuses = {name: ClientStatus() for name in self.names}
        self._messenger, self._config = messenger, config
        self._by_key = None if keys is None else {key: name for name, key in keys.items()}
        self._nodes: dict[str, int] = {}  # the node of each client that has joined
        self._pending: dict[int, _PendingJoin] = {}  # by node
        self._replies: SimpleQueue[tuple[int, _PendingJoin, Reply | None]] = SimpleQueue()
        self._refused: dict[int, float] = {}  # by node: until when
        self._complaints: dict[int, str] = {}  # by node: the last line about it

    def wait_for(self, count: int, everyone: float | None = None) -> None:
        """Wait until so many clients have joined.

        Args:
            count: how many, for as long as it takes.
            everyone: the seconds to wait for all clients; None: do not.
        """
        start, last = time.monotonic(), ""
        while True:
            self.update()
            missing = [name for name in self.names if name not in self._nodes]
            joined = len(self._nodes)
            waited = everyone is None or time.monotonic() - start > everyone
            if joined >= count and (waited or not missing):
                return
            line = f"waiting for clients: {joined} of {max(count, len(self.names))} connected"
            if missing:
                line += f"; missing: {', '.join(missing[:10])}"
            if line != last:
                self.log(line)
                last = line
            time.sleep(_PAUSE)

    def update(self) -> None:
        """Notice who has disconnected, and let those join who are new."""
        nodes = {node.id: node for node in self._messenger.nodes()}
        for lost in [name for name, id in self._nodes.items() if id not in nodes]:
            self._remove(lost)
            self.log(f"{lost} disconnected")
        for known in (self._pending, self._refused, self._complaints):
            for id in [id for id in known if id not in nodes]:
                del known[id]
        self._read_replies()
        now = time.monotonic()
        self._refused = {id: until for id, until in self._refused.items() if until > now}
        known_nodes = {*self._nodes.values(), *self._pending, *self._refused}
        requests = {}
        for id in [id for id in nodes if id not in known_nodes]:
            name = "" if self._by_key is None else self._by_key.get(nodes[id].key)
            if name is None:
                self._refuse(id, f"node {id}", "its key is not on the list")
                continue
            self._pending[id] = _PendingJoin(name)
            request = JoinRequest(experiment=self.experiment, config=self._config, name=name)
            requests[id] = pack(request)
        if requests:
            new = {id: self._pending[id] for id in requests}
            Thread(target=self._send_join, args=(requests, new), daemon=True).start()
            while not new.keys().isdisjoint(self._pending) and time.monotonic() - now < _JOIN_WAIT:
                time.sleep(_PAUSE / 10)
                self._read_replies()

    def _send_join(self, requests: dict[int, bytes], new: Mapping[int, _PendingJoin]) -> None:
        """In a thread of its own: queue the replies."""
        queued: set[int] = set()

        def on_reply(node: int, reply: Reply) -> None:
            queued.add(node)
            self._replies.put((node, new[node], reply))

        replies: dict[int, Reply] = {}
        with suppress(LinkLostError, RuntimeError):  # a round notices it too, or all are over
            replies = self._messenger.send("join", "join", requests, self.timeout, on_reply)
        for node in new.keys() - queued:
            self._replies.put((node, new[node], replies.get(node)))

    def _read_replies(self) -> None:
        """Read the queued replies of nodes that are still connected."""
        while True:
            try:
                node, pending, reply = self._replies.get_nowait()
            except Empty:
                return
            if self._pending.get(node) is not pending:
                continue
            del self._pending[node]
            if reply is None:
                who = pending.name or f"node {node}"
                late = f"no reply to the join request within {self.timeout:g} s; asking again"
                self._complain(node, f"{who} has not joined: {late}")
            else:
                self._read_join(node, pending.name, reply)

    def _read_join(self, node: int, name: str, reply: Reply) -> None:
        info = read_client_info(reply, self.experiment)
        failure = info if isinstance(info, Failure) else self._mismatch(name or info.name, info)
        if failure is not None:
            who = name or (info.name if isinstance(info, ClientInfo) else f"node {node}")
            self._refuse(node, who, failure.reason)
            return
        assert isinstance(info, ClientInfo)
        name = name or info.name
        self.infos[name] = info
        self._nodes[name] = node
        self._complaints.pop(node, None)
        self.statuses.setdefault(name, ClientStatus()).set("connected")
        self.log(
            f"{name} joined with {info.train_examples} training and {info.test_examples} test "
            "examples"
        )

    def _refuse(self, node: int, who: str, reason: str) -> None:
        """Leave a node out for a while: its operator may fix the problem."""
        self._refused[node] = time.monotonic() + _RETRY_AFTER
        self._complain(node, f"{who} cannot join: {reason}")
        if who in self.statuses and who not in self._nodes:
            self.statuses[who].set("failed", reason)

    def _complain(self, node: int, line: str) -> None:
        """Log what is wrong with a node, once."""
        if self._complaints.get(node) != line:
            self._complaints[node] = line
            self.log(line)

    def _mismatch(self, name: str, info: ClientInfo) -> Failure | None:
        """Why a client cannot join, if it cannot."""
        if not name:
            return Failure("it has neither a key nor a name; give it one with --name")
        if name in self._nodes:
            return Failure(f"there is already a client {name}")
        if self.names and name not in self.names:
            return Failure("it is not a client of this run")
        if name in self.infos and self.infos[name] != info:
            return Failure("its data have changed since the run began")
        other, first = next(iter(self.infos.items()), (name, info))
        for key in ("shape", "dtype", "features"):
            own, expected = getattr(info, key), getattr(first, key)
            if own != expected:
                return Failure(
                    f"the {key} of its inputs is {own}, but that of {other} is {expected}; the "
                    "files of all clients need the same columns"
                )
        return None

    def resume(self, infos: Mapping[str, ClientInfo]) -> None:
        """Continue a run with the clients that it began with."""
        self.infos, self._started = dict(infos), True

    def start(self) -> None:
        """Start the run: the clients that have joined get their numbers."""
        self._started = True
        if not self.names:
            self.names = tuple(canonical_names(set(self._nodes)))
        missing = [name for name in self.names if name not in self.infos]
        assert not missing, missing

    def federation(self, labels: tuple[str, ...] | None) -> Federation:
        """The clients as a federation without examples, which are elsewhere."""
        infos = [self.infos[name] for name in self.names]
        train, test = [i.train_examples for i in infos], [i.test_examples for i in infos]
        shape, dtype, features = infos[0].shape, infos[0].dtype, infos[0].features
        return Federation.remote(self.names, train, test, shape, dtype, labels, features)

    def connected(self) -> list[int]:
        """The numbers of the clients that are connected."""
        return [i for i, name in enumerate(self.names) if name in self._nodes]

    def send(self, kind: str, round: int, requests: Mapping[int, bytes]) -> dict[int, Reply]:
        """Send requests to clients, by their numbers; no reply in time is a failure."""
        clients = {self._nodes[self.names[i]]: i for i in requests}

        def on_reply(node: int, reply: Reply) -> None:
            fault = reply.reason if isinstance(reply, Failure) else ""
            self.statuses[self.names[clients[node]]].set("failed" if fault else "replied", fault)

        for i in requests:
            self.statuses[self.names[i]].set("working")
        by_node = {node: requests[i] for node, i in clients.items()}
        found = self._messenger.send(kind, f"{kind} {round}", by_node, self.timeout, on_reply)
        replies: dict[int, Reply] = {clients[node]: reply for node, reply in found.items()}
        for i in requests:
            if i not in replies:
                self.statuses[self.names[i]].set("late")
                replies[i] = Failure(f"no reply within {self.timeout:g} s")
        return replies

    def record_failure(self, client: int, failure: Failure) -> None:
        """After a failure: a client that does not know the experiment has to join again."""
        if UNKNOWN_EXPERIMENT in failure.reason:
            self._remove(self.names[client])

    def _remove(self, name: str) -> None:
        self._nodes.pop(name, None)
        if not self._started:
            self.infos.pop(name, None)  # it may come back with a corrected file
        self._refused.clear()  # one of them may have waited for this name
        self.statuses[name].set("away")
