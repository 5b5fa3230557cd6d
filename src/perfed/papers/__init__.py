"""The papers' tables and figures: what was run, what was printed, and what comes out here."""

from perfed.papers.claims import CheckedClaim, check_claims
from perfed.papers.reproduction import Reproduction, names
from perfed.papers.results import Results
from perfed.papers.runner import check_folder, reproduce

__all__ = [
    "CheckedClaim",
    "Reproduction",
    "Results",
    "check_claims",
    "check_folder",
    "names",
    "reproduce",
]
