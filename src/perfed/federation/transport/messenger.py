"""Questions to clients and their answers, over a Flower `Grid`: the only file that talks over one.

Every question has a time to live, after which neither the client nor the server hears more of it:
a late answer is dropped by Flower, and answers to anything but the questions at hand are not asked
for. What Flower itself cannot make sense of in an answer is that client's fault, and costs no other
client its turn.
"""

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple, final

import httpx
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from perfed.core.errors import CodecError
from perfed.federation.protocol.framing import one_line

_RECORD: Final = "perfed"
_BLOB: Final = "blob"
_PAUSE: Final = 0.2
# Others are asked after when an answer takes longer than this to come in.
_TURN: Final = 1.0
# Flower's message types of our questions.
TYPES: Final = {"join": "query", "train": "train", "evaluate": "evaluate"}


class LinkLostError(OSError):
    """The SuperLink does not answer any more."""


@final
@dataclass(frozen=True)
class Failure:
    """Why a client's answer does not count; in one line, whoever has worded it."""

    reason: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "reason", one_line(self.reason))


Answer = bytes | Failure


class Node(NamedTuple):
    """A SuperNode that is connected.

    Attributes:
        id: its number for Flower.
        key: its public key.
    """

    id: int
    key: bytes


def record(blob: bytes) -> RecordDict:
    """A blob as Flower carries it: one flat record, so that it is one object on the wire."""
    return RecordDict({_RECORD: ConfigRecord({_BLOB: blob})})


def blob_of(content: RecordDict) -> bytes:
    """The blob of a record; anything else raises `CodecError`."""
    found = content.get(_RECORD)
    if not isinstance(found, ConfigRecord) or len(content) != 1 or len(found) != 1:
        raise CodecError("this is not a message of perfed")
    blob = found.get(_BLOB)
    if not isinstance(blob, bytes):
        raise CodecError("this is not a message of perfed")
    return blob


@final
class Messenger:
    """Asks nodes and waits for their answers."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid

    def nodes(self) -> list[Node]:
        """Who is connected."""
        try:
            return [Node(node.node_id, node.public_key) for node in self._grid.get_nodes()]
        except httpx.HTTPError as error:
            raise _lost(error) from None

    def ask(
        self,
        kind: str,
        group: str,
        questions: Mapping[int, bytes],
        timeout: float,
        on_answer: Callable[[int, Answer], None] = lambda *_: None,
    ) -> dict[int, Answer]:
        """Ask nodes, each its own question, and wait until all have answered or time is up.

        Args:
            kind: of the questions (`TYPES`).
            group: what Flower's log calls them.
            questions: a blob for each node.
            timeout: seconds to wait.
            on_answer: told of each answer as it comes.

        Returns:
            The answers that came. A node that is not among them has not answered in time.
        """
        deadline = time.monotonic() + timeout
        answers: dict[int, Answer] = {}
        try:
            waiting = self._push(kind, group, questions, timeout)
        except httpx.HTTPError as error:
            raise _lost(error) from None
        for node in set(questions) - set(waiting.values()):
            answers[node] = Failure("Flower would not take the message for it")
        coming: dict[str, _Pull] = {}
        while waiting and time.monotonic() < deadline:
            begun = time.monotonic()
            for name, node in list(waiting.items()):
                pull = coming.pop(name, None) or _Pull(self._grid, name, deadline)
                if pull.going:
                    coming[name] = pull
                elif (answer := pull.answer()) is not None:
                    del waiting[name]
                    answers[node] = answer
                    on_answer(node, answer)
            # Half of the time at most: the SuperLink has clients to serve.
            pause = max(_PAUSE, time.monotonic() - begun)
            time.sleep(max(0.0, min(pause, deadline - time.monotonic())) if waiting else 0)
        return answers

    def _push(
        self, kind: str, group: str, questions: Mapping[int, bytes], timeout: float
    ) -> dict[str, int]:
        """Hand the questions to Flower; which node each message is for."""
        messages = {
            node: Message(record(blob), node, TYPES[kind], ttl=timeout, group_id=group)
            for node, blob in questions.items()
        }
        waiting = {}
        for node, message in messages.items():
            for name in self._grid.push_messages([message]):
                if name:
                    waiting[name] = node
        return waiting


@final
class _Pull:
    """Asks Flower once for the answer to one question, without letting it hold up others.

    One question at a time, by its own name: what comes with an answer, its sender and the question
    that it says it is to, is the client's word. Apart from the others, as the parts of an answer
    may be announced and never sent, for which Flower waits for minutes.
    """

    def __init__(self, grid: Grid, name: str, deadline: float) -> None:
        self._grid, self._name = grid, name
        self._found: Answer | None = None
        self._error: httpx.HTTPError | None = None
        self._thread = threading.Thread(target=self._run, name=f"answer to {name}", daemon=True)
        self._thread.start()
        self._thread.join(max(0.0, min(_TURN, deadline - time.monotonic())))

    @property
    def going(self) -> bool:
        """Whether it is still under way."""
        return self._thread.is_alive()

    def answer(self) -> Answer | None:
        """What it has found; None: there is no answer yet."""
        if self._error is not None:
            raise _lost(self._error)
        return self._found

    def _run(self) -> None:
        try:
            for reply in self._grid.pull_messages([self._name]):
                # By the question, not by the sender: of a lost node the SuperLink itself tells.
                if reply.metadata.reply_to_message_id == self._name:
                    self._found = _answer(reply)
        except httpx.HTTPStatusError as error:
            self._found = Failure(f"Flower has no answer of it: {error}")
        except httpx.HTTPError as error:
            self._error = error
        except Exception as error:  # whatever comes of a client's bytes in Flower's code
            self._found = Failure(f"Flower cannot read its answer: {type(error).__name__}: {error}")


def _answer(reply: Message) -> Answer:
    if reply.has_error():
        return Failure(str(reply.error.reason).strip() or f"Flower's error {reply.error.code}")
    try:
        return blob_of(reply.content)
    except CodecError as error:
        return Failure(str(error))


def _lost(error: httpx.HTTPError) -> LinkLostError:
    return LinkLostError(f"the SuperLink does not answer any more: {error}")
