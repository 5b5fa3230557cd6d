"""First rounds, each in a program of its own: with nothing compiled before, and from the cache.

From the making of the engine, with the data in memory, to the end of the round.
"""

import argparse
import os
import subprocess
import sys
from tempfile import TemporaryDirectory

import jax
from rich.console import Console

from bench.__main__ import cases, engine_of, spread, timed


def first_round(name: str) -> float:
    """Seconds of one case's first round, here."""
    (case,) = (case for case in cases() if case.name == name)

    def work() -> None:
        engine = engine_of(case, case.cohorts[0])
        jax.block_until_ready(engine.advance(engine.init(), 1))

    return timed(work) / 1e3


def in_a_program(name: str, cache: str) -> float:
    """The same in a new program with this cache of compiled ones."""
    command = [sys.executable, "-m", "bench.first", "--only", name]
    environment = os.environ | {"PERFED_CACHE": cache}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return float(done.stdout)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m bench.first", description=__doc__)
    parser.add_argument("--repeats", type=int, default=5, help="programs of each kind (5)")
    parser.add_argument("--only", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.only:
        print(first_round(given.only))
        return
    console = Console(width=120, highlight=False)
    for case in cases():
        new, again = [], []
        for _ in range(given.repeats):
            with TemporaryDirectory() as cache:
                new.append(in_a_program(case.name, cache))
                again.append(in_a_program(case.name, cache))
        console.print(f"{case.name}: {spread(new)} s, from the cache {spread(again)} s")


if __name__ == "__main__":
    main()
