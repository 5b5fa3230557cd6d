"""The commands. They read arguments and show results; everything else is elsewhere."""

from importlib.metadata import version
from typing import Annotated

import typer

from perfed.cli import benchmark, data, federation, models, papers, runs, theory
from perfed.cli.console import out

app = typer.Typer(
    name="perfed",
    help="Personalized federated learning, exactly as published.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
data_app = typer.Typer(help="Look at data before training on them.", no_args_is_help=True)

app.command("run")(runs.run_command)
app.command("resume")(runs.resume_command)
app.command("report")(runs.report_command)
app.command("sweep")(runs.sweep_command)
app.command("benchmark")(benchmark.benchmark_command)
app.command("reproduce")(papers.reproduce_command)
app.command("diagnose")(theory.diagnose_command)
app.command("advise")(theory.advise_command)
app.command("adapt")(models.adapt_command)
app.command("predict")(models.predict_command)
app.command("keys")(federation.keys_command)
app.command("serve")(federation.serve_command)
app.command("join")(federation.join_command)
app.command("federate")(federation.federate_command)
app.add_typer(data_app, name="data")
data_app.command("describe")(data.describe_command)
data_app.command("store")(data.store_command)
data_app.command("list")(data.list_command)


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
