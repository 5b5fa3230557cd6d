"""Arguments that several commands have."""

from pathlib import Path
from typing import Annotated

import typer

ConfigFile = Annotated[Path, typer.Argument(help="A TOML file.", show_default=False)]
OptionalConfigFile = Annotated[Path | None, typer.Argument(help="A TOML file.", show_default=False)]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Override a setting; repeatable."),
]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace results that DIR holds already.")
]
AllowFactory = Annotated[
    list[str] | None,
    typer.Option(
        "--allow-factory",
        metavar="MODULE:FUNCTION",
        help="A Python function installed here that may make the model; repeatable.",
    ),
]
HostList = Annotated[
    str | None,
    typer.Option(
        "--hosts",
        metavar="N|HOST:PORT,HOST,...|auto",
        help="Compute on several: so many processes here; these machines, on each of which the "
        "same command runs; or those of Slurm or Open MPI.",
    ),
]
Rank = Annotated[
    int | None,
    typer.Option(min=0, help="Which of the hosts this is, if their names do not tell."),
]
