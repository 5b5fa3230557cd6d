"""Federated methods, one file each. To add one: write its file and list it here."""

from perfed.methods.base import Method, Reply, Turn
from perfed.methods.fedavg import FedAvg
from perfed.methods.local import Local
from perfed.methods.per_fedavg import PerFedAvg
from perfed.methods.pfedme import PFedMe

METHODS: dict[str, type[Method]] = {
    method.name: method for method in (FedAvg, PerFedAvg, PFedMe, Local)
}

__all__ = [
    "METHODS",
    "FedAvg",
    "Local",
    "Method",
    "PFedMe",
    "PerFedAvg",
    "Reply",
    "Turn",
]
