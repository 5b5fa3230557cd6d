"""`python -m perfed` is the `perfed` command."""

from perfed.cli import main

if __name__ == "__main__":
    main()
