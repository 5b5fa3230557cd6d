"""The `perfed` command: a file per group of commands, each importing what it needs when it runs."""


def main() -> None:
    """Entry point of the `perfed` command."""
    from perfed.cli.app import app

    app()
