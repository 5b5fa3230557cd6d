"""Experiments: typed configuration, whole runs, and what they leave behind."""

from perfed.experiment.config import Config
from perfed.experiment.simulate import Progress, Result, run, simulate

__all__ = ["Config", "Progress", "Result", "run", "simulate"]
