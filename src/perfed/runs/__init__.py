"""Runs: typed configuration, run folders, sweeps, and what is done with a trained model."""

from perfed.runs.config import Config

__all__ = ["Config"]
