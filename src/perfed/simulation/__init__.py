"""Simulation: engines that take a federation from round to round on one machine's devices."""

from perfed.simulation import hosts
from perfed.simulation.choose import engine_for
from perfed.simulation.engine import Engine, Rounds, Traffic
from perfed.simulation.network import Network
from perfed.simulation.sequential import Sequential
from perfed.simulation.setup import Kept, Setup, State, Weighting
from perfed.simulation.streamed import Streamed
from perfed.simulation.vectorised import Vectorised

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
    "Vectorised",
    "Weighting",
    "engine_for",
    "hosts",
]
