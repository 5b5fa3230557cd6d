"""An object in a process of its own.

Where torchax is loaded PyTorch computes no gradients on CUDA; so the eager loops run elsewhere.
"""

import atexit
import multiprocessing
import os
from collections.abc import Callable
from typing import Any


class Apart:
    """What `make(*arguments)` gives, in another process, whose JAX has the CPU alone."""

    def __init__(self, make: Callable[..., Any], *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._here, there = context.Pipe()
        before = os.environ.get("JAX_PLATFORMS")
        os.environ["JAX_PLATFORMS"] = "cpu"
        try:
            process = context.Process(target=_serve, args=(there, make, arguments), daemon=True)
            process.start()
        finally:
            if before is None:
                del os.environ["JAX_PLATFORMS"]
            else:
                os.environ["JAX_PLATFORMS"] = before
        there.close()
        atexit.register(process.terminate)

    def call(self, name: str, *arguments: Any) -> Any:
        """What its method of this name gives; `EOFError` if the process has died."""
        self._here.send((name, arguments))
        return self._here.recv()


def _serve(there: Any, make: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    made = make(*arguments)
    while True:
        try:
            name, given = there.recv()
        except EOFError:
            return
        there.send(getattr(made, name)(*given))
