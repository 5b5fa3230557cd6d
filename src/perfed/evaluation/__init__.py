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
from perfed.evaluation.metrics import ERRORS, Scores, Summary, mean_defined, score_names

__all__ = [
    "ADAPTATIONS",
    "ERRORS",
    "Evaluation",
    "Evaluator",
    "ModelKind",
    "Scores",
    "SimulationEvaluator",
    "Summary",
    "check_adapt_on",
    "mean_defined",
    "model_kinds",
    "score_names",
]
