"""The clients' port: the only part of the server that clients can reach.

Flower's SuperLink serves clients, operators and its own runtime on one port, and asks only clients
for a key: whoever reaches it can send code to all clients, or register a key. So it listens on
loopback, and this gateway in front of it forwards Flower's Fleet API and nothing else.
"""

import asyncio
import socket
import ssl
import threading
import time
from collections.abc import AsyncIterator, Iterable
from http import HTTPStatus
from http.client import responses
from pathlib import Path
from types import TracebackType
from typing import Final, Self, final

import httpx
import uvicorn
from flwr.proto.fleet_pb2 import PushMessagesRequest
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from starlette.types import Receive, Scope, Send

from perfed.core.errors import ConfigError
from perfed.federation.transport.flower_runtime import is_signed
from perfed.federation.transport.keys import ServerKeys

# Flower's Fleet API: all that a SuperNode calls.
FLEET: Final = frozenset(
    {
        "activate-node", "confirm-message-received", "deactivate-node", "get-fab", "get-run",
        "pull-messages", "pull-object", "push-messages", "push-object", "register-node",
        "send-node-heartbeat", "unregister-node",
    }
)  # fmt: skip
# Clients with keys do not register themselves.
KEYLESS: Final = frozenset({"register-node", "unregister-node"})
# A SuperLink accepts any pushed message: also a request in the server's name, or a reply in that of
# another client.
_PUSH: Final = b"/v1/fleet/push-messages"
_PUSH_OBJECT: Final = b"/v1/fleet/push-object"
# The SuperLink reads a body before it checks the signature, so long ones are not forwarded: a push
# has names only, as the contents of messages are pushed as objects, and the rest is a few numbers.
_MAX_PUSH: Final = 1 << 20
_MAX_BODY: Final = 1 << 16
# The headers that the Fleet API reads, and those that a SuperNode reads.
REQUEST_HEADERS: Final = frozenset(
    {
        b"accept", b"content-type", b"flwr-component-name", b"flwr-package-name",
        b"flwr-package-version", b"flwr-public-key", b"flwr-signature", b"flwr-timestamp",
    }
)  # fmt: skip
RESPONSE_HEADERS: Final = frozenset(
    {b"content-length", b"content-type", b"flwr-version-incompatibility-message"}
)

# A SuperNode waits 30 seconds for a response.
_TIMEOUT: Final = httpx.Timeout(60, connect=5, pool=None)
# Each server closes an idle connection later than its callers do (SuperNodes after 5 seconds; this
# gateway after 2, a SuperLink after 5), so that no call uses a connection that is being closed.
_CLIENTS_KEEP_ALIVE: Final = 30
_OWN_KEEP_ALIVE: Final = 2.0
# Calls under way may finish within this when the port is closed.
_GRACE: Final = 2

_Headers = Iterable[tuple[bytes, bytes]]


class _TooLongError(RuntimeError):
    """The body of a request is too long."""


class _GoneError(RuntimeError):
    """The client disconnected before its request was complete."""


@final
class ClientGateway:
    """A port that forwards clients' calls to a SuperLink; open within `with`.

    Attributes:
        host: the address it is bound to.
        port: its number; for 0, the one it got when it was opened.
    """

    def __init__(
        self,
        host: str,
        port: int,
        upstream: str,
        keys: ServerKeys | None,
        limit: int = 2**31 - 1,
    ) -> None:
        """Set up; nothing is opened yet.

        Args:
            host: the address to bind.
            port: its port; 0: any free one.
            upstream: the SuperLink's address, `https://HOST:PORT`; without keys, `http`.
            keys: the server's, and those of the clients that may push messages; None: plain HTTP
                both ways, and clients register themselves.
            limit: the maximum length of the body of a request, in bytes.
        """
        self.host, self.port = host, port
        self._admitted = frozenset(() if keys is None else keys.clients.values())
        self._limits = {_PUSH: min(limit, _MAX_PUSH), _PUSH_OBJECT: limit}
        self._limit = min(limit, _MAX_BODY)
        # Only the gateway's own thread changes them, so others can read them at any time.
        self._received = self._sent = 0
        self._tls = None if keys is None else _server_tls(keys.certificate, keys.key)
        self._upstream_tls = None if keys is None else _client_tls(keys.authority)
        scheme, names = ("http", FLEET) if self._tls is None else ("https", FLEET - KEYLESS)
        base = _base(upstream, scheme)
        # Targets are looked up byte for byte, and never become part of an address.
        self._addresses = {
            f"/v1/fleet/{name}".encode(): base.copy_with(path=f"/v1/fleet/{name}") for name in names
        }

    @property
    def received(self) -> int:
        """The bytes of all requests so far, headers and bodies, before TLS."""
        return self._received

    @property
    def sent(self) -> int:
        """The bytes of all responses so far, likewise."""
        return self._sent

    def __enter__(self) -> Self:
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        try:
            listening = socket.create_server((self.host, self.port), family=family)
        except (OSError, OverflowError) as error:
            # An address may appear later, and a port become free; a permission does not.
            fixed = isinstance(error, OverflowError | PermissionError)
            raise (ConfigError if fixed else OSError)(
                f"{self.host}:{self.port}: cannot listen there ({error}); give an address of this "
                "machine and a free port"
            ) from None
        self.port = listening.getsockname()[1]
        tls = self._tls
        self._server = uvicorn.Server(
            uvicorn.Config(
                self._respond,
                interface="asgi3",
                # It leaves targets as they are, and limits the length of headers.
                http="h11",
                ws="none",
                lifespan="off",
                ssl_context_factory=None if tls is None else lambda *_: tls,
                proxy_headers=False,
                server_header=False,
                date_header=False,
                access_log=False,
                log_config=None,
                log_level="critical",
                timeout_keep_alive=_CLIENTS_KEEP_ALIVE,
                timeout_graceful_shutdown=_GRACE,
            )
        )
        # Outside the main thread uvicorn leaves signals alone.
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._serve(listening)), name="clients' port", daemon=True
        )
        self._thread.start()
        while not self._server.started:
            if not self._thread.is_alive():
                listening.close()
                raise OSError(f"{self.host}:{self.port}: the gateway did not start")
            time.sleep(0.01)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._server.should_exit = True
        self._thread.join(_GRACE + 10)

    async def _serve(self, listening: socket.socket) -> None:
        # A transport, not a client, which would follow redirects, add headers and log each call.
        self._upstream = httpx.AsyncHTTPTransport(
            verify=self._upstream_tls or True,
            trust_env=False,
            limits=httpx.Limits(
                max_connections=None,
                max_keepalive_connections=None,
                keepalive_expiry=_OWN_KEEP_ALIVE,
            ),
        )
        async with self._upstream:
            await self._server.serve([listening])

    async def _respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Respond to one request."""
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        query = b"?" + scope["query_string"] if scope["query_string"] else b""
        target = scope["raw_path"] + query
        self._received += len(f"{scope['method']}  HTTP/1.1\r\n") + len(target) + _size(headers)
        address = self._addresses.get(target)
        if scope["type"] != "http" or scope["method"] != "POST" or address is None:
            await self._reply(send, HTTPStatus.NOT_FOUND)
            return
        lengths = [value for name, value in headers if name == b"content-length"]
        chunked = any(name == b"transfer-encoding" for name, _ in headers)
        if chunked and lengths:
            # Its end is ambiguous, and so is the start of the next request: close the connection.
            await self._reply(send, HTTPStatus.BAD_REQUEST, (b"connection", b"close"))
            return
        pushes = target in self._limits
        if pushes and self._tls is not None and not is_signed(headers, self._admitted):
            await self._reply(send, HTTPStatus.UNAUTHORIZED)
            return
        length, limit = int(lengths[0]) if lengths else 0, self._limits.get(target, self._limit)
        if length > limit:
            await self._reply(send, HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
            return
        body = self._body(receive, limit)
        content: AsyncIterator[bytes] | bytes = body
        if target == _PUSH:
            try:
                content = b"".join([piece async for piece in body])
            except _TooLongError:
                await self._reply(send, HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
                return
            except _GoneError:
                return
            if not _is_own_replies(content):
                await self._reply(send, HTTPStatus.FORBIDDEN)
                return
            chunked, length = False, len(content)
        passed = [(name, value) for name, value in headers if name in REQUEST_HEADERS]
        if not chunked:
            passed.append((b"content-length", str(length).encode()))
        request = httpx.Request(
            "POST",
            address,
            headers=passed,
            content=content,
            extensions={"timeout": _TIMEOUT.as_dict()},
        )
        try:
            response = await self._upstream.handle_async_request(request)
        except _TooLongError:
            await self._reply(send, HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
        except _GoneError:
            return
        except (httpx.TransportError, asyncio.CancelledError):
            # SuperNodes retry on this; canceled: the gateway is being closed.
            await self._reply(send, HTTPStatus.SERVICE_UNAVAILABLE)
        else:
            await self._forward(response, send)

    async def _body(self, receive: Receive, limit: int) -> AsyncIterator[bytes]:
        """The body of a request, piece by piece as it arrives."""
        length = 0
        while True:
            message = await receive()
            if message["type"] != "http.request":
                # Ending normally would make a complete message of a part.
                raise _GoneError
            piece: bytes = message["body"]
            length += len(piece)
            self._received += len(piece)
            if length > limit:
                raise _TooLongError
            yield piece
            if not message["more_body"]:
                return

    async def _forward(self, response: httpx.Response, send: Send) -> None:
        """Send the SuperLink's response to the client, piece by piece as it arrives."""
        raw = ((name.lower(), value) for name, value in response.headers.raw)
        passed = [(name, value) for name, value in raw if name in RESPONSE_HEADERS]
        try:
            await self._begin(send, response.status_code, passed)
            async for piece in response.aiter_raw():
                await self._continue(send, piece, more=True)
        except httpx.TransportError:
            return  # incomplete: the connection is closed, and the client retries
        finally:
            await response.aclose()
        await self._continue(send, b"", more=False)

    async def _reply(self, send: Send, status: HTTPStatus, *headers: tuple[bytes, bytes]) -> None:
        """Send a response without a body."""
        await self._begin(send, status, [(b"content-length", b"0"), *headers])
        await self._continue(send, b"", more=False)

    async def _begin(self, send: Send, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        # Counted first, so that a response that has arrived is counted.
        self._sent += len(f"HTTP/1.1 {status} {responses.get(status, '')}\r\n") + _size(headers)
        await send({"type": "http.response.start", "status": status, "headers": headers})

    async def _continue(self, send: Send, piece: bytes, more: bool) -> None:
        self._sent += len(piece)
        await send({"type": "http.response.body", "body": piece, "more_body": more})


def _is_own_replies(body: bytes) -> bool:
    """Whether all pushed messages are replies of the client itself.

    The SuperLink checks that the key of `node` signed the request, and that a reply comes from the
    node to which its request went; but not that these two nodes are the same.
    """
    try:
        request = PushMessagesRequest.FromString(body)
    except DecodeError:
        return False
    found = [message.metadata for message in request.messages_list]
    return all(m.src_node_id == request.node.node_id and m.reply_to_message_id for m in found)


def _size(headers: _Headers) -> int:
    """The bytes of headers, with the empty line after them."""
    return sum(len(name) + len(value) + len(": \r\n") for name, value in headers) + len("\r\n")


def _base(address: str, scheme: str) -> httpx.URL:
    """The address of a SuperLink, checked."""
    try:
        base = httpx.URL(address)
        rest = base.path.removeprefix("/").encode() + base.query + base.userinfo
        good = base.scheme == scheme and base.host and not rest
    except httpx.InvalidURL:
        good = False
    if not good:
        raise ConfigError(f"{address!r}: write the SuperLink's address as {scheme}://HOST:PORT")
    return base


def _server_tls(certificate: Path, key: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(certificate, key)
    except OSError as error:
        raise ConfigError(
            f"{certificate}, {key}: not a certificate and its key ({error}); create them with "
            "`perfed keys`"
        ) from None
    return context


def _client_tls(authority: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_verify_locations(authority)
    except OSError as error:
        raise ConfigError(
            f"{authority}: not the certificate of an authority ({error}); create it with "
            "`perfed keys`"
        ) from None
    return context
