"""Scores of every client, for the global model and for its own."""

from perfed.evaluation.evaluator import (
    ADAPTATIONS,
    Evaluation,
    Evaluator,
    ModelKind,
    SimulationEvaluator,
    check_adapt_on,
    model_kinds,
)
from perfed.evaluation.gains import POINT, TIE, Gain, by_name, gain_over
from perfed.evaluation.metrics import (
    ERRORS,
    Scores,
    Summary,
    Values,
    mean_defined,
    score_names,
)

__all__ = [
    "ADAPTATIONS",
    "ERRORS",
    "POINT",
    "TIE",
    "Evaluation",
    "Evaluator",
    "Gain",
    "ModelKind",
    "Scores",
    "SimulationEvaluator",
    "Summary",
    "Values",
    "by_name",
    "check_adapt_on",
    "gain_over",
    "mean_defined",
    "model_kinds",
    "score_names",
]
