"""Data of all clients: sources, splits over clients, and the federation they make."""

from perfed.data.catalog import SOURCES, data_settings, load, prepare
from perfed.data.dataset import Dataset
from perfed.data.examples import FlatExamples
from perfed.data.federation import Federation
from perfed.data.scaling import Scaling
from perfed.data.splits import SPLITS
from perfed.data.stored import FederationWriter, store
from perfed.data.synthetic import synthetic

__all__ = [
    "SOURCES",
    "SPLITS",
    "Dataset",
    "Federation",
    "FederationWriter",
    "FlatExamples",
    "Scaling",
    "data_settings",
    "load",
    "prepare",
    "store",
    "synthetic",
]
