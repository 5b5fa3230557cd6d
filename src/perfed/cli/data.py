"""`perfed data`: look at data before training on them."""

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from perfed.cli.arguments import ConfigFile, Settings
from perfed.cli.console import check_picture, errors_shown, out


def describe_command(
    config: ConfigFile,
    settings: Settings = None,
    picture: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Where the picture goes (.png, .svg or .pdf)."),
    ] = None,
) -> None:
    """Show a federation: its clients' sizes and labels, and how much they differ.

    Also draws who holds which labels, by default into CONFIG-labels.png.
    """
    picture = picture or Path(f"{config.stem}-labels.png")
    with errors_shown():
        from perfed.data.describe import Description, remarks
        from perfed.report.figures import label_picture
        from perfed.report.tables import data_table
        from perfed.runs.config import DataConfig

        read = DataConfig.load(config, settings or [])
        check_picture(picture)
        facts = Description.of(read.build_federation())
        kind = "a regression" if facts.labels is None else f"{len(facts.labels)} classes"
        out.print(f"[bold]{len(facts.names)} clients[/], {kind}")
        out.print(data_table(facts))
        for remark in remarks(facts):
            out.print(f"[yellow]note[/] {escape(remark)}", soft_wrap=True)
        if facts.labels is not None:
            label_picture(facts, picture)
            out.print(f"picture: {picture}")
        else:
            out.print("no picture: a regression has no labels to draw")


def store_command(
    config: ConfigFile,
    folder: Annotated[Path, typer.Option("--out", metavar="DIR", help="A new folder.")],
    settings: Settings = None,
) -> None:
    """Write a federation into files that are read where they lie, as `source = "stored"`."""
    with errors_shown():
        from perfed.data.stored import check_free, store
        from perfed.runs.config import DataConfig

        read = DataConfig.load(config, settings or [])
        check_free(folder)
        federation = read.build_federation()
        store(federation, folder)
        out.print(f"{federation.clients:,} clients, written to {escape(str(folder))}")
        out.print(f'use them by  \\[data]  source = "stored"  root = "{escape(str(folder))}"')


def list_command() -> None:
    """List the sources and the splits, and which sources can be used here at once."""
    with errors_shown():
        from perfed.data.catalog import list_sources, list_splits
        from perfed.report.tables import catalog_table

        out.print(catalog_table(list_sources(), "Sources"))
        out.print(catalog_table(list_splits(), "Splits"))
        out.print("Folders that are searched: \\[data] root, then $PERFED_DATA, then the cache.")
