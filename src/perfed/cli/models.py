"""`perfed adapt` and `predict`: what is done with a trained model."""

from pathlib import Path
from typing import Annotated

import typer

from perfed.cli.arguments import AllowFactory
from perfed.cli.console import check_folder_of, errors_shown, out
from perfed.core.errors import ConfigError


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
    allow_factory: AllowFactory = None,
) -> None:
    """Fit a trained model to a client that was not there, and compare on its held-out rows."""
    with errors_shown():
        from perfed.report.tables import adapted_table
        from perfed.runs.adapt import adapt, client_rows, load_model
        from perfed.runs.files import write_whole

        if model_out.exists() and not overwrite:
            raise ConfigError(f"--out {model_out}: it is there already; add --overwrite")
        if model_out.is_dir():
            raise ConfigError(f"--out {model_out}: is a folder; name a file")
        check_folder_of(model_out)
        model = load_model(_model_file(trained), allow_factory or ())
        adapted = adapt(model, client_rows(model.uses, data, label), steps, seed=seed)
        write_whole(model_out, adapted.model.to_bytes())
        out.print(adapted_table(adapted))
        out.print(f"written to {model_out}")


def predict_command(
    model: Annotated[
        Path, typer.Argument(metavar="FILE", help="A model file, or the folder of a run.")
    ],
    data: Annotated[Path, typer.Option(metavar="FILE", help="A .csv, .parquet or .npz file.")],
    predictions: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE", help="A .csv file; default: the terminal."),
    ] = None,
    allow_factory: AllowFactory = None,
) -> None:
    """Say what a model makes of a file's rows: the classes' names, or a regression's targets."""
    with errors_shown():
        from perfed.runs.adapt import client_rows, load_model
        from perfed.runs.files import write_whole

        if predictions is not None:
            if predictions.exists():
                raise ConfigError(f"--out {predictions}: it is there already; name another file")
            check_folder_of(predictions)
        saved = load_model(_model_file(model), allow_factory or ())
        rows = client_rows(saved.uses, data, labeled=False)
        lines = [str(value) for value in saved.predict(rows.x)]
        text = "\n".join(["prediction", *lines]) + "\n"
        if predictions is None:
            typer.echo(text, nl=False)
        else:
            write_whole(predictions, text.encode())
            out.print(f"written to {predictions}")


def _model_file(path: Path) -> Path:
    """A model file, or a run's."""
    from perfed.runs import run_dir

    return path / run_dir.MODEL if path.is_dir() else path
