"""Simulation: engines that take a federation from round to round on one machine's devices."""

from perfed.simulation import hosts
from perfed.simulation.auto import engine_for
from perfed.simulation.engine import Engine, Rounds, Traffic
from perfed.simulation.experiment import Kept, Setup, State, Weighting
from perfed.simulation.network import Network
from perfed.simulation.sequential import Sequential
from perfed.simulation.streamed import Streamed
from perfed.simulation.vectorized import Vectorized

__all__ = [
    "Engine",
    "Kept",
    "Network",
    "Rounds",
    "Sequential",
    "Setup",
    "State",
    "Streamed",
    "Traffic",
    "Vectorized",
    "Weighting",
    "engine_for",
    "hosts",
]
