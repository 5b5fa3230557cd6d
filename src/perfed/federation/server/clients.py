"""The clients of a federation as the server knows them: who is there, what they have told."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, Final, final

from perfed.data import Federation
from perfed.data.columns import named
from perfed.federation.client.client import UNKNOWN
from perfed.federation.protocol.messages import Hello, Introduction, packed
from perfed.federation.server.checks import read_introduction
from perfed.federation.transport.messenger import Answer, Conversation, Fault, LinkLostError

Say = Callable[[str], None]

_PAUSE: Final = 0.5
# How long everyone waits for one who has just come, and again for one who was refused, in seconds.
_COURTESY: Final = 5.0
_AGAIN: Final = 60.0
# After a restart, a server's or their own, clients come back within a minute, by Flower's own pace.
RETURN: Final = 90.0


@final
@dataclass
class Seat:
    """What is known of one client at this moment; for whoever watches.

    Attributes:
        doing: `away`, `here`, `asked`, `answered`, `late` or `refused`.
        since: when that began, on the monotonic clock.
        rounds: how many of its answers have counted.
        uplink_bytes: how long its changes were, those that counted.
        downlink_bytes: how long the models it was sent to train on were.
        fault: why its last answer did not count, if it did not.
    """

    doing: str = "away"
    since: float = field(default_factory=time.monotonic)
    rounds: int = 0
    uplink_bytes: int = 0
    downlink_bytes: int = 0
    fault: str = ""

    def now(self, doing: str, fault: str = "") -> None:
        """What it does from now on."""
        if doing != self.doing:
            self.doing, self.since = doing, time.monotonic()
        self.fault = fault


@final
@dataclass(frozen=True, eq=False)
class _Greeting:
    """A client has come and has been asked who it is; by its key, it has this name."""

    name: str


@final
class Clients:
    """Greets clients as they come, and asks those that are there.

    One who does not answer a greeting holds up the others for a moment only: it is heard later.

    Args:
        conversation: how they are asked.
        experiment: the experiment's name.
        config: what is trained (`without_terms`).
        names: who they are, in the order of their numbers; None: whoever comes first, by names of
            their own.
        keys: everyone's public key; None: there are no keys.
        timeout: how long an answer may take, in seconds.
        say: told what an operator should know.
    """

    def __init__(
        self,
        conversation: Conversation,
        experiment: str,
        config: dict[str, Any],
        names: Sequence[str] | None,
        keys: Mapping[str, bytes] | None,
        timeout: float,
        say: Say,
    ) -> None:
        self.experiment, self.timeout, self.say = experiment, timeout, say
        self.names: tuple[str, ...] = tuple(names or ())
        self.told: dict[str, Introduction] = {}
        self._begun = False
        self.seats = {name: Seat() for name in self.names}
        self._conversation, self._config = conversation, config
        self._by_key = None if keys is None else {key: name for name, key in keys.items()}
        self._at: dict[str, int] = {}  # the node of everyone who is here and has been greeted
        self._greeted: dict[int, _Greeting] = {}  # nodes that have not answered yet
        self._answers: SimpleQueue[tuple[int, _Greeting, Answer | None]] = SimpleQueue()
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
                self.say(line)
                said = line
            time.sleep(_PAUSE)

    def look(self) -> None:
        """See who is connected, greet those who are new, and wait a moment for their answers."""
        nodes = {node.id: node for node in self._conversation.nodes()}
        for gone in [name for name, id in self._at.items() if id not in nodes]:
            self._leave(gone)
            self.say(f"{gone} is away")
        for known in (self._greeted, self._refused, self._complaints):
            for id in [id for id in known if id not in nodes]:
                del known[id]
        self._hear()
        now = time.monotonic()
        self._refused = {id: until for id, until in self._refused.items() if until > now}
        met = {*self._at.values(), *self._greeted, *self._refused}
        hellos = {}
        for id in [id for id in nodes if id not in met]:
            name = "" if self._by_key is None else self._by_key.get(nodes[id].key)
            if name is None:
                self._refuse(id, f"node {id}", "its key is not on the list")
                continue
            self._greeted[id] = _Greeting(name)
            hello = Hello(experiment=self.experiment, config=self._config, name=name)
            hellos[id] = packed(hello)
        if hellos:
            new = {id: self._greeted[id] for id in hellos}
            Thread(target=self._ask_hello, args=(hellos, new), daemon=True).start()
            while not new.keys().isdisjoint(self._greeted) and time.monotonic() - now < _COURTESY:
                time.sleep(_PAUSE / 10)
                self._hear()

    def _ask_hello(self, hellos: dict[int, bytes], new: Mapping[int, _Greeting]) -> None:
        """In a thread of its own: put answers aside until they are heard."""
        told: set[int] = set()

        def on_answer(node: int, answer: Answer) -> None:
            told.add(node)
            self._answers.put((node, new[node], answer))

        found: dict[int, Answer] = {}
        with suppress(LinkLostError, RuntimeError):  # the rounds meet with it, too, or are over
            found = self._conversation.ask("hello", "hello", hellos, self.timeout, on_answer)
        for node in new.keys() - told:
            self._answers.put((node, new[node], found.get(node)))

    def _hear(self) -> None:
        """What has been answered to greetings; of nodes that have left since, nothing."""
        while True:
            try:
                node, greeting, answer = self._answers.get_nowait()
            except Empty:
                return
            if self._greeted.get(node) is not greeting:
                continue
            del self._greeted[node]
            if answer is None:
                who = greeting.name or f"node {node}"
                late = f"no answer to a greeting within {self.timeout:g} s; it is greeted again"
                self._complain(node, f"{who} is not here: {late}")
            else:
                self._greet(node, greeting.name, answer)

    def _greet(self, node: int, name: str, answer: Answer) -> None:
        told = read_introduction(answer, self.experiment)
        fault = told if isinstance(told, Fault) else self._unfit(name or told.name, told)
        if fault is not None:
            who = name or (told.name if isinstance(told, Introduction) else f"node {node}")
            self._refuse(node, who, fault.reason)
            return
        assert isinstance(told, Introduction)
        name = name or told.name
        self.told[name] = told
        self._at[name] = node
        self._complaints.pop(node, None)
        self.seats.setdefault(name, Seat()).now("here")
        self.say(f"{name} is here, with {told.train} examples to train on and {told.test} held out")

    def _refuse(self, node: int, who: str, reason: str) -> None:
        """Leave a node out, for a while: what is wrong with it may be put right."""
        self._refused[node] = time.monotonic() + _AGAIN
        self._complain(node, f"{who} cannot take part: {reason}")
        if who in self.seats and who not in self._at:
            self.seats[who].now("refused", reason)

    def _complain(self, node: int, line: str) -> None:
        """Say what is wrong with a node, once."""
        if self._complaints.get(node) != line:
            self._complaints[node] = line
            self.say(line)

    def _unfit(self, name: str, told: Introduction) -> Fault | None:
        """Why a client cannot take part, if it cannot."""
        if not name:
            return Fault("it has neither a key nor a name; give it one by --name")
        if name in self._at:
            return Fault(f"there is a client {name} already")
        if self.names and name not in self.names:
            return Fault("it is none of this run's clients")
        if name in self.told and self.told[name] != told:
            return Fault("its data are not those it had when the run began")
        other, first = next(iter(self.told.items()), (name, told))
        for what in ("shape", "dtype", "features"):
            here, there = getattr(told, what), getattr(first, what)
            if here != there:
                return Fault(
                    f"the {what} of its inputs is {here}, but {there} for {other}; clients' files "
                    "must be alike"
                )
        return None

    def take_up(self, told: Mapping[str, Introduction]) -> None:
        """The run has begun before, with those who told this."""
        self.told, self._begun = dict(told), True

    def settle(self) -> None:
        """The run begins with those who are here: they have their numbers from now on."""
        self._begun = True
        if not self.names:
            self.names = tuple(named(set(self._at)))
        missing = [name for name in self.names if name not in self.told]
        assert not missing, missing

    def federation(self, labels: tuple[str, ...] | None) -> Federation:
        """What clients have told, as a federation whose examples are elsewhere."""
        first = self.told[self.names[0]]
        train, test = ([getattr(self.told[n], part) for n in self.names] for part in _PARTS)
        return Federation.told(
            self.names, train, test, first.shape, first.dtype, labels, first.features
        )

    def here(self) -> list[int]:
        """The numbers of those who are here."""
        return [i for i, name in enumerate(self.names) if name in self._at]

    def ask(self, kind: str, round: int, questions: Mapping[int, bytes]) -> dict[int, Answer]:
        """Ask clients, by their numbers; those that do not answer in time are told of as late."""
        names = {self._at[self.names[i]]: i for i in questions}

        def on_answer(node: int, answer: Answer) -> None:
            fault = answer.reason if isinstance(answer, Fault) else ""
            self.seats[self.names[names[node]]].now("refused" if fault else "answered", fault)

        for i in questions:
            self.seats[self.names[i]].now("asked")
        asked = {node: questions[i] for node, i in names.items()}
        found = self._conversation.ask(kind, f"{kind} {round}", asked, self.timeout, on_answer)
        answers: dict[int, Answer] = {names[node]: answer for node, answer in found.items()}
        for i in questions:
            if i not in answers:
                self.seats[self.names[i]].now("late")
                answers[i] = Fault(f"no answer within {self.timeout:g} s")
        return answers

    def forget(self, client: int, fault: Fault) -> None:
        """After a fault: one that has to be told of the experiment first is greeted anew."""
        if UNKNOWN in fault.reason:
            self._leave(self.names[client])

    def _leave(self, name: str) -> None:
        self._at.pop(name, None)
        if not self._begun:
            self.told.pop(name, None)  # it may come back with a file that was put right
        self._refused.clear()  # one of them may have waited for this name
        self.seats[name].now("away")


_PARTS: Final = ("train", "test")
