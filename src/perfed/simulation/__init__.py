"""Simulation: engines that take a federation from round to round on one machine's devices."""

from perfed.simulation.engine import Engine
from perfed.simulation.sequential import Sequential
from perfed.simulation.setup import Setup, State, Weighting
from perfed.simulation.vectorised import Vectorised

__all__ = [
    "Engine",
    "Sequential",
    "Setup",
    "State",
    "Vectorised",
    "Weighting",
]
