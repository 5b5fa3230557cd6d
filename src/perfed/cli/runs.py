"""`perfed run`, `resume`, `report` and `sweep`."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.markup import escape

from perfed.cli.arguments import ConfigFile, HostList, OptionalConfigFile, Overwrite, Rank, Settings
from perfed.cli.console import (
    err,
    errors_shown,
    log,
    out,
    progress_shown,
    show_result,
    show_written,
    write_report,
)
from perfed.cli.hosts import on_hosts
from perfed.core.errors import ConfigError

if TYPE_CHECKING:
    from perfed.runs.config import Config
    from perfed.runs.recording import Recording

Table = Literal["markdown", "latex"]


def run_command(
    config: OptionalConfigFile = None,
    settings: Settings = None,
    seed: Annotated[int | None, typer.Option(help="Override the seed of the run.")] = None,
    out_dir: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="The folder to record the run in.")
    ] = None,
    overwrite: Overwrite = False,
    hosts: HostList = None,
    rank: Rank = None,
) -> None:
    """Train on a federation and score every client.

    CONFIG is a TOML file. Without one, the built-in comparison of all methods runs.
    """
    fixed = {} if seed is None else {"seed": seed}
    with errors_shown():
        from perfed.runs import run_dir
        from perfed.runs.config import Config

        if config is None:
            if hosts is not None:
                raise ConfigError("--hosts: give a CONFIG; the comparison runs on one machine")
            _run_comparison(settings or [], fixed, out_dir, overwrite)
            return

        def load() -> Config:
            return Config.load(config, settings or [], **fixed)

        def check() -> None:
            load()
            if out_dir is not None:
                run_dir.check_vacant(out_dir, overwrite)

        with on_hosts(hosts, rank, check):
            if out_dir is None:
                _train(load)
            else:
                _record(load, out_dir, overwrite)


def _train(load: Callable[[], "Config"]) -> None:
    """A run without a folder."""
    from perfed.runs.local_run import local_run_for
    from perfed.runs.recording import shared_facts
    from perfed.simulation import Simulator, hosts

    def prepare() -> tuple["Config", Simulator]:
        config = load()
        return config, config.build()

    config, engine = hosts.prepare_together(
        prepare, lambda made: shared_facts(made[0], made[1].experiment.federation)
    )
    for caution in engine.experiment.cautions:
        log(f"caution: {caution}")
    local = local_run_for(config.output.local, engine.experiment.federation)
    try:
        with progress_shown() as show:
            result = config.train(engine, lambda progress: show(config.method_name, progress))
    except KeyboardInterrupt:
        err.print("nothing was written, for want of --out")
        raise
    show_result(result, local)


def _record(load: Callable[[], "Config"], folder: Path, overwrite: bool) -> None:
    """A run with a folder."""
    from perfed.runs import run_dir
    from perfed.runs.recording import Recording, shared_facts
    from perfed.simulation import hosts

    def prepare() -> Recording:
        config = load()
        if hosts.is_first():
            run_dir.check_vacant(folder, overwrite)
        return Recording.prepare(config, folder)

    recording = hosts.prepare_together(
        prepare, lambda made: shared_facts(made.config, made.engine.experiment.federation)
    )
    recording.begin_folder()
    _train_recorded(recording)


def _train_recorded(recording: "Recording") -> None:
    """Train to the end, or as far as it goes, and show what came of it."""
    from perfed.runs.local_run import local_run_for
    from perfed.simulation import hosts

    name = recording.config.method_name
    with progress_shown() as show:
        result = recording.train(lambda progress: show(name, progress), log)
    if hosts.is_first():
        federation = recording.engine.experiment.federation
        show_result(result, local_run_for(recording.config.output.local, federation))
        show_written(recording.folder)


def resume_command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder of a run.")],
    config: Annotated[
        Path | None,
        typer.Argument(help="The TOML file of the run, to be sure it is the same."),
    ] = None,
    hosts: HostList = None,
    rank: Rank = None,
) -> None:
    """Go on with a run that was interrupted, from its last checkpoint."""
    with errors_shown(), on_hosts(hosts, rank, lambda: None):
        from perfed.runs.config import Config
        from perfed.runs.recording import Recording, read_interrupted, shared_facts
        from perfed.simulation.hosts import prepare_together

        interrupted = read_interrupted(folder)

        def prepare() -> Recording:
            given = None if config is None else Config.load(config)
            return Recording.resume(folder, given, interrupted=interrupted)

        _train_recorded(
            prepare_together(
                prepare, lambda r: shared_facts(r.config, r.engine.experiment.federation)
            )
        )


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
    with errors_shown():
        from perfed.report.paper import latex_table, markdown_table, write_figures
        from perfed.runs import run_dir

        if table is not None:
            runs = [run_dir.read_run(folder) for folder in folders]
            typer.echo({"latex": latex_table, "markdown": markdown_table}[table](runs))
            return
        out.print(f"written to {write_report(folders, page)}")
        if figures is not None:
            written = write_figures([run_dir.read_run(folder) for folder in folders], figures)
            out.print(f"{len(written)} figures in {figures}")


def sweep_command(
    config: ConfigFile,
    folder: Annotated[Path, typer.Option("--out", metavar="DIR", help="Where all is recorded.")],
    seeds: Annotated[int, typer.Option(min=1, help="How many seeds: 0, 1, 2, ....")] = 5,
    grid: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=V,V", help="Values to choose between; repeatable."),
    ] = None,
    methods: Annotated[
        str | None, typer.Option(metavar="FILE,FILE", help=r"TOML files, each with a \[method].")
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
    with errors_shown():
        from perfed.report.tables import sweep_table
        from perfed.runs.sweep import Sweep, grid_points, sweep_lines

        files = [Path(name) for name in methods.split(",")] if methods else []
        points = grid_points(config, files, grid or [], settings or [])
        sweep = Sweep(tuple(points), seeds, folder, validation)
        with progress_shown() as show:
            outcomes = sweep.run(show, log)
        out.print(sweep_table(sweep_lines(outcomes), seeds))
        out.print(f"written to {escape(str(folder))}")
        if not any(outcome.tested and outcome.scores for outcome in outcomes):
            raise typer.Exit(1)


def _run_comparison(
    settings: list[str], fixed: dict[str, int], out_dir: Path | None, overwrite: bool
) -> None:
    from perfed.report.tables import comparison_table
    from perfed.runs import run_dir
    from perfed.runs.comparison import ComparisonRow, compare, comparison, rows_of
    from perfed.runs.files import write_whole
    from perfed.runs.local_run import LOCAL
    from perfed.runs.summary import LocalRun, summarize, summary_bytes, with_local_run

    entries = comparison(settings, **fixed)
    if out_dir is not None:
        run_dir.check_vacant(out_dir, overwrite)
    rows: list[ComparisonRow] = []
    summaries = []
    with progress_shown() as show:
        for entry, result in compare(entries, show):
            rows += rows_of(entry, result)
            summaries.append(summarize(result, entry.config.resolved()) | {"rows": entry.rows})
    out.print(comparison_table(rows))
    if out_dir is not None:
        alone = next(one for one in summaries if one["method"] == LOCAL)
        local = LocalRun.of_summary("Local", alone)
        summaries = [s if s is alone else with_local_run(s, local) for s in summaries]
        out_dir.mkdir(parents=True, exist_ok=True)
        write_whole(out_dir / run_dir.SUMMARY, summary_bytes({"runs": summaries}))
        out.print(f"written to {out_dir / run_dir.SUMMARY}")
