"""Splits: which client gets which row of a set, by name."""

from perfed.data.splits.base import LEAST, Assignment, LabeledRows, Split
from perfed.data.splits.counts import alike, by_counts, label_counts
from perfed.data.splits.generic import (
    DirichletSplit,
    IIDSplit,
    NaturalSplit,
    QuantitySplit,
    ShardSplit,
)
from perfed.data.splits.hold_out import held_out, held_out_counts
from perfed.data.splits.papers import PerFedAvgSplit, PFedMeSplit

SPLITS: dict[str, type[Split]] = {
    "per-fedavg": PerFedAvgSplit,
    "pfedme": PFedMeSplit,
    "iid": IIDSplit,
    "dirichlet": DirichletSplit,
    "shards": ShardSplit,
    "quantity": QuantitySplit,
    "natural": NaturalSplit,
}

__all__ = [
    "LEAST",
    "SPLITS",
    "Assignment",
    "DirichletSplit",
    "IIDSplit",
    "LabeledRows",
    "NaturalSplit",
    "PFedMeSplit",
    "PerFedAvgSplit",
    "QuantitySplit",
    "ShardSplit",
    "Split",
    "alike",
    "by_counts",
    "held_out",
    "held_out_counts",
    "label_counts",
]
