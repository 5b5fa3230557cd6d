"""What the commands show, and how errors end them."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import typer
from rich.console import Console
from rich.markup import escape

from perfed.core.errors import BroadcastError, ConfigError, DataError, DivergedError, FieldError

if TYPE_CHECKING:
    from perfed.runs.summary import LocalRun
    from perfed.training import Progress, Result

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)


def log(line: str) -> None:
    """Something that a user should know, on standard error."""
    err.print(escape(line), soft_wrap=True)


@contextmanager
def errors_shown() -> Iterator[None]:
    """Say what went wrong in a line or two, not in a traceback."""
    try:
        yield
    except (ConfigError, DataError, FieldError) as error:
        _show_error(error)
        raise typer.Exit(2) from None
    except (DivergedError, OSError) as error:
        _show_error(error)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        err.print("interrupted")
        raise typer.Exit(130) from None


def _show_error(error: Exception) -> None:
    console, who = err, ""
    # An error of one process alone is reported by itself, others by the first process.
    if err.quiet and not isinstance(error, BroadcastError | ConnectionError | DivergedError):
        import jax

        console, who = Console(stderr=True), f"process {jax.process_index()}: "
    for line in str(error).splitlines():
        console.print(f"[bold red]error[/] {who}{escape(line)}", soft_wrap=True)


def check_folder_of(file: Path) -> None:
    """Raise unless a file can be made there."""
    if not file.absolute().parent.is_dir():
        raise ConfigError(f"--out {file}: there is no folder {file.parent}")


def check_picture(picture: Path) -> None:
    """Raise unless a picture can be made there."""
    if picture.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise ConfigError(f"--picture {picture}: must end in .png, .svg or .pdf")
    if not picture.parent.is_dir():
        raise ConfigError(f"--picture {picture}: there is no folder {picture.parent}")


@contextmanager
def progress_shown() -> Iterator["ProgressLines"]:
    """Within this, the progress of runs is shown, one line per run."""
    from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("round {task.completed:.0f}/{task.total:.0f}"),
        TextColumn("loss {task.fields[loss]:.3f}"),
        TextColumn("{task.fields[pace]}"),
        TimeRemainingColumn(),
    )
    with Bar(*columns, console=err) as bar:
        yield ProgressLines(bar)


@final
class ProgressLines:
    """Feeds runs' progress to a bar."""

    def __init__(self, bar: Any) -> None:
        self._bar = bar
        self._lines: dict[str, Any] = {}

    def __call__(self, label: str, progress: "Progress") -> None:
        """How far the run of this label has come."""
        if label not in self._lines:
            self._lines[label] = self._bar.add_task(
                escape(label), total=progress.rounds, loss=progress.loss, pace="compiling"
            )
            return
        line = self._lines[label]
        self._bar.update(line, completed=progress.round, loss=progress.loss)
        task = self._bar.tasks[line]
        speed = task.finished_speed or task.speed  # of the last seconds: compiling does not count
        if speed:
            self._bar.update(line, pace=f"{speed:.0f} rounds/s")


def show_result(result: "Result", local: "LocalRun | None" = None) -> None:
    """A run's scores, who is worse off by it, time and bytes."""
    from perfed.report.tables import cost_line, result_table, worse_off_lines

    out.print(result_table(result))
    for line in worse_off_lines(result, local):
        out.print(line, soft_wrap=True)
    out.print(f"{result.seconds:.1f} s, {result.rounds / result.seconds:.3g} rounds/s in all")
    out.print(cost_line(result))


def write_report(folders: list[Path], page: Path | None = None) -> Path:
    """One page of runs; by default in the folder of the first."""
    from perfed.report.page import report_page
    from perfed.runs import run_dir
    from perfed.runs.files import write_whole

    runs = [run_dir.read_run(folder) for folder in folders]
    page = page or folders[0] / run_dir.REPORT
    title = folders[0].name if len(folders) == 1 else f"{len(folders)} runs"
    write_whole(page, report_page(runs, title).encode())
    return page


def show_written(folder: Path) -> None:
    """Write a run's report, and print where it is."""
    page = write_report([folder])
    out.print(f"written to {escape(str(folder))}; look at it in {escape(str(page))}")


def arguments() -> list[str]:
    """What this command was called with."""
    return sys.argv[1:]
