"""Experiments: typed configuration, whole runs, and what they leave behind."""

from perfed.runs.config import Config
from perfed.training.trainer import Progress, Result, run, simulate

__all__ = ["Config", "Progress", "Result", "run", "simulate"]
