"""Federated methods, one file each; found by name, those of other packages too."""

from perfed.methods.base import (
    ClientState,
    Extra,
    LocalUpdate,
    Method,
    Received,
    RoundContext,
    ServerState,
    method,
)
from perfed.methods.fedala import FedALA
from perfed.methods.fedavg import FedAvg
from perfed.methods.fedbabu import FedBABU
from perfed.methods.fedper import FedPer
from perfed.methods.fedrep import FedRep
from perfed.methods.fedrod import FedRoD
from perfed.methods.lg_fedavg import LGFedAvg
from perfed.methods.local import Local
from perfed.methods.per_fedavg import PerFedAvg
from perfed.methods.pfedme import PFedMe
from perfed.methods.registry import find_method, method_names, register
from perfed.methods.settings import Rate, Weight

__all__ = [
    "ClientState",
    "Extra",
    "FedALA",
    "FedAvg",
    "FedBABU",
    "FedPer",
    "FedRep",
    "FedRoD",
    "LGFedAvg",
    "Local",
    "LocalUpdate",
    "Method",
    "PFedMe",
    "PerFedAvg",
    "Rate",
    "Received",
    "RoundContext",
    "ServerState",
    "Weight",
    "find_method",
    "method",
    "method_names",
    "register",
]
