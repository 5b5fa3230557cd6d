"""Splits: which client gets which row of a data set, by name."""

from perfed.data.splits.base import MIN_EXAMPLES, LabeledRows, Part, Split
from perfed.data.splits.counts import assign_by_counts, label_counts, proportional_counts
from perfed.data.splits.generic import (
    DirichletSplit,
    IIDSplit,
    NaturalSplit,
    QuantitySplit,
    ShardSplit,
)
from perfed.data.splits.hold_out import hold_out_counts, hold_out_mask
from perfed.data.splits.papers import PerFedAvgSplit, PFedMeSplit

SPLITS: dict[str, type[Split]] = {
    split.name: split
    for split in (
        PerFedAvgSplit,
        PFedMeSplit,
        IIDSplit,
        DirichletSplit,
        ShardSplit,
        QuantitySplit,
        NaturalSplit,
    )
}

__all__ = [
    "MIN_EXAMPLES",
    "SPLITS",
    "DirichletSplit",
    "IIDSplit",
    "LabeledRows",
    "NaturalSplit",
    "PFedMeSplit",
    "Part",
    "PerFedAvgSplit",
    "QuantitySplit",
    "ShardSplit",
    "Split",
    "assign_by_counts",
    "hold_out_counts",
    "hold_out_mask",
    "label_counts",
    "proportional_counts",
]
