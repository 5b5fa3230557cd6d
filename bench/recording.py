"""What recording costs: the part of a 600-round Synthetic run that is not spent on training.

Run it with: python -m bench.recording
"""

import time
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from perfed import Config
from perfed.report.page import report_page
from perfed.runs import recording, run_dir
from perfed.runs.files import write_whole

CONFIG = Path(__file__).parents[1] / "examples" / "pfedme-synthetic.toml"
REPEATS = 5


def once() -> tuple[float, float]:
    """Seconds of a run in all, and those spent on its folder, checkpoints, progress and report."""
    spent = 0.0

    def timed(function):  # type: ignore[no-untyped-def]  # whatever it wraps
        def call(*args, **kwargs):  # type: ignore[no-untyped-def]
            nonlocal spent
            begun = time.perf_counter()
            result = function(*args, **kwargs)
            spent += time.perf_counter() - begun
            return result

        return call

    begin, finish = run_dir.begin, run_dir.finish
    run_dir.begin, run_dir.finish = timed(begin), timed(finish)
    try:
        with TemporaryDirectory() as folder:
            place = Path(folder) / "run"
            started = time.perf_counter()
            config = Config.load(CONFIG, ["output.checkpoint_rounds=60"])
            result = recording.Recording.begin(config, place).train(on_progress=lambda _: None)
            timed(lambda: write_whole(place / run_dir.REPORT, page(place)))()
            whole = time.perf_counter() - started
        return whole, spent + result.train_state.timing["recording"]
    finally:
        run_dir.begin, run_dir.finish = begin, finish


def page(folder: Path) -> bytes:
    """The report."""
    return report_page([run_dir.read_run(folder)], "run").encode()


def main() -> None:
    """Print one line a repeat, and the median."""
    shares = []
    for _ in range(REPEATS):
        whole, spent = once()
        shares.append(spent / whole)
        print(f"{whole:6.2f} s in all, {1e3 * spent:5.0f} ms recording, {100 * shares[-1]:.1f} %")
    print(f"median {100 * median(shares):.1f} %")


if __name__ == "__main__":
    main()
