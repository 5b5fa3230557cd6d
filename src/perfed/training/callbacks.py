"""Callbacks: called at the steps of a training run."""

from abc import ABC
from collections.abc import Callable
from typing import NamedTuple, final

from perfed.training.result import Result
from perfed.training.state import TrainState


class Callback(ABC):  # noqa: B024
    """Called at the steps of one run. A subclass overrides what it needs."""

    def on_start(self, state: TrainState | None) -> None:  # noqa: B027
        """The run begins, or goes on from where it was left."""

    def on_rounds_end(self, state: TrainState) -> None:  # noqa: B027
        """Some rounds are done."""

    def on_evaluate(self, state: TrainState) -> None:  # noqa: B027
        """Clients have been scored: `state.history[-1]`."""

    def on_end(self, result: Result) -> None:  # noqa: B027
        """The run is finished."""

    def on_failure(self, state: TrainState | None, error: BaseException) -> None:  # noqa: B027
        """An error, or an interruption, ends the run; the state is its last good one.

        None: there is none, or it leads nowhere since the run has diverged.
        """

    def on_close(self) -> None:  # noqa: B027
        """Nothing more comes, whether the run is finished, interrupted or failed."""


class Progress(NamedTuple):
    """How far a run has come.

    Attributes:
        round: rounds done.
        rounds: rounds in all.
        loss: the mean held-out loss of the personalized models when last scored.
    """

    round: int
    rounds: int
    loss: float


OnProgress = Callable[[Progress], None]


@final
class OnTrainState(Callback):
    """Calls a function with every state."""

    def __init__(self, function: Callable[[TrainState], None]) -> None:
        self._function = function

    def on_rounds_end(self, state: TrainState) -> None:
        """Pass it on."""
        self._function(state)
