"""A federation on the terminal: one line per client, and a log of events."""

import time
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import Any, Final, Self, final

from rich.console import Console, Group
from rich.filesize import decimal
from rich.live import Live
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from perfed.training import Progress

_STYLES: Final = {
    "replied": "green", "working": "cyan", "connected": "green", "late": "bold yellow",
    "failed": "bold red", "away": "dim",
}  # fmt: skip


@final
class LiveTable:
    """Shows a federation while it runs, and keeps a log of what happened.

    On a terminal the clients are a table that is kept up to date; elsewhere there are lines only.
    """

    def __init__(self, console: Console, log: Path) -> None:
        self._console, self._log = console, log
        self._clients: Any = None
        self._progress: Progress | None = None
        self._lock = Lock()
        self._live = Live(get_renderable=self._drawn, console=console, refresh_per_second=2)

    def __enter__(self) -> Self:
        self._log.parent.mkdir(parents=True, exist_ok=True)
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._console.is_terminal:
            self._live.stop()
        if error is not None:
            self._write(f"ended: {type(error).__name__}: {error}")

    def watch(self, clients: Any) -> None:
        """These are the clients: `statuses` by name, each with what it is doing."""
        self._clients = clients

    def log(self, line: str) -> None:
        """An event: shown, and written to the log."""
        self._write(line)
        self._console.print(f"[dim]{time.strftime('%H:%M:%S')}[/] {escape(line)}", soft_wrap=True)

    def progress(self, progress: Progress) -> None:
        """How far the run has come."""
        self._progress = progress
        line = f"round {progress.round} of {progress.rounds}, mean loss {progress.loss:.4g}"
        self._write(line)
        if not self._console.is_terminal:
            self._console.print(f"[dim]{time.strftime('%H:%M:%S')}[/] {line}")

    def _write(self, line: str) -> None:
        with self._lock, self._log.open("a", encoding="utf-8") as file:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {line}\n")

    def _drawn(self) -> Group | Text:
        if self._clients is None:
            return Text("starting", style="dim")
        table = Table("client", "", "rounds", "sent", "received", "", box=None, pad_edge=False)
        for name, status in list(self._clients.statuses.items()):
            since = time.monotonic() - status.since
            style = _STYLES.get(status.activity, "")
            table.add_row(
                escape(name),
                Text(f"{status.activity} {since:.0f} s", style=style),
                str(status.rounds),
                decimal(status.uplink_bytes),
                decimal(status.downlink_bytes),
                Text(status.fault[:60], style="red"),
            )
        if self._progress is None:
            return Group(table)
        done, rounds, loss = self._progress
        bar = Table.grid(padding=(0, 1))
        line = f"round {done}/{rounds}" + ("" if loss != loss else f", loss {loss:.4g}")
        bar.add_row(ProgressBar(total=rounds, completed=done, width=40), line)
        return Group(bar, table)
