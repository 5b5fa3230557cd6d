"""The papers' tables and figures: what was run, what was printed, and what comes out here."""

from perfed.papers.reproduction import Reproduction, names
from perfed.papers.results import Results, check_folder, reproduce

__all__ = ["Reproduction", "Results", "check_folder", "names", "reproduce"]
