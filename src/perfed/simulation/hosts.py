"""Several processes, on one machine or several, that compute one run together.

Each of them runs the same program on devices of its own, and JAX connects the devices. What only
one of them can know (what time it is, what is on its disk) the first decides for all.
"""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, TypeVar, final

import jax
import numpy as np
from jax.experimental import multihost_utils

from perfed.core.errors import BroadcastError, ConfigError, DataError, FieldError, require

# The rank may be given by a launcher.
RANK: Final = "PERFED_RANK"
AUTO: Final = "auto"
# Whether this process ends with the one that started it, whose end of a pipe is closed then.
_TIED: Final = "PERFED_TIED"
# An error of one process is sent to the others in so many bytes.
_MESSAGE: Final = 2048
# A process that others do not follow when it ends has so many seconds to end by itself.
_GRACE: Final = 20.0

_Given = TypeVar("_Given")


@final
@dataclass(frozen=True)
class Hosts:
    """Who computes a run.

    Attributes:
        names: the machines; the first coordinates. None: given by the launcher.
        port: the coordinator's.
        rank: which of them this process is.
    """

    names: tuple[str, ...] | None
    port: int = 0
    rank: int = 0

    @classmethod
    def read(cls, text: str, rank: int | None) -> "Hosts":
        """From `HOST:PORT,HOST,...`, or `auto` under Slurm or Open MPI."""
        if text == AUTO:
            require(rank is None, "--rank", rank, "is set by the launcher where --hosts is auto")
            return cls(None)
        first, *others = (part.strip() for part in text.split(","))
        host, colon, port = first.rpartition(":")
        good = colon and host and port.isdigit() and 0 < int(port) < 65536 and all(others)
        allowed = "write HOST:PORT,HOST,..., a number of processes on this machine, or auto"
        require(bool(good), "--hosts", text, allowed)
        names = (host.strip("[]"), *others)
        given = os.environ.get(RANK, "") if rank is None else str(rank)
        if not given:
            return cls(names, int(port), _own_place(names))
        fits = given.isdigit() and int(given) < len(names)
        require(fits, "--rank", given, f"must be between 0 and {len(names) - 1}")
        return cls(names, int(port), int(given))

    def connect(self, seconds: int = 300) -> None:
        """Meet the others; before JAX has started."""
        # How CPUs communicate; accelerators have their own way.
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        try:
            self._initialize(seconds)
            _check_devices()
            with _without_stdout():
                multihost_utils.sync_global_devices("met")
        except BroadcastError:
            raise  # they are connected, and do not fit together
        except (RuntimeError, ValueError) as error:
            reason = str(error).splitlines()[0]
            raise ConfigError(
                f"--hosts: the processes could not connect within {seconds} s: {reason}"
            ) from None

    def _initialize(self, seconds: int) -> None:
        if self.names is None:
            jax.distributed.initialize(initialization_timeout=seconds)
            return
        host = f"[{self.names[0]}]" if ":" in self.names[0] else self.names[0]
        jax.distributed.initialize(
            f"{host}:{self.port}",
            len(self.names),
            self.rank,
            initialization_timeout=seconds,
            cluster_detection_method="deactivate",
        )


def _check_devices() -> None:
    """All processes have the same number of devices, as JAX requires."""
    counts = Counter(device.process_index for device in jax.devices())
    if len(set(counts.values())) > 1:
        listed = ", ".join(f"process {rank} has {n}" for rank, n in sorted(counts.items()))
        raise BroadcastError(
            f"--hosts: {listed} devices; set PERFED_DEVICES to the smallest number for all"
        )


@contextmanager
def _without_stdout() -> Iterator[None]:
    """CPUs tell on standard output that they have met, where results are meant to go."""
    sys.stdout.flush()
    saved, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    try:
        yield
    finally:
        os.dup2(saved, 1)
        os.close(saved)
        os.close(nowhere)


def _own_place(names: Sequence[str]) -> int:
    """This machine's place in the list, by name or address."""
    own = {socket.gethostname(), socket.gethostname().partition(".")[0], socket.getfqdn()}
    for name in names:
        try:
            found = {info[4][0] for info in socket.getaddrinfo(name, None)}
        except OSError:
            continue
        if any(_is_here(str(address)) for address in found):
            own.add(name)
    places = [i for i, name in enumerate(names) if name in own]
    allowed = f"this machine is {len(places)} of these; choose one by --rank"
    require(len(places) == 1, "--hosts", ",".join(names), allowed)
    return places[0]


def _is_here(address: str) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def is_multihost() -> bool:
    """Whether this process is one of several."""
    return int(jax.process_count()) > 1


def is_first() -> bool:
    """Whether this process is the first: the one that speaks and writes."""
    return int(jax.process_index()) == 0


@contextmanager
def exit_together() -> Iterator[None]:
    """A process that fails reports to the others at once, and does not wait for them."""
    try:
        yield
    except BaseException as error:
        code = getattr(error, "exit_code", 1)
        if not hasattr(error, "exit_code"):
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        # The usual end waits until all have come to theirs, which they may never do.
        os._exit(code)


def agree(value: int) -> int:
    """The value of the first process."""
    return int(multihost_utils.broadcast_one_to_all(np.int32(value))) if is_multihost() else value


def broadcast(contents: bytes | None) -> bytes | None:
    """Some bytes of the first process; None, if it has none."""
    if not is_multihost():
        return contents
    length = agree(-1 if contents is None else len(contents))
    if length < 0:
        return None
    buffer = np.zeros(length, np.uint8)
    if is_first() and contents is not None:
        buffer[:] = np.frombuffer(contents, np.uint8)
    return bytes(np.asarray(multihost_utils.broadcast_one_to_all(buffer)).astype(np.uint8))


def prepare_together(
    prepare: Callable[[], _Given], same: Callable[[_Given], Sequence[tuple[str, str]]]
) -> _Given:
    """Prepare in every process; an error in one, or a difference between them, is an error in all.

    Args:
        prepare: what each does for itself.
        same: what must be the same in all, of what came of it: (what it is called, value) pairs.
    """
    if not is_multihost():
        return prepare()
    made, fault = None, ""
    facts: list[tuple[str, str]] = []
    try:
        made = prepare()
        facts = list(same(made))
    except (ConfigError, DataError, FieldError) as error:
        fault = str(error)
    for rank, message in enumerate(_gather(fault)):
        if message:
            raise BroadcastError(f"process {rank}: {message}")
    for what, value in facts:
        everyones = _gather(value)
        for rank, said in enumerate(everyones):
            if said != everyones[0]:
                raise BroadcastError(
                    f"process {rank} has another {what} than process 0; make them the same"
                )
    assert made is not None
    return made


def _gather(text: str) -> list[str]:
    """The texts of all processes, cut where they are long."""
    buffer = np.zeros(_MESSAGE, np.uint8)
    raw = text.encode()[:_MESSAGE]
    buffer[: len(raw)] = np.frombuffer(raw, np.uint8)
    everyones = np.asarray(multihost_utils.process_allgather(buffer)).reshape(-1, _MESSAGE)
    return [bytes(row).rstrip(b"\0").decode(errors="replace") for row in everyones.astype(np.uint8)]


def exit_with_parent() -> None:
    """Of a process that `start_here` has started: its end, if its parent ends, however it does."""
    if os.environ.pop(_TIED, None) is None:
        return

    def wait() -> None:
        while os.read(0, 1):
            pass
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def start_processes(count: int, arguments: Sequence[str]) -> int:
    """Run a command in so many processes on this machine, each with its share of the cores.

    Returns:
        The exit code of the first that failed, or 0.
    """
    require(count >= 1, "--hosts", count, "must be at least 1")
    names = ",".join([f"127.0.0.1:{free_port()}", *["127.0.0.1"] * (count - 1)])
    command = [sys.executable, "-P", "-m", "perfed", *arguments, "--hosts", names]
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(count):
            with _on_cores(rank, count):
                quiet = None if rank == 0 else subprocess.DEVNULL
                processes.append(
                    subprocess.Popen(
                        [*command, "--rank", str(rank)],
                        env=os.environ | {_TIED: "1"},
                        stdin=subprocess.PIPE,
                        stdout=quiet,
                    )
                )
        while all(process.poll() in (None, 0) for process in processes):
            if all(process.poll() == 0 for process in processes):
                return 0
            time.sleep(0.05)
    except KeyboardInterrupt:
        # The others know of it, too.
        _end(processes)
        raise
    # One has failed; the others learn of it, and have some time to report it.
    _end(processes)
    return next(code for process in processes if (code := process.returncode) != 0)


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    deadline = time.monotonic() + _GRACE
    for process in processes:
        try:
            process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()


@contextmanager
def _on_cores(rank: int, count: int) -> Iterator[None]:
    """A process that is started here has its share of the cores, or one of them."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    cores = sorted(os.sched_getaffinity(0))
    # As many for each, or one, which some then share.
    own = cores[rank::count][: max(1, len(cores) // count)] or [cores[rank % len(cores)]]
    os.sched_setaffinity(0, own)
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def free_port() -> int:
    """A free port of this machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
