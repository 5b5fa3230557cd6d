"""Codecs: how changes of the model become messages, whose bytes are real."""

from perfed.pipeline.codecs.base import Codec, Sent
from perfed.pipeline.codecs.low_precision import LowPrecision
from perfed.pipeline.codecs.plain import BFloat16, Float16, Float32, Sign
from perfed.pipeline.codecs.sparse import RandomK, TopK

CODECS: dict[str, type[Codec]] = {
    codec.name: codec for codec in (Float32, Float16, BFloat16, LowPrecision, Sign, TopK, RandomK)
}

__all__ = [
    "CODECS",
    "BFloat16",
    "Codec",
    "Float16",
    "Float32",
    "LowPrecision",
    "RandomK",
    "Sent",
    "Sign",
    "TopK",
]
