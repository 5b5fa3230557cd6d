"""Federated methods, one file each; found by name, those of other packages too."""

from perfed.methods.apfl import APFL
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
from perfed.methods.ditto import Ditto
from perfed.methods.fedala import FedALA
from perfed.methods.fedavg import FedAvg
from perfed.methods.fedbabu import FedBABU
from perfed.methods.fedopt import FedAdam, FedAvgM, FedYogi
from perfed.methods.fedper import FedPer
from perfed.methods.fedprox import FedProx
from perfed.methods.fedrep import FedRep
from perfed.methods.fedrod import FedRoD
from perfed.methods.lg_fedavg import LGFedAvg
from perfed.methods.local import Local
from perfed.methods.per_fedavg import PerFedAvg
from perfed.methods.pfedme import PFedMe
from perfed.methods.registry import find_method, method_names, register
from perfed.methods.scaffold import Scaffold
from perfed.methods.settings import Decay, Rate, Weight

__all__ = [
    "APFL",
    "ClientState",
    "Decay",
    "Ditto",
    "Extra",
    "FedALA",
    "FedAdam",
    "FedAvg",
    "FedAvgM",
    "FedBABU",
    "FedPer",
    "FedProx",
    "FedRep",
    "FedRoD",
    "FedYogi",
    "LGFedAvg",
    "Local",
    "LocalUpdate",
    "Method",
    "PFedMe",
    "PerFedAvg",
    "Rate",
    "Received",
    "RoundContext",
    "Scaffold",
    "ServerState",
    "Weight",
    "find_method",
    "method",
    "method_names",
    "register",
]
