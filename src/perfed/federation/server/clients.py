"""The clients of a federation as the server knows them: who is there, what they have told."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, Final, final

from perfed.data import Federation
from perfed.data.files import canonical_names
from perfed.federation.protocol.errors import UNKNOWN_EXPERIMENT
from perfed.federation.protocol.framing import pack
from perfed.federation.protocol.messages import ClientInfo, JoinRequest
from perfed.federation.server.checks import read_client_info
from perfed.federation.transport.messenger import Answer, Failure, LinkLostError, Messenger

Log = Callable[[str], None]

_PAUSE: Final = 0.5
# How long everyone waits for one who has just come, and again for one who was refused, in seconds.
_COURTESY: Final = 5.0
_AGAIN: Final = 60.0
# After a restart, a server's or their own, clients come back within a minute, by Flower's own pace.
RETURN: Final = 90.0


@final
@dataclass
class ClientStatus:
    """What is known of one client at this moment; for whoever watches.

    Attributes:
        activity: `away`, `here`, `asked`, `answered`, `late` or `refused`.
        since: when that began, on the monotonic clock.
        rounds: how many of its answers have counted.
        uplink_bytes: how long its changes were, those that counted.
        downlink_bytes: how long the models it was sent to train on were.
        fault: why its last answer did not count, if it did not.
    """

    activity: str = "away"
    since: float = field(default_factory=time.monotonic)
    rounds: int = 0
    uplink_bytes: int = 0
    downlink_bytes: int = 0
    fault: str = ""

    def now(self, activity: str, fault: str = "") -> None:
        """What it does from now on."""
        if activity != self.activity:
            self.activity, self.since = activity, time.monotonic()
        self.fault = fault


@final
@dataclass(frozen=True, eq=False)
class _Joining:
    """A client has come and has been asked who it is; by its key, it has this name."""

    name: str


@final
class ClientManager:
    """Greets clients as they come, and asks those that are there.

    One who does not answer a joining holds up the others for a moment only: it is heard later.

    Args:
        conversation: how they are asked.
        experiment: the experiment's name.
        config: what is trained (`client_config`).
        names: who they are, in the order of their numbers; None: whoever comes first, by names of
            their own.
        keys: everyone's public key; None: there are no keys.
        timeout: how long an answer may take, in seconds.
        log: told what an operator should know.
    """

    def __init__(
        self,
        conversation: Messenger,
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
        self._begun = False
        self.statuses = {name: ClientStatus() for name in self.names}
        self._conversation, self._config = conversation, config
        self._by_key = None if keys is None else {key: name for name, key in keys.items()}
        self._at: dict[str, int] = {}  # the node of everyone who is here and has been greeted
        self._joining: dict[int, _Joining] = {}  # nodes that have not answered yet
        self._answers: SimpleQueue[tuple[int, _Joining, Answer | None]] = SimpleQueue()
        self._refused: dict[int, float] = {}  # until when
        self._complaints: dict[int, str] = {}  # what was last said of a node that is left out

    def gather(self, wanted: int, everyone: float | None = None) -> None:
        """Wait for so many clients; and for some seconds more for everyone, if that is said.

        Without `everyone` it waits for as long as it takes.
        """
        begun, said = time.monotonic(), ""
        while True:
            self.look()
            missing = [name for name in self.names if name not in self._at]
            here = len(self._at)
            waited = everyone is None or time.monotonic() - begun > everyone
            if here >= wanted and (waited or not missing):
                return
            line = f"waiting for clients: {here} of {max(wanted, len(self.names))} are here"
            if missing:
                line += f"; not yet {', '.join(missing[:10])}"
            if line != said:
                self.log(line)
                said = line
            time.sleep(_PAUSE)

    def look(self) -> None:
        """See who is connected, greet those who are new, and wait a moment for their answers."""
        nodes = {node.id: node for node in self._conversation.nodes()}
        for gone in [name for name, id in self._at.items() if id not in nodes]:
            self._leave(gone)
            self.log(f"{gone} is away")
        for known in (self._joining, self._refused, self._complaints):
            for id in [id for id in known if id not in nodes]:
                del known[id]
        self._read_answers()
        now = time.monotonic()
        self._refused = {id: until for id, until in self._refused.items() if until > now}
        met = {*self._at.values(), *self._joining, *self._refused}
        requests = {}
        for id in [id for id in nodes if id not in met]:
            name = "" if self._by_key is None else self._by_key.get(nodes[id].key)
            if name is None:
                self._refuse(id, f"node {id}", "its key is not on the list")
                continue
            self._joining[id] = _Joining(name)
            request = JoinRequest(experiment=self.experiment, config=self._config, name=name)
            requests[id] = pack(request)
        if requests:
            new = {id: self._joining[id] for id in requests}
            Thread(target=self._ask_to_join, args=(requests, new), daemon=True).start()
            while not new.keys().isdisjoint(self._joining) and time.monotonic() - now < _COURTESY:
                time.sleep(_PAUSE / 10)
                self._read_answers()

    def _ask_to_join(self, requests: dict[int, bytes], new: Mapping[int, _Joining]) -> None:
        """In a thread of its own: put answers aside until they are heard."""
        told: set[int] = set()

        def on_answer(node: int, answer: Answer) -> None:
            told.add(node)
            self._answers.put((node, new[node], answer))

        found: dict[int, Answer] = {}
        with suppress(LinkLostError, RuntimeError):  # the rounds meet with it, too, or are over
            found = self._conversation.ask("join", "join", requests, self.timeout, on_answer)
        for node in new.keys() - told:
            self._answers.put((node, new[node], found.get(node)))

    def _read_answers(self) -> None:
        """What has been answered to joinings; of nodes that have left since, nothing."""
        while True:
            try:
                node, joining, answer = self._answers.get_nowait()
            except Empty:
                return
            if self._joining.get(node) is not joining:
                continue
            del self._joining[node]
            if answer is None:
                who = joining.name or f"node {node}"
                late = f"no answer to a joining within {self.timeout:g} s; it is greeted again"
                self._complain(node, f"{who} is not here: {late}")
            else:
                self._joined(node, joining.name, answer)

    def _joined(self, node: int, name: str, answer: Answer) -> None:
        info = read_client_info(answer, self.experiment)
        failure = info if isinstance(info, Failure) else self._unfit(name or info.name, info)
        if failure is not None:
            who = name or (info.name if isinstance(info, ClientInfo) else f"node {node}")
            self._refuse(node, who, failure.reason)
            return
        assert isinstance(info, ClientInfo)
        name = name or info.name
        self.infos[name] = info
        self._at[name] = node
        self._complaints.pop(node, None)
        self.statuses.setdefault(name, ClientStatus()).now("here")
        self.log(
            f"{name} is here, with {info.train_examples} training and {info.test_examples} test "
            "examples"
        )

    def _refuse(self, node: int, who: str, reason: str) -> None:
        """Leave a node out, for a while: what is wrong with it may be put right."""
        self._refused[node] = time.monotonic() + _AGAIN
        self._complain(node, f"{who} cannot take part: {reason}")
        if who in self.statuses and who not in self._at:
            self.statuses[who].now("refused", reason)

    def _complain(self, node: int, line: str) -> None:
        """Say what is wrong with a node, once."""
        if self._complaints.get(node) != line:
            self._complaints[node] = line
            self.log(line)

    def _unfit(self, name: str, info: ClientInfo) -> Failure | None:
        """Why a client cannot take part, if it cannot."""
        if not name:
            return Failure("it has neither a key nor a name; give it one by --name")
        if name in self._at:
            return Failure(f"there is a client {name} already")
        if self.names and name not in self.names:
            return Failure("it is none of this run's clients")
        if name in self.infos and self.infos[name] != info:
            return Failure("its data are not those it had when the run began")
        other, first = next(iter(self.infos.items()), (name, info))
        for what in ("shape", "dtype", "features"):
            here, there = getattr(info, what), getattr(first, what)
            if here != there:
                return Failure(
                    f"the {what} of its inputs is {here}, but {there} for {other}; clients' files "
                    "must be alike"
                )
        return None

    def resume(self, infos: Mapping[str, ClientInfo]) -> None:
        """The run has begun before, with those who told this."""
        self.infos, self._begun = dict(infos), True

    def begin(self) -> None:
        """The run begins with those who are here: they have their numbers from now on."""
        self._begun = True
        if not self.names:
            self.names = tuple(canonical_names(set(self._at)))
        missing = [name for name in self.names if name not in self.infos]
        assert not missing, missing

    def federation(self, labels: tuple[str, ...] | None) -> Federation:
        """What clients have told, as a federation whose examples are elsewhere."""
        first = self.infos[self.names[0]]
        train, test = ([getattr(self.infos[n], part) for n in self.names] for part in _PARTS)
        return Federation.remote(
            self.names, train, test, first.shape, first.dtype, labels, first.features
        )

    def here(self) -> list[int]:
        """The numbers of those who are here."""
        return [i for i, name in enumerate(self.names) if name in self._at]

    def ask(self, kind: str, round: int, questions: Mapping[int, bytes]) -> dict[int, Answer]:
        """Ask clients, by their numbers; those that do not answer in time are told of as late."""
        names = {self._at[self.names[i]]: i for i in questions}

        def on_answer(node: int, answer: Answer) -> None:
            fault = answer.reason if isinstance(answer, Failure) else ""
            self.statuses[self.names[names[node]]].now("refused" if fault else "answered", fault)

        for i in questions:
            self.statuses[self.names[i]].now("asked")
        asked = {node: questions[i] for node, i in names.items()}
        found = self._conversation.ask(kind, f"{kind} {round}", asked, self.timeout, on_answer)
        answers: dict[int, Answer] = {names[node]: answer for node, answer in found.items()}
        for i in questions:
            if i not in answers:
                self.statuses[self.names[i]].now("late")
                answers[i] = Failure(f"no answer within {self.timeout:g} s")
        return answers

    def forget(self, client: int, failure: Failure) -> None:
        """After a fault: one that has to be told of the experiment first is greeted anew."""
        if UNKNOWN_EXPERIMENT in failure.reason:
            self._leave(self.names[client])

    def _leave(self, name: str) -> None:
        self._at.pop(name, None)
        if not self._begun:
            self.infos.pop(name, None)  # it may come back with a file that was put right
        self._refused.clear()  # one of them may have waited for this name
        self.statuses[name].now("away")


_PARTS: Final = ("train_examples", "test_examples")
