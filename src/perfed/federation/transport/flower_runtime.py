"""All that is used of Flower besides its programs and its public API; its version is pinned.

Flower starts a process for every message, with code that the run ships. Here `perfed serve` and
`perfed join` execute the apps themselves: they acquire tasks from Flower (as its SuperExec does, by
the same signed request) and run the installed code. So code from the network is never executed, and
a client's data and compiled programs stay loaded between rounds.
"""

import hashlib
import time
from base64 import b64decode
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Final, final

import httpx
from flwr.app import Context, Error, Message
from flwr.cli.build import build_fab_from_files
from flwr.clientapp import ClientApp
from flwr.common.constant import (
    SYSTEM_TIME_TOLERANCE,
    TIMESTAMP_HEADER,
    TIMESTAMP_TOLERANCE,
    ErrorCode,
    SubStatus,
)
from flwr.common.serde import fab_to_proto, run_from_proto
from flwr.proto.control_pb2 import RegisterNodeRequest, StartRunRequest
from flwr.proto.runtime_pb2 import (
    AcquireTaskRequest,
    PullTaskInputRequest,
    PushTaskOutputRequest,
    SendTaskHeartbeatRequest,
)
from flwr.serverapp import Grid
from flwr.supercore.constant import (
    FLEET_HTTP_PUBLIC_KEY_HEADER,
    FLEET_HTTP_SIGNATURE_HEADER,
    TaskType,
)
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.date import now
from flwr.supercore.error import FlowerError
from flwr.supercore.fab import Fab
from flwr.supercore.heartbeat import HeartbeatSender
from flwr.supercore.interceptors import (
    RuntimeTokenHttpInterceptor,
    RuntimeVersionHttpInterceptor,
    SuperExecAuthHttpInterceptor,
)
from flwr.supercore.primitives.asymmetric import bytes_to_public_key, verify_signature
from flwr.supercore.protobuf.client import ProtobufClientInterceptor
from flwr.supercore.retry import RetryInvoker, exponential
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.grid import HttpGrid
from flwr.supernode.runtime.run_clientapp import pull_task_input, push_message, push_task_output

from perfed.federation.protocol.errors import public_message
from perfed.federation.transport.messenger import LinkLostError

_PAUSE: Final = 0.1
# How long requests to a program on this machine are retried, in seconds.
_MAX_RETRY_TIME: Final = 20.0
_RETRIED: Final = (502, 503, 504)
_SIGNED: Final = ("/flwr.proto.Runtime/AcquireTask",)

# The app of a run. It has no code of its own: perfed is installed on all machines.
_APP: Final = b"""
[project]
name = "perfed-federation"
version = "1.0.0"
description = "The installed perfed"
license = "Apache-2.0"
dependencies = []
[tool.flwr.app]
publisher = "perfed"
[tool.flwr.app.components]
serverapp = "perfed.federation.client.flower_app:server_app"
clientapp = "perfed.federation.client.flower_app:client_app"
"""


@final
@dataclass(frozen=True)
class Link:
    """The address of a SuperLink or a SuperNode on this machine.

    Attributes:
        port: on 127.0.0.1.
        authority: the certificate to verify it by; None: without encryption.
        secret: signs requests for tasks.
    """

    port: int
    authority: Path | None
    secret: bytes

    @property
    def address(self) -> str:
        """Host and port."""
        return f"127.0.0.1:{self.port}"

    def client(
        self, token: str | None = None, retry: RetryInvoker | None = None
    ) -> RuntimeHttpClient:
        """A client of the Runtime API, with the token of a task, or without one to acquire it."""
        own: ProtobufClientInterceptor
        if token is None:
            own = SuperExecAuthHttpInterceptor(master_secret=self.secret, protected_methods=_SIGNED)
        else:
            own = RuntimeTokenHttpInterceptor(token=token)
        version = RuntimeVersionHttpInterceptor(component_name="perfed")
        return RuntimeHttpClient.from_server_address(
            self.address,
            self.authority is None,
            self.certificate,
            [version, own],
            retry_invoker=retry,
        )

    @property
    def certificate(self) -> bytes | None:
        """The authority's certificate."""
        return None if self.authority is None else self.authority.read_bytes()


def _retrying(alive: Callable[[], bool]) -> RetryInvoker:
    """Retries requests for a while, as long as the other program is alive.

    Flower's own retries have no limit, and interrupt this process when a task is over.
    """

    def give_up(error: Exception) -> bool:
        if isinstance(error, httpx.HTTPStatusError):
            return error.response.status_code not in _RETRIED
        return not alive()

    return RetryInvoker(
        lambda: exponential(max_delay=2),
        (httpx.TransportError, httpx.HTTPStatusError),
        max_tries=None,
        max_time=_MAX_RETRY_TIME,
        should_giveup=give_up,
    )


def register(link: Link, keys: dict[str, bytes]) -> None:
    """Admit clients with these keys, besides those admitted before."""
    with _control(link) as control:
        for name, key in keys.items():
            try:
                control.RegisterNode(RegisterNodeRequest(public_key=key, name=name))
            except httpx.HTTPStatusError as error:
                if error.response.status_code != httpx.codes.CONFLICT and not _in_use(error):
                    raise


def _in_use(error: httpx.HTTPStatusError) -> bool:
    details = FlowerError.from_json(error.response.text)
    return details is not None and "in use" in f"{details.message} {details.public_details}".lower()


def is_signed(headers: Iterable[tuple[bytes, bytes]], admitted: Collection[bytes]) -> bool:
    """Whether a SuperNode's request has a recent signature by one of these keys.

    The SuperLink checks the same, but only after it has read the whole request.
    """
    values = dict(headers)
    try:
        key, signature = (
            b64decode(values[name.encode()], validate=True)
            for name in (FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER)
        )
        text = values[TIMESTAMP_HEADER.encode()]
        age = (now() - datetime.fromisoformat(text.decode("ascii"))).total_seconds()
    except (KeyError, ValueError, TypeError):  # a time without a zone has another type
        return False
    fresh = -SYSTEM_TIME_TOLERANCE < age < TIMESTAMP_TOLERANCE + SYSTEM_TIME_TOLERANCE
    # Other keys are not even parsed.
    return fresh and key in admitted and verify_signature(bytes_to_public_key(key), text, signature)


@contextmanager
def server_grid(link: Link, alive: Callable[[], bool]) -> Iterator[Grid]:
    """Start a run and act as its server app: a grid for messages to clients.

    Args:
        link: the SuperLink.
        alive: whether it is still running.
    """
    content, _ = build_fab_from_files({"pyproject.toml": _APP})
    fab = Fab(hashlib.sha256(content).hexdigest(), content, {})
    with _control(link) as control:
        run_id = control.StartRun(StartRunRequest(fab=fab_to_proto(fab))).run_id
    token = _acquire_token(link, TaskType.SERVER_APP, run_id)
    client = link.client(token)
    heartbeat = _heartbeat(client)
    grid = HttpGrid(link.address, link.authority is None, link.certificate, token=token)
    grid._retry_invoker = _retrying(alive)
    status = SubStatus.FAILED
    try:
        task = client.PullTaskInput(PullTaskInputRequest())
        TaskIdentity.task_id, TaskIdentity.run_id = task.task_id, task.run.run_id
        TaskIdentity.node_id = task.context.node_id
        grid.set_run(run_from_proto(task.run))
        yield grid
        status = SubStatus.COMPLETED
    finally:
        with suppress(httpx.HTTPError):
            client.PushTaskOutput(PushTaskOutputRequest(sub_status=status, details=""))
        if heartbeat.is_running:
            heartbeat.stop()
        grid.close()
        client.close()


def _acquire_token(link: Link, kind: TaskType, run_id: int, seconds: float = 60.0) -> str:
    """The token of a run's task."""
    deadline = time.monotonic() + seconds
    with link.client() as client:
        while time.monotonic() < deadline:
            acquired = client.AcquireTask(AcquireTaskRequest(supported_task_types=[kind]))
            # An earlier, unfinished run may have a task too, which is ignored.
            if acquired.token and acquired.task.run_id == run_id:
                return acquired.token
            time.sleep(_PAUSE)
    raise LinkLostError(f"the SuperLink had no task for run {run_id} within {seconds:g} s")


def serve_tasks(
    link: Link, app: ClientApp, running: Callable[[], bool], log: Callable[[str], None]
) -> None:
    """Act as the client app of a SuperNode: reply to its messages as long as it is running.

    The reply to a message that fails is the error, as far as the server may know it. This returns,
    too, when no reply can be sent: the SuperNode would wait for it forever, so restart it.
    """
    with link.client() as client:
        while running():
            try:
                request = AcquireTaskRequest(supported_task_types=[TaskType.CLIENT_APP])
                token = client.AcquireTask(request).token
            except httpx.HTTPError:
                token = ""  # the SuperNode is starting, or has ended
            if not token:
                time.sleep(_PAUSE)
                continue
            try:
                _serve_task(link, token, app, running, log)
            except Exception as error:
                if not _is_over(error):
                    log(f"cannot send the reply: {error}")
                    return
                log("the reply is too late: the server has stopped waiting for it")


def _is_over(error: Exception) -> bool:
    """Whether Flower has ended a task, which it does after a minute without a heartbeat."""
    over = (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN)
    return isinstance(error, httpx.HTTPStatusError) and error.response.status_code in over


def _serve_task(
    link: Link,
    token: str,
    app: ClientApp,
    running: Callable[[], bool],
    log: Callable[[str], None],
) -> None:
    with link.client(token) as beats, link.client(token, _retrying(running)) as client:
        heartbeat = _heartbeat(beats)
        context: Context | None = None
        status, details = SubStatus.FAILED, ""
        try:
            message, context, _, _ = pull_task_input(client)
            start, kind = time.monotonic(), message.metadata.group_id
            try:
                reply = app(message, context)
                status = SubStatus.COMPLETED
                log(f"{kind}: done in {time.monotonic() - start:.1f} s")
            except Exception as error:
                log(f"{kind}: {type(error).__name__}: {' '.join(str(error).split())}")
                details = public_message(error)
                code = ErrorCode.CLIENT_APP_RAISED_EXCEPTION
                reply = Message(Error(code, details), reply_to=message)
            push_message(client, reply, context)
        finally:
            push_task_output(client, context, status, details)
            if heartbeat.is_running:
                heartbeat.stop()


def _heartbeat(client: RuntimeHttpClient) -> HeartbeatSender:
    """Regularly tell Flower that a task is in progress."""

    def beat() -> bool:
        with suppress(httpx.HTTPError):
            client.SendTaskHeartbeat(SendTaskHeartbeatRequest())
            return True
        return False

    sender = HeartbeatSender(beat)
    sender.start()
    return sender


@contextmanager
def _control(link: Link) -> Iterator[ControlHttpClient]:
    version = RuntimeVersionHttpInterceptor(component_name="perfed")
    with ControlHttpClient.from_server_address(
        link.address, link.authority is None, link.certificate, [version]
    ) as control:
        yield control
