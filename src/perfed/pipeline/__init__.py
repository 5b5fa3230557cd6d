"""The update pipeline: clipping, error feedback, codecs whose bytes are real, aggregation."""

from perfed.pipeline.pipeline import Pipeline, send
from perfed.pipeline.stages import STAGES, Aggregate, Clip, Encode, ErrorFeedback, Mean, Stage

__all__ = [
    "STAGES",
    "Aggregate",
    "Clip",
    "Encode",
    "ErrorFeedback",
    "Mean",
    "Pipeline",
    "Stage",
    "send",
]
