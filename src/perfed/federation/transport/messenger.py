"""Requests to clients and their replies, over a Flower `Grid`: the only file that uses one.

Every request has a time to live: Flower drops late replies, and only replies to current requests
are pulled. A reply that Flower cannot read is a failure of that client only.
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
# How long one reply may hold up the others while it is pulled, in seconds.
_PULL_TIME: Final = 1.0
# Flower's message types of our requests.
TYPES: Final = {"join": "query", "train": "train", "evaluate": "evaluate"}


class LinkLostError(OSError):
    """The SuperLink does not respond anymore."""


@final
@dataclass(frozen=True)
class Failure:
    """Why there is no valid reply of a client; in one line, whoever wrote it."""

    reason: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "reason", one_line(self.reason))


Reply = bytes | Failure


class Node(NamedTuple):
    """A connected SuperNode.

    Attributes:
        id: its identifier in Flower.
        key: its public key.
    """

    id: int
    key: bytes


def record(blob: bytes) -> RecordDict:
    """A blob as a Flower record: a flat one, which is sent as a single object."""
    return RecordDict({_RECORD: ConfigRecord({_BLOB: blob})})


def blob_of(content: RecordDict) -> bytes:
    """The blob of a record; anything else raises `CodecError`."""
    own = content.get(_RECORD)
    if isinstance(own, ConfigRecord) and len(content) == len(own) == 1:
        blob = own.get(_BLOB)
        if isinstance(blob, bytes):
            return blob
    raise CodecError("not a perfed message")


@final
class Messenger:
    """Sends requests to nodes and waits for their replies."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid

    def nodes(self) -> list[Node]:
        """The connected nodes."""
        try:
            return [Node(node.node_id, node.public_key) for node in self._grid.get_nodes()]
        except httpx.HTTPError as error:
            raise _lost(error) from None

    def send(
        self,
        kind: str,
        group: str,
        requests: Mapping[int, bytes],
        timeout: float,
        on_reply: Callable[[int, Reply], None] = lambda *_: None,
    ) -> dict[int, Reply]:
        """Send each node its request, and wait for all replies or until the time is up.

        Args:
            kind: of the requests (`TYPES`).
            group: their name in Flower's log.
            requests: a blob for each node.
            timeout: seconds to wait.
            on_reply: called with each reply as it arrives.

        Returns:
            The replies in time, by node.
        """
        deadline = time.monotonic() + timeout
        replies: dict[int, Reply] = {}
        try:
            waiting = self._push(kind, group, requests, timeout)
        except httpx.HTTPError as error:
            raise _lost(error) from None
        for node in set(requests) - set(waiting.values()):
            replies[node] = Failure("Flower did not accept the message to it")
        pulls: dict[str, _Pull] = {}
        while waiting and time.monotonic() < deadline:
            start = time.monotonic()
            for name, node in list(waiting.items()):
                pull = pulls.pop(name, None) or _Pull(self._grid, name, deadline)
                if pull.is_running:
                    pulls[name] = pull
                elif (reply := pull.reply()) is not None:
                    del waiting[name]
                    replies[node] = reply
                    on_reply(node, reply)
            # At most half of the time: the SuperLink has to serve clients.
            pause = max(_PAUSE, time.monotonic() - start)
            time.sleep(max(0.0, min(pause, deadline - time.monotonic())) if waiting else 0)
        return replies

    def _push(
        self, kind: str, group: str, requests: Mapping[int, bytes], timeout: float
    ) -> dict[str, int]:
        """Give the requests to Flower; the node of each message."""
        messages = {
            node: Message(record(blob), node, TYPES[kind], ttl=timeout, group_id=group)
            for node, blob in requests.items()
        }
        waiting = {}
        for node, message in messages.items():
            for name in self._grid.push_messages([message]):
                if name:
                    waiting[name] = node
        return waiting


@final
class _Pull:
    """Pulls the reply to one request, in a thread of its own.

    One request at a time: the sender of a reply, and the request that it names, are only claims of
    the client. In a thread: a client can announce parts of a reply and never send them, for which
    Flower waits for minutes.
    """

    def __init__(self, grid: Grid, name: str, deadline: float) -> None:
        self._grid, self._name = grid, name
        self._reply: Reply | None = None
        self._error: httpx.HTTPError | None = None
        self._thread = threading.Thread(target=self._run, name=f"reply to {name}", daemon=True)
        self._thread.start()
        self._thread.join(max(0.0, min(_PULL_TIME, deadline - time.monotonic())))

    @property
    def is_running(self) -> bool:
        """Whether it is still in progress."""
        return self._thread.is_alive()

    def reply(self) -> Reply | None:
        """The reply; None: there is none yet."""
        if self._error is not None:
            raise _lost(self._error)
        return self._reply

    def _run(self) -> None:
        try:
            for reply in self._grid.pull_messages([self._name]):
                # Not by the sender: the SuperLink itself reports a lost node.
                if reply.metadata.reply_to_message_id == self._name:
                    self._reply = _content(reply)
        except httpx.HTTPStatusError as error:
            self._reply = Failure(f"Flower has no reply of it: {error}")
        except httpx.HTTPError as error:
            self._error = error
        except Exception as error:  # any error of Flower on a client's bytes
            self._reply = Failure(f"Flower cannot read its reply: {type(error).__name__}: {error}")


def _content(reply: Message) -> Reply:
    if reply.has_error():
        return Failure(str(reply.error.reason).strip() or f"Flower's error {reply.error.code}")
    try:
        return blob_of(reply.content)
    except CodecError as error:
        return Failure(str(error))


def _lost(error: httpx.HTTPError) -> LinkLostError:
    return LinkLostError(f"the SuperLink does not respond anymore: {error}")
