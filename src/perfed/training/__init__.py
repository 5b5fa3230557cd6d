"""Training: one loop over rounds with callbacks, and the result it ends with."""

from perfed.training.callbacks import Callback, OnProgress, Progress
from perfed.training.result import Result
from perfed.training.simulate import simulate
from perfed.training.state import Costs, TrainState
from perfed.training.trainer import Run, Trainer, TrainOptions

__all__ = [
    "Callback",
    "Costs",
    "OnProgress",
    "Progress",
    "Result",
    "Run",
    "TrainOptions",
    "TrainState",
    "Trainer",
    "simulate",
]
