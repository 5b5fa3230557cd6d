"""Codecs: how fast messages are made and read on one core, and how long they are."""

import os
import subprocess
import sys
import time
from statistics import median
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

ENTRIES = 5_000_000
LEVELS = (1, 4, 15, 127, 1023)


def speeds() -> None:
    """Print codec, bytes, MB/s of float32 in and out; run in a process that has one core."""
    import jax
    import jax.numpy as jnp

    from perfed import BFloat16, Float16, Float32, LowPrecision, RandomK, Sign, TopK

    codecs: dict[str, Any] = {
        "float32": Float32(), "float16": Float16(), "bfloat16": BFloat16(), "sign": Sign(),
        **{f"low-precision, s = {s}": LowPrecision(s) for s in LEVELS},
        "low-precision, s = 15, buckets of 512": LowPrecision(15, norm=512),
        "top-k, 1 %": TopK(0.01), "random-k, 1 %": RandomK(0.01),
    }  # fmt: skip
    x = jnp.asarray(np.random.default_rng(0).normal(size=ENTRIES), jnp.float32)
    key = jax.random.key(0)
    for name, codec in codecs.items():
        message = codec.encode(key, x)
        jax.block_until_ready(codec.decode(message, x))
        times: tuple[list[float], list[float]] = ([], [])
        for _ in range(5):
            begun = time.perf_counter()
            codec.encode(key, x)
            times[0].append(time.perf_counter() - begun)
            begun = time.perf_counter()
            jax.block_until_ready(codec.decode(message, x))
            times[1].append(time.perf_counter() - begun)
        megabytes = x.nbytes / 1e6
        made, read = (megabytes / median(t) for t in times)
        print(f"{name}\t{len(message)}\t{made:.0f}\t{read:.0f}", flush=True)


def lengths() -> list[tuple[str, ...]]:
    """Messages of 100,000 Gaussian entries, against the entropy of what they say."""
    import jax
    import jax.numpy as jnp

    from perfed import LowPrecision

    n = 100_000
    x = jnp.asarray(np.random.default_rng(5).normal(size=n), jnp.float32)
    rows: list[tuple[str, ...]] = []
    for s in LEVELS:
        codec = LowPrecision(s)
        message = codec.encode(jax.random.key(0), x)
        levels = np.asarray(codec.symbols(jax.random.key(0), x, (n,)).level)
        part = np.unique(levels, return_counts=True)[1] / n
        entropy = -(part * np.log2(part)).sum() * n / 8
        rows.append((
            str(s), str(len(message)), f"{len(message) / x.nbytes:.5f}",
            f"{8 * len(message) / n:.3f}", f"{len(message) / entropy:.3f}",
        ))  # fmt: skip
    return rows


def main() -> None:
    """Measure and print."""
    console = Console(width=110)
    code = (
        "import os; os.sched_setaffinity(0, {0}); os.environ['PERFED_DEVICES'] = '1'\n"
        "from bench.messages import speeds; speeds()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ
    )
    table = Table(box=box.SIMPLE_HEAD, title=f"{ENTRIES:,} Gaussian entries, one core")
    for heading in ("codec", "bytes", "encode, MB/s of float32", "decode, MB/s"):
        table.add_column(heading, justify="left" if heading == "codec" else "right")
    for line in done.stdout.splitlines():
        table.add_row(*line.split("\t"))
    console.print(table)
    table = Table(box=box.SIMPLE_HEAD, title="100,000 Gaussian entries")
    for heading in ("s", "bytes", "of float32", "bits an entry", "of the entropy"):
        table.add_column(heading, justify="right")
    for row in lengths():
        table.add_row(*row)
    console.print(table)


if __name__ == "__main__":
    main()
