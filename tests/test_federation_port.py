"""The clients' port: Flower's Fleet API passes, and nothing else does, whatever is tried."""

import gc
import hashlib
import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from http.client import HTTPResponse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Protocol

import pytest

pytest.importorskip("flwr")

import httpx
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from flwr.app import ConfigRecord, Message, MessageType, Metadata, RecordDict
from flwr.app.message import make_message, remove_content_from_message
from flwr.cli.build import build_fab_from_files
from flwr.common.constant import SUPERLINK_NODE_ID, TIMESTAMP_HEADER
from flwr.common.serde import message_to_proto
from flwr.proto.control_pb2 import (
    ListNodesRequest,
    ListNodesResponse,
    ListRunsRequest,
    RegisterNodeRequest,
    StartRunRequest,
    StartRunResponse,
)
from flwr.proto.fab_pb2 import Fab
from flwr.proto.fleet_pb2 import (
    ActivateNodeRequest,
    DeactivateNodeRequest,
    PullMessagesRequest,
    RegisterNodeFleetRequest,
)
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.log_pb2 import PushLogsRequest
from flwr.proto.message_pb2 import PullObjectRequest, PushObjectRequest
from flwr.proto.node_pb2 import Node
from flwr.proto.runtime_pb2 import (
    AcquireTaskRequest,
    AcquireTaskResponse,
    GetNodesRequest,
    PullAppMessagesRequest,
    PullTaskInputRequest,
    PushAppMessagesRequest,
    PushAppMessagesResponse,
)
from flwr.supercore import constant
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.interceptors.http import RuntimeVersionHttpInterceptor
from flwr.supercore.primitives.asymmetric import public_key_to_bytes, sign_message
from flwr.superlink.routers.fleet.router import router
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

from perfed.core.errors import ConfigError
from perfed.federation.transport import gateway as module
from perfed.federation.transport.gateway import ClientGateway
from perfed.federation.transport.keys import ServerKeys, make_keys

LOOPBACK = "127.0.0.1"
PROTOBUF = {"content-type": "application/protobuf"}
MB = 10**6


class Protobuf(Protocol):
    """Any of Flower's messages; their library comes without types."""

    def SerializeToString(self) -> bytes: ...  # noqa: N802


# What stands behind the port: a recorder, or a real SuperLink.


@dataclass
class Recorder:
    """An upstream that notes what it is asked, and answers as it is told."""

    port: int = 0
    asked: list[tuple[str, str, dict[str, str]]] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    pieces: list[int] = field(default_factory=list)
    answer: bytes = b"answer"
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    chunked: bool = False
    # Called before an answer, and after half of it.
    before: Callable[[], object] = lambda: None
    halfway: Callable[[], object] = lambda: None

    @property
    def address(self) -> str:
        return f"http://{LOOPBACK}:{self.port}"


@contextmanager
def recorder() -> Iterator[Recorder]:
    seen = Recorder()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        timeout = 0.5  # closes quiet connections early, as a SuperLink does after 5 seconds

        def handle_one_request(self) -> None:
            try:
                super().handle_one_request()
            except (OSError, ValueError):  # a body that breaks off
                self.close_connection = True

        def parse_request(self) -> bool:
            good = super().parse_request()
            headers = {name.lower(): value for name, value in self.headers.items()}
            seen.asked.append((self.command, self.path, headers))
            body = b"".join(self.pieces())
            seen.bodies.append(body)
            seen.before()
            self.send_response_only(seen.status)
            for name, value in seen.headers.items():
                self.send_header(name, value)
            half = len(seen.answer) // 2
            if seen.chunked:
                self.send_header("Transfer-Encoding", "chunked")
            else:
                self.send_header("Content-Length", str(len(seen.answer)))
            self.end_headers()
            self.write(seen.answer[:half])
            seen.halfway()
            self.write(seen.answer[half:])
            if seen.chunked:
                self.write(b"")
            return good and False  # answered here, whatever the method

        def write(self, piece: bytes) -> None:
            framed = b"%x\r\n%b\r\n" % (len(piece), piece)
            self.wfile.write(framed if seen.chunked else piece)

        def pieces(self) -> Iterator[bytes]:
            if "chunked" in self.headers.get("Transfer-Encoding", ""):
                while length := int(self.rfile.readline(), 16):
                    yield self.read(length)
                    self.rfile.readline()
                self.rfile.readline()
                return
            left = int(self.headers.get("Content-Length", 0))
            while left:
                piece = self.read(min(left, 65536))
                left -= len(piece)
                yield piece

        def read(self, length: int) -> bytes:
            piece = self.rfile.read(length)
            seen.pieces.append(len(piece))
            if len(piece) < length:
                raise ValueError("the body breaks off")
            return piece

        def log_message(self, format: str, *arguments: Any) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, request: Any, client_address: Any) -> None:
            pass

    with Server((LOOPBACK, 0), Handler) as server:
        seen.port = server.server_address[1]
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        yield seen
        server.shutdown()


@pytest.fixture
def upstream() -> Iterator[Recorder]:
    with recorder() as seen:
        yield seen


def plain(upstream: str, **options: Any) -> ClientGateway:
    return ClientGateway(LOOPBACK, 0, upstream, None, **options)


@pytest.fixture
def port(upstream: Recorder) -> Iterator[ClientGateway]:
    """A port without keys before the recorder."""
    with plain(upstream.address) as opened:
        yield opened


def url(port: ClientGateway, name: str = "activate-node") -> str:
    return f"http://{LOOPBACK}:{port.port}/v1/fleet/{name}"


def head(target: str, *headers: str, method: str = "POST") -> bytes:
    return "\r\n".join([f"{method} {target} HTTP/1.1", "Host: x", *headers, "", ""]).encode()


def answers(
    connection: socket.socket, count: int = 1, pause: float | None = None
) -> list[tuple[int, bytes]]:
    """The next answers on a connection; fewer if it ends, or falls silent after the first."""
    file = connection.makefile("rb")
    found: list[tuple[int, bytes]] = []
    for i in range(count):
        if i == 1 and pause is not None:
            connection.settimeout(pause)
        try:
            if not file.peek(1):
                break
        except OSError:
            break
        answer = HTTPResponse(_Reads(file))  # type: ignore[arg-type]
        answer.begin()
        found.append((answer.status, answer.read()))
    return found


@dataclass
class _Reads:
    """What `HTTPResponse` takes for a socket, without losing what it reads ahead."""

    file: Any

    def makefile(self, mode: str) -> Any:
        return _Unclosed(self.file)


@dataclass
class _Unclosed:
    file: Any

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)

    def close(self) -> None:
        pass


def raw(
    address: tuple[str, int], request: bytes, count: int = 1, pause: float | None = None
) -> list[tuple[int, bytes]]:
    """The answers to what is put on the wire as it is."""
    with socket.create_connection(address, 10) as connection:
        connection.sendall(request)
        return answers(connection, count, pause)


def free_port() -> int:
    with socket.create_server((LOOPBACK, 0)) as listening:
        return int(listening.getsockname()[1])


def wait_for(holds: Callable[[], object], seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.02)


@dataclass
class SuperLink:
    """A real one, with TLS and keys, and the port before it."""

    folder: Path
    port: int
    clients: ClientGateway
    operator: httpx.Client

    def direct(self, path: str, message: Protobuf, **headers: str) -> bytes:
        """What it answers the operator at its own port, which must be a success."""
        answer = self.operator.post(
            f"https://{LOOPBACK}:{self.port}{path}",
            content=message.SerializeToString(),
            headers=PROTOBUF | {name.replace("_", "-"): value for name, value in headers.items()},
        )
        assert answer.status_code == 200, (path, answer.text)
        return answer.content

    def through(self, path: str, message: Protobuf, **headers: str) -> httpx.Response:
        """What the clients' port answers to the same."""
        return self.operator.post(
            f"https://{LOOPBACK}:{self.clients.port}{path}",
            content=message.SerializeToString(),
            headers=PROTOBUF | {name.replace("_", "-"): value for name, value in headers.items()},
        )

    def nodes(self) -> dict[int, str]:
        answer = ListNodesResponse.FromString(
            self.direct("/v1/control/list-nodes", ListNodesRequest())
        )
        return {node.node_id: node.status for node in answer.nodes_info}

    def runs(self) -> bytes:
        """All there is to know of runs; what differs from call to call is the time."""
        return self.direct("/v1/control/list-runs", ListRunsRequest())[:-34]

    def fleet(self, key: ec.EllipticCurvePrivateKey) -> FleetHttpClient:
        """What a SuperNode calls by, with this key, at the clients' port."""
        return FleetHttpClient.from_server_address(
            f"{LOOPBACK}:{self.clients.port}",
            insecure=False,
            root_certificates=str(self.folder / "clients" / "a" / "ca.crt"),
            interceptors=[
                RuntimeVersionHttpInterceptor(component_name="SuperNode"),
                NodeAuthHttpInterceptor(key, key.public_key()),
            ],
        )

    def raw(self, port: int, request: bytes, count: int = 1) -> list[tuple[int, bytes]]:
        context = ssl.create_default_context(cafile=self.folder / "ca.crt")
        with (
            socket.create_connection((LOOPBACK, port), 10) as connection,
            context.wrap_socket(connection, server_hostname=LOOPBACK) as secure,
        ):
            secure.sendall(request)
            return answers(secure, count)


def flower(name: str, home: Path, *arguments: str) -> subprocess.Popen[bytes]:
    environment = os.environ | {
        "FLWR_HOME": str(home), "FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1",
    }  # fmt: skip
    with (home / f"{name}.log").open("ab") as log:
        return subprocess.Popen(
            [str(Path(sys.executable).with_name(name)), *arguments],
            env=environment, stdout=log, stderr=subprocess.STDOUT, cwd=home,
        )  # fmt: skip


def stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def listens(port: int) -> bool:
    try:
        socket.create_connection((LOOPBACK, port), 1).close()
    except OSError:
        return False
    return True


@pytest.fixture(scope="module")
def superlink(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SuperLink]:
    home = tmp_path_factory.mktemp("superlink")
    folder, own = home / "keys", free_port()
    make_keys(folder, [], ["a", "b"])
    keys = ServerKeys.read(folder / "server")
    process = flower(
        "flower-superlink", home, "--host", LOOPBACK, "--port", str(own),
        "--ssl-certfile", str(keys.certificate), "--ssl-keyfile", str(keys.key),
        "--ssl-ca-certfile", str(keys.authority), "--enable-supernode-auth",
        "--isolation", "process", "--disable-runtime-dependency-installation",
    )  # fmt: skip
    try:
        wait_for(lambda: listens(own) or process.poll() is not None, 60)
        assert process.poll() is None, (home / "flower-superlink.log").read_text()
        context = ssl.create_default_context(cafile=folder / "ca.crt")
        with (
            httpx.Client(verify=context, timeout=20) as operator,
            ClientGateway(LOOPBACK, 0, f"https://{LOOPBACK}:{own}", keys) as clients,
        ):
            link = SuperLink(folder, own, clients, operator)
            for public in keys.clients.values():
                link.direct("/v1/control/register-node", RegisterNodeRequest(public_key=public))
            yield link
    finally:
        stop(process)


def client_key(superlink: SuperLink, name: str) -> ec.EllipticCurvePrivateKey:
    contents = (superlink.folder / "clients" / name / "client.key").read_bytes()
    key = load_ssh_private_key(contents, None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    return key


def new_public_key() -> bytes:
    return public_key_to_bytes(ec.generate_private_key(ec.SECP384R1()).public_key())


def start_run() -> StartRunRequest:
    about = b"""
        [project]
        name = "x"
        version = "1.0.0"
        license = "Apache-2.0"
        dependencies = []
        [tool.flwr.app]
        publisher = "p"
        components = { serverapp = "x.a:app", clientapp = "x.a:app" }
        config = {}
    """
    contents = {"pyproject.toml": about, "x/__init__.py": b"", "x/a.py": b"app = 1"}
    fab, _ = build_fab_from_files(contents)
    return StartRunRequest(fab=Fab(hash_str=hashlib.sha256(fab).hexdigest(), content=fab))


# What may pass.


def test_the_fleet_api_is_flowers() -> None:
    """Neither more nor less than its router has; and the headers that its middleware reads."""
    routes = {(route.path, *route.methods) for route in router.routes}  # type: ignore[attr-defined]
    assert routes == {(f"/v1/fleet/{name}", "POST") for name in module.FLEET}
    needed = {
        "accept", "content-type", TIMESTAMP_HEADER, constant.FLEET_HTTP_PUBLIC_KEY_HEADER,
        constant.FLEET_HTTP_SIGNATURE_HEADER, constant.FLWR_PACKAGE_NAME_METADATA_KEY,
        constant.FLWR_PACKAGE_VERSION_METADATA_KEY, constant.FLWR_COMPONENT_NAME_METADATA_KEY,
    }  # fmt: skip
    assert {name.encode() for name in needed} == module.REQUEST_HEADERS
    told = constant.VERSION_INCOMPATIBILITY_MESSAGE_METADATA_KEY.encode()
    assert told in module.RESPONSE_HEADERS


def test_fleet_calls_pass_both_ways(port: ClientGateway, upstream: Recorder) -> None:
    upstream.status, upstream.headers = 412, {"Content-Type": "application/json", "X-Own": "1"}
    with httpx.Client() as client:
        for name in sorted(module.FLEET):
            body = b"" if name == "push-messages" else name.encode()  # whose body is looked at
            answer = client.post(url(port, name), content=body, headers=PROTOBUF)
            assert answer.status_code == 412
            assert answer.content == b"answer"
            assert dict(answer.headers) == {
                "content-type": "application/json", "content-length": "6",
            }  # fmt: skip
    names = sorted(module.FLEET)
    assert [(m, p) for m, p, _ in upstream.asked] == [("POST", f"/v1/fleet/{n}") for n in names]
    assert upstream.bodies == [b"" if n == "push-messages" else n.encode() for n in names]


def test_only_what_the_fleet_api_reads_is_passed(port: ClientGateway, upstream: Recorder) -> None:
    kept = {name.decode(): f"value of {name.decode()}" for name in module.REQUEST_HEADERS}
    others = {
        "x-forwarded-for": "127.0.0.1", "forwarded": "for=127.0.0.1", "cookie": "a=b",
        "authorization": "Bearer x", "flwr-task-token": "x", "flwr-superexec-signature": "x",
        "x-http-method-override": "PUT", "x-original-url": "/v1/control/start-run",
        "te": "trailers", "upgrade": "h2c", "connection": "upgrade, flwr-signature",
        "user-agent": "x", "accept-encoding": "gzip", "keep-alive": "5", "trailer": "x",
        "proxy-authorization": "x", "host": "elsewhere",
    }  # fmt: skip
    assert httpx.post(url(port), headers=kept | others, content=b"12").status_code == 200
    _, _, headers = upstream.asked[0]
    assert headers == kept | {"host": f"{LOOPBACK}:{upstream.port}", "content-length": "2"}


def test_a_body_may_come_in_chunks(port: ClientGateway, upstream: Recorder) -> None:
    answer = httpx.post(url(port), content=iter([b"one", b"two"]))
    assert answer.status_code == 200
    assert upstream.bodies == [b"onetwo"]


def test_large_bodies_pass_both_ways(port: ClientGateway, upstream: Recorder) -> None:
    upstream.answer, sent = os.urandom(40 * MB), os.urandom(40 * MB)
    answer = httpx.post(url(port, "push-object"), content=sent, timeout=60)
    assert answer.content == upstream.answer
    assert upstream.bodies == [sent]


def test_bodies_are_passed_on_as_they_come(port: ClientGateway, upstream: Recorder) -> None:
    """Half a request is with the SuperLink, and half an answer with the client, before the rest."""
    go_on, in_time = threading.Event(), []
    upstream.answer, upstream.halfway = bytes(2 * MB), lambda: in_time.append(go_on.wait(5))
    with socket.create_connection((LOOPBACK, port.port), 10) as connection:
        connection.sendall(head("/v1/fleet/push-object", f"Content-Length: {2 * MB}"))
        connection.sendall(bytes(MB))
        wait_for(lambda: sum(upstream.pieces) > MB // 2)
        connection.sendall(bytes(MB))
        came = 0
        while came < MB // 2:
            came += len(connection.recv(65536))
        go_on.set()
        wait_for(lambda: in_time)
    assert in_time == [True]


def test_connections_are_kept(port: ClientGateway, upstream: Recorder) -> None:
    """The client's is, even after a refusal; and one that the SuperLink has closed is made anew."""
    good, bad = head("/v1/fleet/get-run", "Content-Length: 2"), head("/", "Content-Length: 2")
    with socket.create_connection((LOOPBACK, port.port), 10) as connection:
        for request, status in ((good, 200), (bad, 404), (good, 200), (good, 200)):
            connection.sendall(request + b"12")
            assert [status for status, _ in answers(connection)] == [status]
        time.sleep(0.7)  # the recorder closes its side
        connection.sendall(good + b"34")
        assert answers(connection) == [(200, b"answer")]
    assert upstream.bodies == [b"12", b"12", b"12", b"34"]


# What may not.

CONTROL = "/v1/control/register-node"
TARGETS = [
    CONTROL, "/", "*", "/docs", "/openapi.json", "/health", "/v1", "/v1/fleet", "/v1/fleet/",
    "/v1/fleet/start-run", "/v1/fleet/../control/register-node",
    "/v1/fleet/%2e%2e/control/register-node", "/v1/fleet/%2E%2E%2Fcontrol%2Fregister-node",
    "/v1/fleet/..%2fcontrol/register-node", "/v1/fleet/..;/control/register-node",
    "/v1/fleet/./../control/register-node", "/v1/fleet/activate-node/../../control/register-node",
    "/v1/fleet/activate-node/%2e%2e/%2e%2e/control/register-node",
    "/v1/fleet\\..\\control\\register-node", "/v1/fleet/%5c..%5c../control/register-node",
    "//v1/control/register-node", "/v1//control/register-node", "//v1/fleet/activate-node",
    "/v1//fleet/activate-node", "/v1/fleet//activate-node", "/v1/fleet/activate-node/",
    "/V1/CONTROL/REGISTER-NODE", "/V1/FLEET/ACTIVATE-NODE", "/v1/fleet/Activate-Node",
    "/v1/fleet/%61ctivate-node", "/%76%31/fleet/activate-node", "/v1%2ffleet%2factivate-node",
    "/v1/fleet/activate-node%00", "/v1/fleet/activate-node%20", "/v1/fleet/activate-node%0a",
    "/v1/fleet/activate-node?x", "/v1/fleet/activate-node?/../../control/register-node",
    "/v1/fleet/activate-node#/../../control/register-node", "/v1/fleet/activate-node;x",
    "http://x/v1/fleet/activate-node", "http://x/v1/control/register-node",
    "https://127.0.0.1:{port}/v1/control/register-node", "http:/v1/control/register-node",
    "@127.0.0.1:{port}/v1/control/register-node", "x/v1/fleet/activate-node",
]  # fmt: skip


def test_nothing_else_is_answered(port: ClientGateway, upstream: Recorder) -> None:
    for target in TARGETS:
        request = head(target.format(port=upstream.port), "Content-Length: 2") + b"12"
        assert raw((LOOPBACK, port.port), request) == [(404, b"")], target
        assert upstream.asked == [], target


METHODS = (
    "GET", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE", "CONNECT", "post", "Post", "POSTS", "PRI",
)  # fmt: skip


def test_no_other_method_is(port: ClientGateway, upstream: Recorder) -> None:
    for method in METHODS:
        for target in ("/v1/fleet/activate-node", CONTROL, "/docs"):
            assert raw((LOOPBACK, port.port), head(target, method=method)) == [(404, b"")], method
    assert upstream.asked == []


def test_nor_an_upgrade(port: ClientGateway, upstream: Recorder) -> None:
    for kind in ("websocket", "h2c"):
        request = head(
            "/v1/control/stream-logs", "Connection: Upgrade", f"Upgrade: {kind}",
            "Sec-WebSocket-Version: 13", "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
            method="GET",
        )  # fmt: skip
        assert raw((LOOPBACK, port.port), request) == [(404, b"")]
    assert upstream.asked == []


INNER = head(CONTROL, "Content-Length: 2") + b"12"
SMUGGLED = {
    "both, ended by the chunks": head(
        "/v1/fleet/get-run", f"Content-Length: {5 + len(INNER)}", "Transfer-Encoding: chunked"
    ) + b"0\r\n\r\n" + INNER,
    "both, ended by the length": head(
        "/v1/fleet/get-run", "Content-Length: 4", "Transfer-Encoding: chunked"
    ) + f"{len(INNER):x}\r\n".encode() + INNER + b"\r\n0\r\n\r\n",
    "two lengths": head(
        "/v1/fleet/get-run", "Content-Length: 0", f"Content-Length: {len(INNER)}"
    ) + INNER,
    "lengths in a list": head("/v1/fleet/get-run", f"Content-Length: 0, {len(INNER)}") + INNER,
    "a length with a sign": head("/v1/fleet/get-run", f"Content-Length: +{len(INNER)}") + INNER,
    "a coding that is not known": head(
        "/v1/fleet/get-run", "Transfer-Encoding: xchunked", f"Content-Length: {len(INNER)}"
    ) + INNER,
    "two codings": head(
        "/v1/fleet/get-run", "Transfer-Encoding: identity", "Transfer-Encoding: chunked"
    ) + b"0\r\n\r\n" + INNER,
    "a space before the colon": head(
        "/v1/fleet/get-run", "Content-Length: 0", "Transfer-Encoding : chunked"
    ) + b"0\r\n\r\n" + INNER,
    "a folded header": head(
        "/v1/fleet/get-run", "Content-Length: 5", "Transfer-Encoding:\r\n chunked"
    ) + b"0\r\n\r\n" + INNER,
    "a line in a header": head(
        "/v1/fleet/get-run", "Flwr-Signature: x\nTransfer-Encoding: chunked", "Content-Length: 5"
    ) + b"0\r\n\r\n" + INNER,
    "a line in the target": head(f"/v1/fleet/get-run HTTP/1.1\r\nX: y\r\n\r\n{INNER!r}"),
    "a chunk with a sign": head("/v1/fleet/get-run", "Transfer-Encoding: chunked")
    + b"-1\r\n\r\n" + INNER,
}  # fmt: skip


def test_no_request_is_smuggled_in_another(port: ClientGateway, upstream: Recorder) -> None:
    """It may be refused, or be taken for a request of its own and refused then; it never passes."""
    for kind, request in SMUGGLED.items():
        found = raw((LOOPBACK, port.port), request, count=3, pause=0.2)
        assert found, kind
        assert {path for _, path, _ in upstream.asked} <= {"/v1/fleet/get-run"}, kind
        assert not any(b"register" in body for body in upstream.bodies), kind
        if "both" in kind or "length" in kind:  # where two readers could differ
            assert [status for status, _ in found] == [400], kind
            assert upstream.asked == [], kind
        upstream.asked.clear()


def test_a_request_in_a_body_is_a_body(port: ClientGateway, upstream: Recorder) -> None:
    """Whether the body is passed on, or belongs to what is refused."""
    for target, status in (("/v1/fleet/get-run", 200), ("/docs", 404)):
        request = head(target, f"Content-Length: {len(INNER)}") + INNER
        assert [s for s, _ in raw((LOOPBACK, port.port), request)] == [status]
    assert upstream.bodies == [INNER]


def test_a_body_that_is_announced_too_long_is_not_waited_for(upstream: Recorder) -> None:
    with plain(upstream.address, limit=1000) as port:
        announced = head("/v1/fleet/push-object", "Content-Length: 1001")
        assert raw((LOOPBACK, port.port), announced) == [(413, b"")]
        assert upstream.asked == []
        assert httpx.post(url(port), content=bytes(1000)).status_code == 200
        assert httpx.post(url(port), content=bytes(1001)).status_code == 413
    assert upstream.bodies == [bytes(1000)]


def test_a_body_that_grows_too_long_is_cut_off(upstream: Recorder) -> None:
    with plain(upstream.address, limit=100_000) as port:
        endless = head("/v1/fleet/push-object", "Transfer-Encoding: chunked")
        chunk = b"3e8\r\n" + bytes(1000) + b"\r\n"
        assert raw((LOOPBACK, port.port), endless + 100 * chunk + chunk) == [(413, b"")]
        time.sleep(0.1)
        assert upstream.bodies == []
        whole = head("/v1/fleet/push-object", "Transfer-Encoding: chunked") + 100 * chunk
        assert raw((LOOPBACK, port.port), whole + b"0\r\n\r\n") == [(200, b"answer")]
    assert upstream.bodies == [bytes(100_000)]


def test_only_objects_are_long(port: ClientGateway, upstream: Recorder) -> None:
    """A SuperLink takes in all of a request before it looks at who sends it."""
    for name in sorted(module.FLEET - {"push-object"}):
        long = "1048577" if name == "push-messages" else "65537"
        announced = head(f"/v1/fleet/{name}", f"Content-Length: {long}")
        assert raw((LOOPBACK, port.port), announced) == [(413, b"")], name
        chunk = b"10001\r\n" + bytes(65537) + b"\r\n"
        endless = head(f"/v1/fleet/{name}", "Transfer-Encoding: chunked") + 17 * chunk
        with suppress(OSError):  # it may be closed before all of it is sent
            assert raw((LOOPBACK, port.port), endless) in ([(413, b"")], []), name
    assert upstream.bodies == []
    assert httpx.post(url(port, "get-run"), content=bytes(65536)).status_code == 200


@pytest.mark.parametrize("framing", ["Content-Length: 2000", "Transfer-Encoding: chunked"])
def test_half_a_body_is_never_passed_for_the_whole(
    framing: str, port: ClientGateway, upstream: Recorder
) -> None:
    with socket.create_connection((LOOPBACK, port.port), 10) as connection:
        connection.sendall(head("/v1/fleet/push-object", framing))
        connection.sendall(b"3e8\r\n" + bytes(1000) + b"\r\n")
        wait_for(lambda: upstream.asked)
    time.sleep(0.3)
    assert upstream.bodies == []


def test_a_head_has_bounds(port: ClientGateway, upstream: Recorder) -> None:
    """What never ends is not kept: the connection is closed."""
    with socket.create_connection((LOOPBACK, port.port), 10) as connection:
        connection.sendall(b"POST /v1/fleet/get-run HTTP/1.1\r\nX: ")
        with pytest.raises(OSError, match=r"reset|pipe"):
            connection.sendall(b"x" * 50 * MB)
    assert upstream.asked == []


# When the SuperLink does not answer.


def test_without_a_superlink_clients_are_told_to_try_again(upstream: Recorder) -> None:
    with plain(f"http://{LOOPBACK}:{free_port()}") as port:
        answer = httpx.post(url(port, "push-object"), content=bytes(MB))
        assert (answer.status_code, answer.content) == (503, b"")
        assert httpx.post(url(port, "x")).status_code == 404


def test_nor_when_it_dies_over_a_call(port: ClientGateway, upstream: Recorder) -> None:
    def die() -> None:
        raise ValueError

    upstream.before = die
    assert httpx.post(url(port)).status_code == 503
    upstream.before = lambda: None
    assert httpx.post(url(port)).status_code == 200


@pytest.mark.parametrize("chunked", [False, True])
def test_half_an_answer_is_never_passed_for_the_whole(
    chunked: bool, port: ClientGateway, upstream: Recorder
) -> None:
    def die() -> None:
        raise ValueError

    upstream.answer, upstream.chunked = bytes(MB), chunked
    assert httpx.post(url(port)).content == upstream.answer
    upstream.halfway = die
    with pytest.raises(httpx.RemoteProtocolError):  # SuperNodes try again on this
        httpx.post(url(port))


def test_calls_under_way_are_told_to_try_again_when_the_port_closes(upstream: Recorder) -> None:
    go_on = threading.Event()
    upstream.before = lambda: go_on.wait(20)
    found: list[int] = []
    with plain(upstream.address) as port:
        at = url(port)
        call = threading.Thread(target=lambda: found.append(httpx.post(at, timeout=20).status_code))
        call.start()
        wait_for(lambda: upstream.asked)
    call.join(10)
    go_on.set()
    assert found == [503]


# What is counted, and how it opens and closes.


def test_bytes_are_counted_as_they_are_on_the_wire(port: ClientGateway, upstream: Recorder) -> None:
    upstream.answer, upstream.headers = b"z" * 100_000, {"Content-Type": "application/protobuf"}
    requests = [
        head("/v1/fleet/push-object", "Content-Length: 70000", "Flwr-Signature: a") + bytes(70000),
        head("/v1/fleet/get-run", "Content-Length: 0"),
        head("/v1/control/start-run?a=b", "Accept: x"),
        head("/docs", method="GET"),
    ]  # fmt: skip
    assert (port.received, port.sent) == (0, 0)
    sent = came = 0
    with socket.create_connection((LOOPBACK, port.port), 10) as connection:
        for request, size in zip(requests, (100_000, 100_000, 0, 0), strict=True):
            connection.sendall(request)
            sent += len(request)
            answer = b""
            while b"\r\n\r\n" not in answer or len(answer.partition(b"\r\n\r\n")[2]) < size:
                answer += connection.recv(65536)
            came += len(answer)
            assert (port.received, port.sent) == (sent, came)


def test_many_clients_at_once_are_all_counted(port: ClientGateway, upstream: Recorder) -> None:
    upstream.answer = bytes(1000)

    def call() -> None:
        with httpx.Client(timeout=30) as client:
            for _ in range(10):
                assert client.post(url(port), content=bytes(500)).status_code == 200

    threads = [threading.Thread(target=call) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(upstream.bodies) == 80
    one_sent = len("HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n") + 1000
    assert port.sent == 80 * one_sent
    assert port.received % 80 == 0
    assert port.received > 80 * 500


def test_a_port_that_is_taken_is_named() -> None:
    with socket.create_server((LOOPBACK, 0)) as taken:
        number = taken.getsockname()[1]
        port = ClientGateway(LOOPBACK, number, "http://x:1", None)
        with pytest.raises(OSError, match=rf"127.0.0.1:{number}: cannot listen there"), port:
            pass


@pytest.mark.parametrize(
    ("host", "number", "kind"), [("192.0.2.1", 0, OSError), (LOOPBACK, 70000, ConfigError)]
)
def test_so_is_an_address_that_is_not_here(host: str, number: int, kind: type[Exception]) -> None:
    """It may come up yet, so that it is worth trying again; a port that cannot be is not."""
    port = ClientGateway(host, number, "http://x:1", None)
    with pytest.raises(kind, match=rf"{host}:{number}: cannot listen there"), port:
        pass


@pytest.mark.parametrize(
    "upstream", ["", "x:1", "https://x:1", "http://", "http://x:1/v1", "http://x:1?y", "http://u@x:1",
                 "http://x:y", "ftp://x:1"],
)  # fmt: skip
def test_the_superlinks_address_is_host_and_port(upstream: str) -> None:
    with pytest.raises(ConfigError, match="write the SuperLink's address as http://HOST:PORT"):
        plain(upstream)


def test_no_keys_are_sent_where_anyone_could_read_them(superlink: SuperLink) -> None:
    keys = ServerKeys.read(superlink.folder / "server")
    with pytest.raises(ConfigError, match="write the SuperLink's address as https://HOST:PORT"):
        ClientGateway(LOOPBACK, 0, f"http://{LOOPBACK}:{superlink.port}", keys)


def test_missing_keys_are_named(tmp_path: Path) -> None:
    nothing = tmp_path / "nothing"
    with pytest.raises(ConfigError, match=r"nothing: not a certificate.*`perfed keys`"):
        ClientGateway(LOOPBACK, 0, "https://x:1", ServerKeys(nothing, nothing, nothing, {}))
    make_keys(tmp_path, [], ["a"])
    keys = replace(ServerKeys.read(tmp_path / "server"), authority=nothing)
    with pytest.raises(ConfigError, match="nothing: not the certificate of an authority"):
        ClientGateway(LOOPBACK, 0, "https://x:1", keys)


def test_it_opens_closes_and_leaves_nothing(
    tmp_path: Path,
    upstream: Recorder,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Neither a thread, nor a word, nor a handler of signals; whoever is still connected."""
    caplog.set_level("INFO")
    handlers = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
    make_keys(tmp_path, [], ["a"])
    keys = ServerKeys.read(tmp_path / "server")
    secure = ClientGateway(LOOPBACK, 0, "https://localhost:1", keys)
    trusts = ssl.create_default_context(cafile=keys.authority)
    distrusts = ssl.create_default_context()
    for opens in (plain(upstream.address), secure):
        with httpx.Client(verify=trusts) as idle, opens as port:
            scheme = "http" if opens is not secure else "https"
            idle.post(url(port).replace("http", scheme))
            if opens is secure:
                with pytest.raises(httpx.ConnectError):
                    httpx.post(url(port).replace("http", scheme), verify=distrusts)
            raw((LOOPBACK, port.port), b"nonsense\r\n\r\n")
            assert [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)] == handlers
            number = port.port
        assert not listens(number)
        assert not port._thread.is_alive()
        gc.collect()  # what was left open says so now
    assert [r.name for r in caplog.records if "uvicorn" in r.name or "asyncio" in r.name] == []
    said = capfd.readouterr()
    assert (said.out, said.err) == ("", "")


# Before a real SuperLink.


def test_nobody_operates_through_the_clients_port(superlink: SuperLink) -> None:
    """Each call does something at the SuperLink's own port, and nothing through the clients'."""

    def both(path: str, message: Protobuf, other: Protobuf | None = None, **h: str) -> bytes:
        """Refused through the clients' port; then what the SuperLink answers to the same."""
        answer = superlink.through(path, other or message, **h)
        assert (path, answer.status_code, answer.content) == (path, 404, b"")
        assert dict(answer.headers) == {"content-length": "0"}
        return superlink.direct(path, message, **h)

    nodes, runs = superlink.nodes(), superlink.runs()
    superlink.through("/v1/control/start-run", start_run())
    register = RegisterNodeRequest(public_key=new_public_key())
    superlink.through("/v1/control/register-node", register)
    assert (superlink.nodes(), superlink.runs()) == (nodes, runs)

    both("/v1/control/list-nodes", ListNodesRequest())
    both("/v1/control/list-runs", ListRunsRequest())
    both("/v1/control/register-node", register)
    assert len(superlink.nodes()) == len(nodes) + 1
    run = StartRunResponse.FromString(both("/v1/control/start-run", start_run())).run_id
    assert superlink.runs() != runs
    # Of two calls for a task the first would have it.
    acquire = AcquireTaskRequest(supported_task_types=["flwr-serverapp"])
    task = AcquireTaskResponse.FromString(both("/v1/runtime/acquire-task", acquire))
    assert task.task.run_id == run
    token = {"flwr_task_token": task.token}
    assert both("/v1/runtime/pull-task-input", PullTaskInputRequest(), **token)
    both("/v1/runtime/push-logs", PushLogsRequest(logs=["x"]), **token)
    both("/v1/runtime/get-nodes", GetNodesRequest(), **token)
    pushed = push_messages(next(iter(nodes)), run)[1]
    answer = PushAppMessagesResponse.FromString(both("/v1/runtime/push-messages", pushed, **token))
    assert len(answer.message_ids) == 1
    pull = PullAppMessagesRequest(message_ids=answer.message_ids)
    both("/v1/runtime/pull-messages", pull, **token)


def test_nobody_looks_around_there(superlink: SuperLink) -> None:
    for path in ("/docs", "/openapi.json", "/health"):
        for method in ("GET", "HEAD"):
            address = f"https://{LOOPBACK}:%d{path}"
            answer = superlink.operator.request(method, address % superlink.clients.port)
            assert (answer.status_code, answer.content) == (404, b"")
        assert superlink.operator.get(address % superlink.port).status_code == 200


def registering(target: str, *headers: str, method: str = "POST") -> bytes:
    """A request to register a new key."""
    body = bytes(RegisterNodeRequest(public_key=new_public_key()).SerializeToString())
    length = f"Content-Length: {len(body)}"
    kind = "Content-Type: application/protobuf"
    return head(target, length, kind, *headers, method=method) + body


def test_nobody_sneaks_a_key_in(superlink: SuperLink) -> None:
    nodes = superlink.nodes()
    for target in TARGETS:
        request = registering(target.format(port=superlink.port))
        assert superlink.raw(superlink.clients.port, request) == [(404, b"")], target
    for method in ("GET", "PUT", "post"):
        request = registering(CONTROL, method=method)
        assert superlink.raw(superlink.clients.port, request) == [(404, b"")]
    hidden = registering(CONTROL)
    for framing in (f"Content-Length: {5 + len(hidden)}", "Content-Length: 5"):
        outer = head("/v1/fleet/get-run", framing, "Transfer-Encoding: chunked")
        found = superlink.raw(superlink.clients.port, outer + b"0\r\n\r\n" + hidden, count=2)
        assert [status for status, _ in found] in ([400, 404], [400])
    assert superlink.nodes() == nodes
    # The first and the absolute form do at the SuperLink's own port.
    for target in (CONTROL, f"https://{LOOPBACK}:{superlink.port}{CONTROL}"):
        assert superlink.raw(superlink.port, registering(target))[0][0] == 200
    assert len(superlink.nodes()) == len(nodes) + 2


def activate(fleet: FleetHttpClient, key: ec.EllipticCurvePrivateKey) -> int:
    public = public_key_to_bytes(key.public_key())
    answer = fleet.ActivateNode(ActivateNodeRequest(public_key=public, heartbeat_interval=30))
    return int(answer.node_id)


def test_a_registered_key_is_served(superlink: SuperLink) -> None:
    key = client_key(superlink, "a")
    before = superlink.clients.received, superlink.clients.sent
    with superlink.fleet(key) as fleet:
        node = activate(fleet, key)
        assert superlink.nodes()[node] == "online"
        for _ in range(3):
            answer = fleet.SendNodeHeartbeat(
                SendNodeHeartbeatRequest(node=Node(node_id=node), heartbeat_interval=30)
            )
            assert answer.success
        fleet.PullMessages(PullMessagesRequest(node=Node(node_id=node)))
        fleet.DeactivateNode(DeactivateNodeRequest(node_id=node))
        assert superlink.nodes()[node] == "offline"
    # Public key and signature are over 400 bytes a call.
    assert 6 * 400 < superlink.clients.received - before[0] < 6 * 2000
    assert 6 * 50 < superlink.clients.sent - before[1] < 6 * 500


def test_a_key_that_is_not_registered_is_not(superlink: SuperLink) -> None:
    key, nodes = ec.generate_private_key(ec.SECP384R1()), superlink.nodes()
    with superlink.fleet(key) as fleet:
        with pytest.raises(httpx.HTTPStatusError, match="412"):
            activate(fleet, key)
        with pytest.raises(httpx.HTTPStatusError, match="404"):  # nor does it register itself
            fleet.RegisterNode(
                RegisterNodeFleetRequest(public_key=public_key_to_bytes(key.public_key()))
            )
        for node in nodes:
            with pytest.raises(httpx.HTTPStatusError, match="401"):
                fleet.PullMessages(PullMessagesRequest(node=Node(node_id=node)))
    assert superlink.nodes() == nodes


def test_no_key_no_service(superlink: SuperLink) -> None:
    public = ServerKeys.read(superlink.folder / "server").clients["a"]
    request = ActivateNodeRequest(public_key=public, heartbeat_interval=30)
    answer = superlink.through("/v1/fleet/activate-node", request)
    assert answer.status_code == 401
    assert answer.headers["content-type"] == "application/json"


def signature(key: ec.EllipticCurvePrivateKey, time: str) -> dict[str, str]:
    """The headers of a request that is signed by a key."""
    public = b64encode(public_key_to_bytes(key.public_key())).decode()
    signed = b64encode(sign_message(key, time.encode())).decode()
    return {"flwr-public-key": public, "flwr-signature": signed, "flwr-timestamp": time}


def test_nothing_is_taken_in_of_what_no_admitted_key_has_signed(superlink: SuperLink) -> None:
    own, now = client_key(superlink, "a"), datetime.now(UTC)
    good = signature(own, now.isoformat())
    other = signature(ec.generate_private_key(ec.SECP384R1()), now.isoformat())
    bad: list[dict[str, str]] = [
        {}, other, good | {"flwr-signature": other["flwr-signature"]},
        good | {"flwr-public-key": other["flwr-public-key"]}, good | {"flwr-signature": "?"},
        good | {"flwr-timestamp": (now + timedelta(seconds=1)).isoformat()},
        *(signature(own, (now + timedelta(seconds=s)).isoformat()) for s in (-400, 60)),
        *(signature(own, time) for time in (now.replace(tzinfo=None).isoformat(), "now")),
    ]  # fmt: skip
    before = superlink.clients.received
    for name in ("push-object", "push-messages"):
        for headers in bad:
            lines = [f"{key}: {value}" for key, value in headers.items()]
            request = head(f"/v1/fleet/{name}", "Content-Length: 1000000", *lines)
            # It is answered at once, though nothing of the body has come.
            assert superlink.raw(superlink.clients.port, request) == [(401, b"")], headers
    assert superlink.clients.received - before < 20 * 2000
    key = client_key(superlink, "b")
    with superlink.fleet(key) as fleet:
        node = activate(fleet, key)
        push = PushObjectRequest(node=Node(node_id=node), object_id="x", object_content=bytes(MB))
        with pytest.raises(httpx.HTTPStatusError, match="500"):  # the SuperLink knows no such run
            fleet.PushObject(push)
        fleet.DeactivateNode(DeactivateNodeRequest(node_id=node))
    assert superlink.clients.received - before > MB


def test_a_client_of_another_authority_does_not_trust_the_port(
    superlink: SuperLink, tmp_path: Path
) -> None:
    make_keys(tmp_path, [], ["a"])
    context = ssl.create_default_context(cafile=tmp_path / "ca.crt")
    with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        httpx.post(f"https://{LOOPBACK}:{superlink.clients.port}/", verify=context)


def test_nor_does_the_port_trust_another_superlink(superlink: SuperLink, tmp_path: Path) -> None:
    """What is not issued by the authority is no SuperLink, though it answers."""
    make_keys(tmp_path, [], ["a"])
    keys = ServerKeys.read(superlink.folder / "server")
    for authority, status in ((tmp_path / "ca.crt", 503), (keys.authority, 401)):
        upstream = f"https://{LOOPBACK}:{superlink.port}"
        with ClientGateway(LOOPBACK, 0, upstream, replace(keys, authority=authority)) as port:
            answer = httpx.post(
                f"https://{LOOPBACK}:{port.port}/v1/fleet/activate-node",
                headers=PROTOBUF,
                verify=ssl.create_default_context(cafile=keys.authority),
            )
            assert answer.status_code == status


def test_old_tls_and_none_are_refused(superlink: SuperLink) -> None:
    def greet(version: ssl.TLSVersion) -> str | None:
        context = ssl.create_default_context(cafile=superlink.folder / "ca.crt")
        context.set_ciphers("ALL:@SECLEVEL=0")
        context.minimum_version, context.maximum_version = ssl.TLSVersion.TLSv1, version
        with (
            socket.create_connection((LOOPBACK, superlink.clients.port), 10) as connection,
            context.wrap_socket(connection, server_hostname=LOOPBACK) as secure,
        ):
            return secure.version()

    assert greet(ssl.TLSVersion.TLSv1_2) == "TLSv1.2"
    with pytest.raises(ssl.SSLError):
        greet(ssl.TLSVersion.TLSv1_1)
    with pytest.raises(httpx.TransportError):
        httpx.post(url(superlink.clients))


def push_messages(node: int, run: int, size: int = 1) -> tuple[Message, PushAppMessagesRequest]:
    """A message to a client, and how a server would push it."""
    content = RecordDict({"c": ConfigRecord({"blob": os.urandom(size)})})
    about = Metadata(
        run_id=run, message_id="", src_node_id=SUPERLINK_NODE_ID, dst_node_id=node,
        reply_to_message_id="", group_id="", created_at=time.time(), ttl=600,
        message_type=MessageType.TRAIN,
    )  # fmt: skip
    message = make_message(about, content)
    with no_object_id_recompute():
        tree, message_id = get_object_tree(message), message.object_id
    message.metadata.__dict__["_message_id"] = message_id
    return message, PushAppMessagesRequest(
        messages_list=[message_to_proto(remove_content_from_message(message))],
        message_object_trees=[tree],
    )


def test_a_large_message_reaches_its_client(superlink: SuperLink) -> None:
    """40 MB from a server's program over a real SuperLink and the port, with TLS and keys."""
    run = StartRunResponse.FromString(superlink.direct("/v1/control/start-run", start_run())).run_id
    acquire = AcquireTaskRequest(supported_task_types=["flwr-serverapp"])
    task = AcquireTaskResponse()
    while task.task.run_id != run:  # past those that other tests left
        task = AcquireTaskResponse.FromString(superlink.direct("/v1/runtime/acquire-task", acquire))
    token = {"flwr_task_token": task.token}
    superlink.direct("/v1/runtime/pull-task-input", PullTaskInputRequest(), **token)
    key = client_key(superlink, "b")
    with superlink.fleet(key) as fleet:
        node = activate(fleet, key)
        message, request = push_messages(node, run, 40 * MB)
        answer = PushAppMessagesResponse.FromString(
            superlink.direct("/v1/runtime/push-messages", request, **token)
        )
        with no_object_id_recompute():
            objects = {name: o.deflate() for name, o in get_all_nested_objects(message).items()}
        assert set(answer.objects_to_push) == set(objects)
        for name, contents in objects.items():
            push = PushObjectRequest(
                node=Node(node_id=SUPERLINK_NODE_ID), run_id=run, object_id=name,
                object_content=contents, session_id=answer.session_id,
            )  # fmt: skip
            superlink.direct("/v1/runtime/push-object", push, **token)
        sent = superlink.clients.sent
        own = Node(node_id=node)
        pulled = fleet.PullMessages(PullMessagesRequest(node=own)).messages_list
        assert [m.metadata.message_id for m in pulled] == [message.metadata.message_id]
        for name, contents in objects.items():
            pull = PullObjectRequest(node=own, run_id=run, object_id=name)
            assert fleet.PullObject(pull).object_content == contents
        fleet.DeactivateNode(DeactivateNodeRequest(node_id=node))
    assert 40 * MB < superlink.clients.sent - sent < 40 * MB + 10_000


@pytest.mark.slow
def test_a_real_supernode_joins_and_leaves(superlink: SuperLink, tmp_path: Path) -> None:
    def supernode(key: Path, authority: Path) -> subprocess.Popen[bytes]:
        return flower(
            "flower-supernode", tmp_path, "--superlink", f"{LOOPBACK}:{superlink.clients.port}",
            "--root-certificates", str(authority), "--auth-supernode-private-key", str(key),
            "--host", LOOPBACK, "--port", str(free_port()), "--isolation", "process",
        )  # fmt: skip

    def online() -> set[int]:
        return {node for node, status in superlink.nodes().items() if status == "online"}

    make_keys(tmp_path / "other", [], ["a"])
    other, own = tmp_path / "other" / "clients" / "a", superlink.folder / "clients" / "a"
    before = online()
    joined = supernode(own / "client.key", own / "ca.crt")
    unknown = supernode(other / "client.key", own / "ca.crt")
    mistrusts = supernode(own / "client.key", other / "ca.crt")
    try:
        wait_for(lambda: online() != before, 30)
        assert unknown.wait(30) == 1
        assert mistrusts.wait(30) == 1
        received = superlink.clients.received
        wait_for(lambda: superlink.clients.received > received + 1500)  # it goes on asking
        assert joined.poll() is None
        assert len(online() - before) == 1
        joined.terminate()
        joined.wait(20)
        wait_for(lambda: online() == before)
    finally:
        for process in (joined, unknown, mistrusts):
            stop(process)


@pytest.mark.slow
def test_plain_clients_register_themselves() -> None:
    """Without keys the Fleet API's own registration passes; the rest is as closed as ever."""
    for name in module.KEYLESS:
        with recorder() as seen, plain(seen.address) as port:
            assert httpx.post(url(port, name)).status_code == 200
            assert len(seen.asked) == 1
            control = f"http://{LOOPBACK}:{port.port}/v1/control/{name}"
            assert httpx.post(control).status_code == 404
            assert len(seen.asked) == 1
