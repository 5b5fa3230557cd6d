"""Simulation: engines that take a federation from round to round on one machine's devices."""

from perfed.simulation.engine import Engine, Traffic
from perfed.simulation.network import Network
from perfed.simulation.sequential import Sequential
from perfed.simulation.setup import Kept, Setup, State, Weighting
from perfed.simulation.vectorised import Vectorised

__all__ = [
    "Engine",
    "Kept",
    "Network",
    "Sequential",
    "Setup",
    "State",
    "Traffic",
    "Vectorised",
    "Weighting",
]
