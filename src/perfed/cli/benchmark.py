"""`perfed benchmark`: all methods on the same data, tuned alike."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from perfed.cli.arguments import Settings
from perfed.cli.console import errors_shown, log, out, progress_shown, write_report
from perfed.core.errors import ConfigError

if TYPE_CHECKING:
    from perfed.runs.benchmark_results import BenchmarkResults, Recommendation


def benchmark_command(
    what: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME|CONFIG",
            help="A benchmark (--list shows them), or a TOML file of your own data.",
        ),
    ] = None,
    methods: Annotated[
        str | None,
        typer.Option(metavar="NAME,NAME", help="Only these; default: all, or a few if quick."),
    ] = None,
    seeds: Annotated[
        int | None, typer.Option(min=1, help="How many seeds; default: 5, or 2 if quick.")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Fewer rounds, seeds, trials and methods.")
    ] = False,
    folder: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="Where all goes; default: benchmarks/NAME."),
    ] = None,
    settings: Settings = None,
    listed: Annotated[bool, typer.Option("--list", help="Show the benchmarks there are.")] = False,
) -> None:
    """Compare all methods on the same data, each tuned by the same number of trials.

    Settings, and the method that is recommended, are chosen on a validation part of the clients'
    training data; the table is of held-out data. The same command goes on where it was interrupted.
    """
    with errors_shown():
        from dataclasses import replace

        from perfed.runs.benchmark import (
            Benchmark,
            benchmark_names,
            benchmark_summary,
            run_benchmark,
        )
        from perfed.runs.benchmark_results import benchmark_results

        if listed or what is None:
            for name in benchmark_names():
                out.print(f"[bold]{name}[/]  {escape(benchmark_summary(name))}", soft_wrap=True)
            if not listed:
                raise ConfigError("name one of these, or a TOML file of your own data")
            return
        config = Path(what) if what.endswith(".toml") or Path(what).is_file() else None
        if config is None:
            benchmark = Benchmark.named(what, quick, settings or [])
        else:
            benchmark = Benchmark.of_config(config, quick, settings or [])
            _check_free(_recommended_file(config))
        if methods is not None:
            benchmark = benchmark.only([name.strip() for name in methods.split(",")])
        if seeds is not None:
            benchmark = replace(benchmark, seeds=seeds)
        folder = folder or Path("benchmarks") / f"{benchmark.name}{'-quick' * quick}"
        with progress_shown() as show:
            run = run_benchmark(benchmark, folder, show, log)
        results = benchmark_results(run)
        _write(results, folder)
        _show(results, folder, None if config is None else _recommended_file(config))
        if results.recommendation is None:
            raise typer.Exit(1)


def _recommended_file(config: Path) -> Path:
    """Where the configuration of the recommended method goes."""
    return config.with_name(f"{config.stem}-recommended.toml")


def _check_free(file: Path) -> None:
    """Raise if a file is there that no benchmark has written."""
    from perfed.report.benchmark import HEADER

    if file.exists() and not file.read_text(encoding="utf-8").startswith(HEADER):
        raise ConfigError(f"{file}: it is there already, and would be replaced; move it away")


def _write(results: "BenchmarkResults", folder: Path) -> None:
    from perfed.report import benchmark
    from perfed.runs.files import write_whole

    write_whole(folder / "table.md", benchmark.benchmark_markdown(results).encode())
    write_whole(folder / "table.tex", benchmark.benchmark_latex(results).encode())
    write_whole(folder / "results.csv", benchmark.benchmark_csv(results).encode())
    write_whole(folder / "results.json", benchmark.benchmark_json(results))
    if results.recommendation is not None:
        clients = benchmark.clients_csv(results.recommendation)
        write_whole(folder / "clients.csv", clients.encode())
    if results.folders:
        write_report([Path(one) for one in results.folders], folder / "report.html")


def _show(results: "BenchmarkResults", folder: Path, file: Path | None) -> None:
    from perfed.report.benchmark import benchmark_caption, benchmark_table, recommendation_lines

    out.print(benchmark_table(results))
    out.print(escape(benchmark_caption(results)), style="dim")
    out.print()
    for line in recommendation_lines(results):
        out.print(escape(line), soft_wrap=True)
    if file is not None and results.recommendation is not None:
        _show_own(results.recommendation, results, file)
    where = escape(str(folder))
    out.print(f"written to {where}: table.md, table.tex, results.csv, results.json, report.html")


def _show_own(recommendation: "Recommendation", results: "BenchmarkResults", file: Path) -> None:
    """Of the user's own data: who gains, and a configuration that is ready to run."""
    from perfed.report.benchmark import client_table, recommended_config
    from perfed.runs.files import write_whole

    out.print(client_table(recommendation))
    write_whole(file, recommended_config(recommendation, results).encode())
    name = escape(str(file))
    out.print(f"written to {name}; run it by: perfed run {name}", soft_wrap=True)
