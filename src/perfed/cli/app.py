"""The command line. It reads arguments and shows results; everything else is elsewhere."""

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Literal, final

import jax
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from perfed.core.errors import ConfigError, DataError, DivergedError, FieldError, ToldError
from perfed.data.catalog import sources_listed, splits_listed
from perfed.data.describe import Description, remarks
from perfed.data.stored import check_free, store
from perfed.papers import Reproduction, Results, check_folder, names, reproduce
from perfed.report.figures import distance_picture, label_picture
from perfed.report.tables import (
    adapted_table,
    advice_table,
    catalog_table,
    comparison_table,
    cost_line,
    data_table,
    result_table,
    sweep_table,
    theory_tables,
)
from perfed.report.theory_text import advice_file, bound_line, distance_line, number
from perfed.runs import Config, run_dir
from perfed.runs import Progress as RunProgress
from perfed.runs.adapt import adapt, client_rows, load_model
from perfed.runs.comparison import Row, compare, comparison, rows_of
from perfed.runs.config import DataConfig, overridden, read_toml
from perfed.runs.files import write_whole
from perfed.runs.recording import Recording, in_common, read_left, recorded_config
from perfed.runs.summary import summarize, summary_bytes
from perfed.runs.sweep import Sweep, lines, points
from perfed.simulation import Engine, Rounds, hosts
from perfed.theory import On, Study, advise, study
from perfed.training.trainer import Result

Table = Literal["markdown", "latex"]

# Arguments that several commands have.
ConfigFile = Annotated[Path, typer.Argument(help="A TOML file.", show_default=False)]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Override a setting; repeatable."),
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
    typer.Option(min=0, help="Which of the hosts this is, if their names do not say."),
]

app = typer.Typer(
    name="perfed",
    help="Personalized federated learning, exactly as published.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
data_app = typer.Typer(help="Look at data before training on them.", no_args_is_help=True)
app.add_typer(data_app, name="data")
out = Console(highlight=False)
err = Console(stderr=True, highlight=False)


@app.callback(invoke_without_command=True)
def perfed(
    show_version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.")
    ] = False,
) -> None:
    """Personalized federated learning, exactly as published."""
    if show_version:
        out.print(f"perfed {version('perfed')}")
        raise typer.Exit


@app.command("run")
def run_command(
    config: Annotated[
        Path | None,
        typer.Argument(help="A TOML file.", show_default=False),
    ] = None,
    settings: Settings = None,
    seed: Annotated[int | None, typer.Option(help="Override the seed of the run.")] = None,
    out_dir: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="The folder to record the run in.")
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace results that DIR holds already.")
    ] = False,
    on: HostList = None,
    rank: Rank = None,
) -> None:
    """Train on a federation and score every client.

    CONFIG is a TOML file. Without one, the built-in comparison of all methods runs.
    """
    fixed = {} if seed is None else {"seed": seed}
    with _errors_shown():
        if config is None:
            if on is not None:
                raise ConfigError("--hosts: give a CONFIG; the comparison runs on one machine")
            _run_comparison(settings or [], fixed, out_dir, overwrite)
            return

        def load() -> Config:
            return Config.load(config, settings or [], **fixed)

        def check() -> None:
            load()
            if out_dir is not None:
                run_dir.check_vacant(out_dir, overwrite)

        with _on_hosts(on, rank, check):
            _run_one(load, out_dir, overwrite)


@data_app.command("describe")
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
    with _errors_shown():
        read = DataConfig.load(config, settings or [])
        _check_picture(picture)
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


@data_app.command("store")
def store_command(
    config: ConfigFile,
    folder: Annotated[Path, typer.Option("--out", metavar="DIR", help="A new folder.")],
    settings: Settings = None,
) -> None:
    """Write a federation into files that are read where they lie, as `source = "stored"`."""
    with _errors_shown():
        read = DataConfig.load(config, settings or [])
        check_free(folder)
        federation = read.build_federation()
        store(federation, folder)
        out.print(f"{federation.clients:,} clients, written to {escape(str(folder))}")
        out.print(f'use them by  \\[data]  source = "stored"  root = "{escape(str(folder))}"')


@data_app.command("list")
def list_command() -> None:
    """List the sources and the splits, and which sources can be used here at once."""
    out.print(catalog_table(sources_listed(), "Sources"))
    out.print(catalog_table(splits_listed(), "Splits"))
    out.print("Folders that are searched: \\[data] root, then $PERFED_DATA, then the cache.")


def _run_one(load: Callable[[], Config], out_dir: Path | None, overwrite: bool) -> None:
    def prepare() -> tuple[Config, Engine | Recording]:
        config = load()
        if out_dir is None:
            return config, config.build()
        if hosts.leads():
            run_dir.check_vacant(out_dir, overwrite)
        return config, Recording.planned(config, out_dir)

    config, made = hosts.ready_together(
        prepare, lambda pair: in_common(pair[0], _engine_of(pair[1]).setup.federation)
    )
    if isinstance(made, Engine):
        engine = made
        try:
            with _progress() as show:
                result = config.run(engine, lambda progress: show(config.method.name, progress))
        except KeyboardInterrupt:
            err.print("nothing was written, for want of --out")
            raise
        _show_result(result)
        return
    made.begin_folder()
    _record(made)


def _engine_of(made: Engine | Recording) -> Rounds:
    return made.engine if isinstance(made, Recording) else made


@contextmanager
def _on_hosts(on: str | None, rank: int | None, check: Callable[[], None]) -> Iterator[None]:
    """Be one of the processes that compute a run, or start as many of them here."""
    if on is None:
        if rank is not None:
            raise ConfigError("--rank: is one of --hosts, which are not given")
        yield
        return
    if on.isdigit():
        check()
        raise typer.Exit(hosts.start_here(int(on), sys.argv[1:]))
    hosts.end_with_parent()
    hosts.Hosts.read(on, rank).connect()
    # One of them speaks for all.
    out.quiet = err.quiet = not hosts.leads()
    with hosts.ending_together(), _errors_shown():
        try:
            yield
        except jax.errors.JaxRuntimeError as error:
            said = str(error).splitlines()[0]
            raise ConnectionError(
                f"the processes have lost each other, or one has failed: {said}"
            ) from None


@app.command("resume")
def resume_command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder of a run.")],
    config: Annotated[
        Path | None,
        typer.Argument(help="The TOML file of the run, to be sure it is the same."),
    ] = None,
    on: HostList = None,
    rank: Rank = None,
) -> None:
    """Go on with a run that was interrupted, from its last checkpoint."""
    with _errors_shown(), _on_hosts(on, rank, lambda: None):
        left = read_left(folder)

        def prepare() -> Recording:
            given = None if config is None else Config.load(config)
            return Recording.take_up(folder, given, left=left)

        _record(
            hosts.ready_together(prepare, lambda r: in_common(r.config, r.engine.setup.federation))
        )


@app.command("report")
def report_command(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR...", help="Folders of runs.")],
    page: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE", help="The page; default: report.html in the first."),
    ] = None,
    figures: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Also write PNG and SVG figures there.")
    ] = None,
    table: Annotated[
        Table | None, typer.Option(help="Print the headline table for a paper instead.")
    ] = None,
) -> None:
    """Make one page of one or several runs, which opens offline in any browser.

    Runs that differ only in their seed are shown together, with 95 % intervals.
    """
    from perfed.report.paper import latex_table, markdown_table, write_figures

    with _errors_shown():
        if table is not None:
            runs = [run_dir.read_run(folder) for folder in folders]
            typer.echo({"latex": latex_table, "markdown": markdown_table}[table](runs))
            return
        out.print(f"written to {_write_report(folders, page)}")
        if figures is not None:
            written = write_figures([run_dir.read_run(folder) for folder in folders], figures)
            out.print(f"{len(written)} figures in {figures}")


@app.command("sweep")
def sweep_command(
    config: ConfigFile,
    folder: Annotated[Path, typer.Option("--out", metavar="DIR", help="Where all is recorded.")],
    seeds: Annotated[int, typer.Option(min=1, help="How many seeds: 0, 1, 2, ....")] = 5,
    grid: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=V,V", help="Values to choose between; repeatable."),
    ] = None,
    methods: Annotated[
        str | None, typer.Option(metavar="FILE,FILE", help="TOML files with a [method] each.")
    ] = None,
    settings: Settings = None,
    validation: Annotated[
        float, typer.Option(help="The part of the training data that points are compared on.")
    ] = 0.25,
) -> None:
    """Run several seeds, settings and methods, each in a folder of its own, and compare them.

    Settings are chosen on a validation part of the clients' training data, never on held-out data.
    The same command goes on where it was interrupted.
    """
    with _errors_shown():
        files = [Path(name) for name in methods.split(",")] if methods else []
        every = points(config, files, grid or [], settings or [])
        sweep = Sweep(tuple(every), seeds, folder, validation)
        with _progress() as show:
            outcomes = sweep.run(show, _say)
        out.print(sweep_table(lines(outcomes), seeds))
        out.print(f"written to {escape(str(folder))}")
        if not any(outcome.tested and outcome.scores for outcome in outcomes):
            raise typer.Exit(1)


@app.command("reproduce")
def reproduce_command(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="Which; --list shows them.")
    ] = None,
    seeds: Annotated[
        int | None, typer.Option(min=1, help="How many seeds; default: as the file says.")
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
    with _errors_shown():
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
        with _progress() as show:
            results = reproduce(what, seeds, folder, show, _say)
        _show_reproduced(results)


def _show_reproduced(results: Results) -> None:
    from perfed.report import reproduced  # takes a while to import

    what, folder = results.what, results.folder
    figure = reproduced.draw(results, folder / "figure")[0]
    write_whole(folder / "results.md", reproduced.markdown(results, figure.name).encode())
    out.print(reproduced.terminal_table(results))
    for line in reproduced.order_lines(results) + reproduced.claim_lines(results):
        out.print(escape(line), soft_wrap=True)
    runs = [path.parent for path in sorted(folder.glob(f"runs/*/*/*/{run_dir.SUMMARY}"))]
    for place in dict.fromkeys(run.parent.parent for run in runs):
        page = folder / f"report-{place.name}.html"
        _write_report([run for run in runs if run.parent.parent == place], page)
    out.print("Absolute levels depend on what the paper leaves open:", style="dim")
    out.print(escape(what.choices), style="dim", soft_wrap=True)
    out.print(f"written to {escape(str(folder))}: results.md, {figure.name}, a report for each row")
    if results.failures:
        raise typer.Exit(1)


@app.command("diagnose")
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
    with _errors_shown():
        if file is not None:
            _check_folder_of(file)
        folder = what if what.is_dir() else None
        if folder is not None and (settings or after):
            raise ConfigError("--set and --after are for a CONFIG; a run has its settings already")
        if picture is not None:
            _check_picture(picture)
        study, names = _studied(what, settings or [], after, distances)
        theory = study.as_json()
        written = json.dumps(theory, indent=1, allow_nan=False).encode()
        _show_theory(theory)
        if picture is not None:
            found = study.differences
            told = f"{found.method}, {found.on}"
            distance_picture(found.matrix, found.group, names, told, picture)
            out.print(f"picture: {picture}")
        if file is not None:
            write_whole(file, written)
            out.print(f"written to {file}")
        if folder is not None:
            write_whole(folder / run_dir.THEORY, written)
            out.print(f"a panel of it is in {_write_report([folder])}")


def _studied(
    what: Path, settings: list[str], after: int | None, on: On
) -> tuple[Study, Sequence[str]]:
    with err.status("reading the data") as status:

        def say(line: str) -> None:
            status.update(f"measuring: {line}")

        of_run = what.is_dir()
        if of_run:
            run_dir.read_run(what)  # refuses what is no finished run
        config = recorded_config(what) if of_run else Config.load(what, settings)
        engine = config.build()
        models: list[tuple[str, Any]] = [("the first model", None)]
        if of_run:
            last = load_model(_model_file(what)).params
            models.append((f"the run's last (round {config.rounds})", last))
        elif after:
            say(f"{after} rounds")
            later = engine.advance(engine.start(), after).w
            models.append((f"that after {after} rounds", later))
        found = study(engine, config.rounds, models, on, say=say)
        return found, engine.setup.federation.names


def _show_theory(theory: dict[str, Any]) -> None:
    constants, conditions = theory_tables(theory)
    out.print(constants)
    out.print(distance_line(theory))
    out.print(conditions)
    for condition in theory["conditions"]:
        if not condition["holds"]:
            told = f"{condition['text']} ({condition['source']}): {condition['risk']}"
            out.print(f"[yellow]note[/] {escape(told)}", soft_wrap=True)
    if theory["derived"]:
        derived = ", ".join(f"{name} {number(value)}" for name, value in theory["derived"].items())
        out.print(f"from the constants: {derived}", soft_wrap=True)
    for bound in theory["bounds"]:
        terms = ", ".join(f"{name} {number(value)}" for name, value in bound["terms"].items())
        out.print(f"{bound_line(bound)[:-1]}: {terms}", soft_wrap=True)


@app.command("advise")
def advise_command(
    config: ConfigFile,
    settings: Settings = None,
    target_bytes: Annotated[
        float | None,
        typer.Option(metavar="BYTES", min=1, help="What all uplink messages may take."),
    ] = None,
    target_time: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", min=0, help="What the run may take over its [network]."),
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
    with _errors_shown():
        _check_folder_of(file)
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


@app.command("adapt")
def adapt_command(
    trained: Annotated[
        Path, typer.Argument(metavar="DIR", help="The folder of a run, or a model file.")
    ],
    data: Annotated[
        Path, typer.Option(metavar="FILE", help="The client's own .csv, .parquet or .npz file.")
    ],
    model_out: Annotated[
        Path, typer.Option("--out", metavar="FILE", help="Where the client's own model goes.")
    ],
    steps: Annotated[
        int | None, typer.Option(help="Steps on the client's data; default: as in training.")
    ] = None,
    label: Annotated[
        str | None, typer.Option(help="The column with the label; default: as in training.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the rows held out, and of the batches.")] = 0,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace FILE.")] = False,
) -> None:
    """Fit a trained model to a client that was not there, and compare on its held-out rows."""
    with _errors_shown():
        if model_out.exists() and not overwrite:
            raise ConfigError(f"--out {model_out}: it is there already; add --overwrite")
        if model_out.is_dir():
            raise ConfigError(f"--out {model_out}: is a folder; name a file")
        _check_folder_of(model_out)
        model = load_model(_model_file(trained))
        adapted = adapt(model, client_rows(model.uses, data, label), steps, seed=seed)
        write_whole(model_out, adapted.model.to_bytes())
        out.print(adapted_table(adapted))
        out.print(f"written to {model_out}")


@app.command("predict")
def predict_command(
    model: Annotated[
        Path, typer.Argument(metavar="FILE", help="A model file, or the folder of a run.")
    ],
    data: Annotated[Path, typer.Option(metavar="FILE", help="A .csv, .parquet or .npz file.")],
    predictions: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE", help="A .csv file; default: the terminal."),
    ] = None,
) -> None:
    """Say what a model makes of a file's rows: the classes' names, or a regression's targets."""
    with _errors_shown():
        if predictions is not None:
            if predictions.exists():
                raise ConfigError(f"--out {predictions}: it is there already; name another file")
            _check_folder_of(predictions)
        saved = load_model(_model_file(model))
        pool = client_rows(saved.uses, data, labeled=False)
        said = [str(value) for value in saved.predict(pool.x)]
        text = "\n".join(["prediction", *said]) + "\n"
        if predictions is None:
            typer.echo(text, nl=False)
        else:
            write_whole(predictions, text.encode())
            out.print(f"written to {predictions}")


@app.command("keys")
def keys_command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where all keys go.")],
    hosts: Annotated[
        list[str] | None,
        typer.Option("--host", metavar="HOST", help="What clients call the server; repeatable."),
    ] = None,
    clients: Annotated[
        list[str] | None,
        typer.Option("--client", metavar="NAME", help="A client to make a key for; repeatable."),
    ] = None,
) -> None:
    """Make the keys of a federation: an authority, the server's certificate, a key a client.

    DIR/server goes to the server's machine, DIR/clients/NAME to that client's; ca.key goes nowhere.
    Called again with other names, it adds them.
    """
    with _errors_shown(), _flower_needed():
        from perfed.federation.transport.keys import make_keys

        for path in make_keys(folder, hosts or [], clients or []):
            out.print(f"written to {escape(str(path))}", soft_wrap=True)


@app.command("serve")
def serve_command(
    config: Annotated[Path | None, typer.Argument(help="A TOML file.", show_default=False)] = None,
    keys: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="The server's folder of what `perfed keys` made."),
    ] = None,
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Where clients reach this machine.")
    ] = "0.0.0.0:9443",
    out_dir: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="The folder to record the run in.")
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Go on with the run in this folder, or begin it there."),
    ] = None,
    plain: Annotated[
        bool,
        typer.Option("--insecure", help="Without encryption and keys: for trials in a safe place."),
    ] = False,
    clients: Annotated[
        int | None, typer.Option(min=1, help="How many clients there are; with --insecure only.")
    ] = None,
    settings: Settings = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace results that DIR holds already.")
    ] = False,
) -> None:
    """Serve a federation: wait for its clients, train with them, and record the run.

    After a crash of any kind, `--resume DIR` goes on from the last round; with CONFIG or --set, on
    the terms of their [federation] and [output].
    """
    with _errors_shown(), _flower_needed():
        from perfed.federation.server.plan import PLAN, Plan
        from perfed.federation.server.serve import Server
        from perfed.federation.transport.keys import ServerKeys

        host, port = _address("--listen", listen)
        folder = resume or out_dir
        if folder is None or (resume is not None and out_dir is not None):
            raise ConfigError("give --out DIR for a new run, or --resume DIR to go on with one")
        if plain != (keys is None) or plain != (clients is not None):
            raise ConfigError(
                "give --keys DIR (perfed keys makes them), or --insecure and --clients N"
            )
        own = None if keys is None else ServerKeys.read(keys)
        if resume is None or not (resume / PLAN).exists():
            if config is None:
                raise ConfigError("CONFIG: name the TOML file of the run")
            run_dir.check_vacant(folder, overwrite)
            read = Config.load(config, settings or [])
            names = None if own is None else tuple(own.clients)
            Plan.begun(read, folder, clients or len(names or ()), names)
        elif config is not None or settings:
            Plan.read(folder).on_terms(config, settings or []).write(folder)
        if plain:
            err.print(
                "[bold yellow]in plain[/] messages are not encrypted, and anybody who reaches "
                f"{escape(listen)} can take part",
                soft_wrap=True,
            )
        _federate(Server(folder, host, port, own), folder)


@app.command("join")
def join_command(
    server: Annotated[str, typer.Option(metavar="HOST:PORT", help="The server.")],
    data: Annotated[
        Path, typer.Option(metavar="FILE", help="This client's .csv, .parquet or .npz file.")
    ],
    home: Annotated[
        Path, typer.Option(metavar="DIR", help="What this client keeps, and its own model.")
    ],
    keys: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="This client's folder of what `perfed keys` made."),
    ] = None,
    plain: Annotated[bool, typer.Option("--insecure", help="Without encryption and key.")] = False,
    name: Annotated[
        str, typer.Option(help="What this client is called; with --insecure only.")
    ] = "",
    patience: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", min=0, help="Give up if not let in; default: never."),
    ] = None,
) -> None:
    """Take part in a federation with one's own data, which stay here.

    Stays until it is interrupted: it reconnects, and starts anew what ends.
    """
    with _errors_shown(), _flower_needed():
        from perfed.federation.client.client_dir import Home
        from perfed.federation.client.join import GivenUpError, Member
        from perfed.federation.transport.keys import ClientKeys

        if plain != (keys is None):
            raise ConfigError("give --keys DIR (the server's operator has them), or --insecure")
        if plain != bool(name):
            raise ConfigError("--name goes with --insecure: otherwise the key says who this is")
        own = None if keys is None else ClientKeys.read(keys)
        if plain:
            err.print("[bold yellow]in plain[/] what is sent to the server is not encrypted")
        try:
            Member(server, data, Home(home), own, name, patience).run(_say_with_time)
        except GivenUpError as error:
            raise OSError(str(error)) from None


@app.command("federate")
def federate_command(
    config: Annotated[Path | None, typer.Argument(help="A TOML file.", show_default=False)] = None,
    clients: Annotated[int, typer.Option(min=1, help="How many clients.")] = 3,
    out_dir: Annotated[
        Path, typer.Option("--out", metavar="DIR", help="The folder to record the run in.")
    ] = Path("federated"),
    settings: Settings = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace results that DIR holds already.")
    ] = False,
) -> None:
    """Try a whole federation on this machine: real processes, keys and encryption, on loopback.

    Deals CONFIG's data out to so many clients, each with a file of its own; without CONFIG, a small
    run on the embedded digits.
    """
    with _errors_shown(), _flower_needed():
        from perfed.federation.trial import Trial, trial_config

        run_dir.check_vacant(out_dir, overwrite)
        with err.status("dealing out the data"):
            trial = Trial.prepared(trial_config(config, clients, settings or []), out_dir)
        _federate(trial, out_dir)


def _federate(federation: Any, folder: Path) -> None:
    """Run a federation, show who does what, and then what came of it."""
    from perfed.report.live_table import Board

    with Board(err, folder / "log.txt") as board:
        result = federation.run(board.say, board.progress, board.watch)
    _show_result(result)
    page = _write_report([folder])
    out.print(f"written to {escape(str(folder))}; look at it in {escape(str(page))}")


# What the extra brings, whichever of it is asked for first.
_OF_FLOWER = ("flwr", "cryptography", "httpx", "starlette", "uvicorn")


@contextmanager
def _flower_needed() -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in _OF_FLOWER:
            raise
        raise ConfigError(
            'this needs Flower, which is not installed; pip install "perfed[flower]"'
        ) from None


def _address(option: str, text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not (colon and host and port.isdigit() and 0 < int(port) < 65536):
        raise ConfigError(f"{option} {text}: write it as HOST:PORT")
    return host.strip("[]"), int(port)


def _say_with_time(line: str) -> None:
    err.print(f"[dim]{time.strftime('%H:%M:%S')}[/] {escape(line)}", soft_wrap=True)


def _record(recording: Recording) -> None:
    """Run to the end, or as far as it goes, and show what came of it."""
    name = recording.config.method.name
    with _progress() as show:
        result = recording.run(lambda progress: show(name, progress), _say)
    if not hosts.leads():
        return
    _show_result(result)
    page = _write_report([recording.folder])
    out.print(f"written to {escape(str(recording.folder))}; look at it in {escape(str(page))}")


def _write_report(folders: list[Path], page: Path | None = None) -> Path:
    """One page of runs."""
    from perfed.report.page import report_page  # takes a while to import

    runs = [run_dir.read_run(folder) for folder in folders]
    page = page or folders[0] / run_dir.REPORT
    title = folders[0].name if len(folders) == 1 else f"{len(folders)} runs"
    write_whole(page, report_page(runs, title).encode())
    return page


def _say(line: str) -> None:
    err.print(escape(line), soft_wrap=True)


def _show_result(result: Result) -> None:
    out.print(result_table(result))
    out.print(f"{result.seconds:.1f} s, {result.rounds / result.seconds:.3g} rounds/s in all")
    out.print(cost_line(result))


def _run_comparison(
    settings: list[str], fixed: dict[str, int], out_dir: Path | None, overwrite: bool
) -> None:
    entries = comparison(settings, **fixed)
    if out_dir is not None:
        run_dir.check_vacant(out_dir, overwrite)
    rows: list[Row] = []
    summaries = []
    with _progress() as show:
        for entry, result in compare(entries, show):
            rows += rows_of(entry, result)
            summaries.append(summarize(result, entry.config.resolved()) | {"rows": entry.rows})
    out.print(comparison_table(rows))
    if out_dir is not None:
        out_dir.mkdir(parents=True, exist_ok=True)
        write_whole(out_dir / run_dir.SUMMARY, summary_bytes({"runs": summaries}))
        out.print(f"written to {out_dir / run_dir.SUMMARY}")


def _model_file(path: Path) -> Path:
    """A model file, or a run's."""
    return path / run_dir.MODEL if path.is_dir() else path


def _check_folder_of(file: Path) -> None:
    if not file.absolute().parent.is_dir():
        raise ConfigError(f"--out {file}: there is no folder {file.parent}")


def _check_picture(picture: Path) -> None:
    if picture.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise ConfigError(f"--picture {picture}: must end in .png, .svg or .pdf")
    if not picture.parent.is_dir():
        raise ConfigError(f"--picture {picture}: there is no folder {picture.parent}")


@contextmanager
def _progress() -> Iterator["_Show"]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("round {task.completed:.0f}/{task.total:.0f}"),
        TextColumn("loss {task.fields[loss]:.3f}"),
        TextColumn("{task.fields[pace]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=err) as bar:
        yield _Show(bar)


@final
class _Show:
    """Feeds runs' progress to a bar, one line a run."""

    def __init__(self, bar: Progress) -> None:
        self._bar = bar
        self._lines: dict[str, TaskID] = {}

    def __call__(self, label: str, progress: RunProgress) -> None:
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


@contextmanager
def _errors_shown() -> Iterator[None]:
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
    # What one of several processes alone has met it says itself, though another speaks for all.
    if err.quiet and not isinstance(error, ToldError | ConnectionError | DivergedError):
        console, who = Console(stderr=True), f"process {jax.process_index()}: "
    for line in str(error).splitlines():
        console.print(f"[bold red]error[/] {who}{escape(line)}", soft_wrap=True)


def main() -> None:
    """Entry point of the `perfed` command."""
    app()


if __name__ == "__main__":
    main()
