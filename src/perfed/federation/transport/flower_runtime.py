"""What we use of Flower beside its programs and its public API; pinned, and all of it is here.

Flower runs the app of a run in processes that it starts for every message, from code that a run
brings along. Here the same apps are run by `perfed serve` and `perfed join` themselves: they ask
Flower for the task that is due (as its own SuperExec does, by the same signed request) and run our
installed code in its place. So no code that comes over the network is ever run, and a client's data
and compiled programs stay loaded between rounds.
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
# How long a request to a program on this machine is tried before it is given up as lost.
_PATIENCE: Final = 20.0
_BUSY: Final = (502, 503, 504)
_SIGNED: Final = ("/flwr.proto.Runtime/AcquireTask",)

# What a run is to Flower. Its code is what is installed here, so it has none of its own.
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
    """Where a SuperLink or a SuperNode listens on this machine.

    Attributes:
        port: on 127.0.0.1.
        authority: the certificate to know it by; None: it is spoken to in plain.
        secret: what signs requests for tasks.
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
        """Of the Runtime API; with the token of a task, or else to ask for one."""
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


def _persistent(alive: Callable[[], bool]) -> RetryInvoker:
    """Tries requests again for a while, as long as the program that is asked is alive.

    Flower's own would try for ever, and would interrupt this process when a task is over.
    """

    def hopeless(error: Exception) -> bool:
        if isinstance(error, httpx.HTTPStatusError):
            return error.response.status_code not in _BUSY
        return not alive()

    return RetryInvoker(
        lambda: exponential(max_delay=2),
        (httpx.TransportError, httpx.HTTPStatusError),
        max_tries=None,
        max_time=_PATIENCE,
        should_giveup=hopeless,
    )


def register(link: Link, keys: dict[str, bytes]) -> None:
    """Let clients with these keys in; those that were let in before stay so."""
    with _control(link) as control:
        for name, key in keys.items():
            try:
                control.RegisterNode(RegisterNodeRequest(public_key=key, name=name))
            except httpx.HTTPStatusError as error:
                if error.response.status_code != httpx.codes.CONFLICT and not _in_use(error):
                    raise


def _in_use(error: httpx.HTTPStatusError) -> bool:
    told = FlowerError.from_json(error.response.text)
    return told is not None and "in use" in f"{told.message} {told.public_details}".lower()


def signed(headers: Iterable[tuple[bytes, bytes]], admitted: Collection[bytes]) -> bool:
    """Whether a SuperNode's request is signed just now, by one of these public keys.

    The SuperLink asks the same, but once it has all of the request.
    """
    found = dict(headers)
    try:
        key, signature = (
            b64decode(found[name.encode()], validate=True)
            for name in (FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER)
        )
        text = found[TIMESTAMP_HEADER.encode()]
        age = (now() - datetime.fromisoformat(text.decode("ascii"))).total_seconds()
    except (KeyError, ValueError, TypeError):  # a time without a zone is of another type
        return False
    fresh = -SYSTEM_TIME_TOLERANCE < age < TIMESTAMP_TOLERANCE + SYSTEM_TIME_TOLERANCE
    # Those that are not on the list are not even read.
    return fresh and key in admitted and verify_signature(bytes_to_public_key(key), text, signature)


@contextmanager
def server_grid(link: Link, alive: Callable[[], bool]) -> Iterator[Grid]:
    """Start a run, and be its server app: a grid to talk to clients over.

    Args:
        link: the SuperLink.
        alive: whether it still runs.
    """
    content, _ = build_fab_from_files({"pyproject.toml": _APP})
    fab = Fab(hashlib.sha256(content).hexdigest(), content, {})
    with _control(link) as control:
        run_id = control.StartRun(StartRunRequest(fab=fab_to_proto(fab))).run_id
    token = _acquired(link, TaskType.SERVER_APP, run_id)
    client = link.client(token)
    beating = _heartbeat(client)
    grid = HttpGrid(link.address, link.authority is None, link.certificate, token=token)
    grid._retry_invoker = _persistent(alive)
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
        if beating.is_running:
            beating.stop()
        grid.close()
        client.close()


def _acquired(link: Link, kind: TaskType, run_id: int, seconds: float = 60.0) -> str:
    """The token of a run's task."""
    deadline = time.monotonic() + seconds
    with link.client() as client:
        while time.monotonic() < deadline:
            found = client.AcquireTask(AcquireTaskRequest(supported_task_types=[kind]))
            # An earlier run that was left unfinished may have a task too; it is not ours to do.
            if found.token and found.task.run_id == run_id:
                return found.token
            time.sleep(_PAUSE)
    raise LinkLostError(f"the SuperLink has had no task for run {run_id} for {seconds:g} s")


def serve_tasks(
    link: Link, app: ClientApp, going: Callable[[], bool], log: Callable[[str], None]
) -> None:
    """Be the client app of a SuperNode: answer its messages one by one, as long as it is `going`.

    A message whose answer fails is answered by what went wrong, as far as the server may know it.
    This ends, too, when no answer can be given at all: the SuperNode would wait for it for ever,
    and has to be started anew.
    """
    with link.client() as client:
        while going():
            try:
                request = AcquireTaskRequest(supported_task_types=[TaskType.CLIENT_APP])
                token = client.AcquireTask(request).token
            except httpx.HTTPError:
                token = ""  # the SuperNode is just starting, or has ended
            if not token:
                time.sleep(_PAUSE)
                continue
            try:
                _serve_task(link, token, app, going, log)
            except Exception as error:
                if not _is_over(error):
                    log(f"no answer could be given: {error}")
                    return
                log("too late: nobody waits for this answer any more")


def _is_over(error: Exception) -> bool:
    """Whether Flower has given a task up, on which nobody has worked for a minute, and answered."""
    over = (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN)
    return isinstance(error, httpx.HTTPStatusError) and error.response.status_code in over


def _serve_task(
    link: Link,
    token: str,
    app: ClientApp,
    going: Callable[[], bool],
    log: Callable[[str], None],
) -> None:
    with link.client(token) as beats, link.client(token, _persistent(going)) as client:
        beating = _heartbeat(beats)
        context: Context | None = None
        status, details = SubStatus.FAILED, ""
        try:
            message, context, _, _ = pull_task_input(client)
            begun, what = time.monotonic(), message.metadata.group_id
            try:
                reply = app(message, context)
                status = SubStatus.COMPLETED
                log(f"{what}: done in {time.monotonic() - begun:.1f} s")
            except Exception as error:
                log(f"{what}: {type(error).__name__}: {' '.join(str(error).split())}")
                details = public_message(error)
                code = ErrorCode.CLIENT_APP_RAISED_EXCEPTION
                reply = Message(Error(code, details), reply_to=message)
            push_message(client, reply, context)
        finally:
            push_task_output(client, context, status, details)
            if beating.is_running:
                beating.stop()


def _heartbeat(client: RuntimeHttpClient) -> HeartbeatSender:
    """Keep telling Flower that a task is being worked on."""

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
