"""`perfed reproduce`: the papers' tables and figures."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from perfed.cli.console import errors_shown, log, out, progress_shown, write_report
from perfed.core.errors import ConfigError

if TYPE_CHECKING:
    from perfed.papers import Results


def reproduce_command(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="Which; --list shows them.")
    ] = None,
    seeds: Annotated[
        int | None, typer.Option(min=1, help="How many seeds; default: those of the file.")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="A small version: fewer rounds, rows and seeds.")
    ] = False,
    folder: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="Where all goes; default: reproduced/NAME."),
    ] = None,
    listed: Annotated[bool, typer.Option("--list", help="Show what can be reproduced.")] = False,
) -> None:
    """Rebuild a table or figure of the papers, beside the printed numbers.

    The same command goes on where it was interrupted.
    """
    with errors_shown():
        from perfed.papers import Reproduction, check_folder, names, reproduce

        if listed or name is None:
            for known in names():
                what = Reproduction.read(known)
                out.print(f"[bold]{known}[/]  {escape(what.title)}", soft_wrap=True)
            if not listed:
                raise ConfigError("name one of these")
            return
        what = Reproduction.read(name, quick)
        seeds = seeds or what.seeds
        folder = folder or Path("reproduced") / (f"{name}-quick" if quick else name)
        check_folder(folder, what, seeds)
        with progress_shown() as show:
            results = reproduce(what, seeds, folder, show, log)
        _show_reproduced(results)


def _show_reproduced(results: "Results") -> None:
    from perfed.report import reproduced
    from perfed.runs import run_dir
    from perfed.runs.files import write_whole

    what, folder = results.what, results.folder
    figure = reproduced.draw(results, folder / "figure")[0]
    write_whole(folder / "results.md", reproduced.markdown(results, figure.name).encode())
    out.print(reproduced.terminal_table(results))
    for line in reproduced.order_lines(results) + reproduced.claim_lines(results):
        out.print(escape(line), soft_wrap=True)
    runs = [path.parent for path in sorted(folder.glob(f"runs/*/*/*/{run_dir.SUMMARY}"))]
    for place in dict.fromkeys(run.parent.parent for run in runs):
        page = folder / f"report-{place.name}.html"
        write_report([run for run in runs if run.parent.parent == place], page)
    out.print("Absolute levels depend on what the paper leaves open:", style="dim")
    out.print(escape(what.choices), style="dim", soft_wrap=True)
    out.print(f"written to {escape(str(folder))}: results.md, {figure.name}, a report for each row")
    if results.failures:
        raise typer.Exit(1)
