"""The papers' theory: constants of a federation, conditions, bounds, advice."""

from perfed.theory.advice import Advice, advise
from perfed.theory.conditions import Condition, Diagnosis
from perfed.theory.constants import Constants, Effort, measure
from perfed.theory.diagnosis import diagnose
from perfed.theory.distances import (
    Distances,
    On,
    distance_matrix,
    example_distances,
    feature_distances,
    label_distances,
)
from perfed.theory.estimates import Estimate
from perfed.theory.groups import groups
from perfed.theory.stationarity import Decay, Stationarity, decay, stationarity
from perfed.theory.study import Differences, Study, study

__all__ = [
    "Advice",
    "Condition",
    "Constants",
    "Decay",
    "Diagnosis",
    "Differences",
    "Distances",
    "Effort",
    "Estimate",
    "On",
    "Stationarity",
    "Study",
    "advise",
    "decay",
    "diagnose",
    "distance_matrix",
    "example_distances",
    "feature_distances",
    "groups",
    "label_distances",
    "measure",
    "stationarity",
    "study",
]
