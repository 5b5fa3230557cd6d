"""Simulation: engines that take an experiment from round to round on one machine's devices."""

from perfed.simulation import hosts
from perfed.simulation.auto import engine_for
from perfed.simulation.engine import Engine, Simulator, Traffic
from perfed.simulation.experiment import ClientRecord, EngineState, Experiment, Weighting
from perfed.simulation.network import Network
from perfed.simulation.sequential import Sequential
from perfed.simulation.streamed import Streamed
from perfed.simulation.vectorized import Vectorized

__all__ = [
    "ClientRecord",
    "Engine",
    "EngineState",
    "Experiment",
    "Network",
    "Sequential",
    "Simulator",
    "Streamed",
    "Traffic",
    "Vectorized",
    "Weighting",
    "engine_for",
    "hosts",
]
