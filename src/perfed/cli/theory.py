"""`perfed diagnose` and `advise`."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.markup import escape

from perfed.cli.arguments import ConfigFile, Settings
from perfed.cli.console import (
    check_folder_of,
    check_picture,
    err,
    errors_shown,
    out,
    write_report,
)
from perfed.core.errors import ConfigError

if TYPE_CHECKING:
    from perfed.theory import Study

On = Literal["labels", "features"]


def diagnose_command(
    what: Annotated[
        Path, typer.Argument(metavar="CONFIG|DIR", help="A TOML file, or the folder of a run.")
    ],
    settings: Settings = None,
    after: Annotated[
        int | None,
        typer.Option(metavar="ROUNDS", min=1, help="Also measure after so many rounds."),
    ] = None,
    distances: Annotated[
        On, typer.Option(help="What distances between clients are of; features take longer.")
    ] = "labels",
    picture: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw the clients' distances (.png, .svg or .pdf)."),
    ] = None,
    file: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Also write all as JSON there.")
    ] = None,
) -> None:
    """Measure a federation and check the conditions of the theorems on its method.

    Of CONFIG the first model is measured; of a finished run its last, and its report gets a panel.
    """
    with errors_shown():
        from perfed.report.figures import distance_picture
        from perfed.runs import run_dir
        from perfed.runs.files import write_whole

        if file is not None:
            check_folder_of(file)
        folder = what if what.is_dir() else None
        if folder is not None and (settings or after):
            raise ConfigError("--set and --after are for a CONFIG; a run has its settings already")
        if picture is not None:
            check_picture(picture)
        study, names = _studied(what, settings or [], after, distances)
        theory = study.as_json()
        written = json.dumps(theory, indent=1, allow_nan=False).encode()
        _show_theory(theory)
        if picture is not None:
            found = study.differences
            caption = f"{found.method}, {found.on}"
            distance_picture(found.matrix, found.group, names, caption, picture)
            out.print(f"picture: {picture}")
        if file is not None:
            write_whole(file, written)
            out.print(f"written to {file}")
        if folder is not None:
            write_whole(folder / run_dir.THEORY, written)
            out.print(f"a panel of it is in {write_report([folder])}")


def _studied(
    what: Path, settings: list[str], after: int | None, on: On
) -> tuple["Study", tuple[str, ...]]:
    from perfed.runs import run_dir
    from perfed.runs.adapt import load_model
    from perfed.runs.config import Config
    from perfed.runs.factories import factories_of
    from perfed.runs.recording import recorded_config
    from perfed.theory import study

    with err.status("reading the data") as status:

        def log(line: str) -> None:
            status.update(f"measuring: {line}")

        of_run = what.is_dir()
        if of_run:
            run_dir.read_run(what)  # refuses what is not a finished run
        config = recorded_config(what) if of_run else Config.load(what, settings)
        engine = config.build()
        models: list[tuple[str, Any]] = [("the first model", None)]
        if of_run:
            last = load_model(what / run_dir.MODEL, factories_of(config.model.settings())).params
            models.append((f"the run's last (round {config.rounds})", last))
        elif after:
            log(f"{after} rounds")
            later = engine.advance(engine.init(), after)
            models.append((f"that after {after} rounds", engine.experiment.common_model(later)))
        found = study(engine, config.rounds, models, on, log=log)
        return found, engine.experiment.federation.names


def _show_theory(theory: dict[str, Any]) -> None:
    from perfed.report.tables import theory_tables
    from perfed.report.theory_text import bound_line, distance_line, number

    constants, conditions = theory_tables(theory)
    out.print(constants)
    out.print(distance_line(theory))
    out.print(conditions)
    for condition in theory["conditions"]:
        if not condition["holds"]:
            note = f"{condition['text']} ({condition['source']}): {condition['risk']}"
            out.print(f"[yellow]note[/] {escape(note)}", soft_wrap=True)
    if theory["derived"]:
        derived = ", ".join(f"{name} {number(value)}" for name, value in theory["derived"].items())
        out.print(f"from the constants: {derived}", soft_wrap=True)
    for bound in theory["bounds"]:
        terms = ", ".join(f"{name} {number(value)}" for name, value in bound["terms"].items())
        out.print(f"{bound_line(bound)[:-1]}: {terms}", soft_wrap=True)
    if theory["note"]:
        out.print(f"[yellow]note[/] {escape(theory['note'])}", soft_wrap=True)
    elif not theory["bounds"]:
        out.print(f"no bound of the papers' theorems applies to this run of {theory['method']}")


def advise_command(
    config: ConfigFile,
    settings: Settings = None,
    target_bytes: Annotated[
        float | None,
        typer.Option(metavar="BYTES", min=1, help="What all uplink messages may take."),
    ] = None,
    target_time: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", min=0, help=r"What the run may take over its \[network]."),
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE", help="The new file; default: CONFIG-advised.toml."),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace FILE if it is there already.")
    ] = False,
) -> None:
    """Propose settings for a federation, say why, and write them as a file that is ready to run.

    They come from measured constants and a short pilot on a part of the clients' training data.
    """
    file = file or config.with_name(f"{config.stem}-advised.toml")
    with errors_shown():
        from perfed.report.tables import advice_table
        from perfed.report.theory_text import advice_file
        from perfed.runs.config import Config, overridden, read_toml
        from perfed.runs.files import write_whole
        from perfed.theory import advise

        check_folder_of(file)
        if file.exists() and not overwrite:
            raise ConfigError(f"--out {file}: it is there already; add --overwrite to replace it")
        values = overridden(read_toml(config), settings or [])
        Config.checked(values)
        with err.status("reading the data") as status:
            advice = advise(values, target_bytes, target_time, lambda line: status.update(line))
        out.print(advice_table(advice))
        write_whole(file, advice_file(advice, str(config)).encode())
        given, best = advice.given, advice.trials[0]
        out.print(
            f"validation loss in the pilot: {given.loss:.4g} as given (round {given.rounds}), "
            f"{best.loss:.4g} as advised (round {best.rounds})"
        )
        out.print(f"written to {file}; run it by: perfed run {file}", soft_wrap=True)
