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
from perfed.methods.fedavg import FedAvg
from perfed.methods.local import Local
from perfed.methods.per_fedavg import PerFedAvg
from perfed.methods.pfedme import PFedMe
from perfed.methods.registry import find_method, method_names, register
from perfed.methods.settings import Rate, Weight

__all__ = [
    "ClientState",
    "Extra",
    "FedAvg",
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
