"""`summary.json`: what a run came to, in one small file."""

import json
import os
from pathlib import Path
from typing import Any

from perfed.experiment.simulate import Result

FILE = "summary.json"


def summarise(result: Result, config: dict[str, Any] | None = None) -> dict[str, Any]:
    """The run's facts, its last scores with all clients' values, and its curves."""

    def full(kind: str) -> dict[str, Any]:
        return {k: v._asdict() for k, v in result.scores[kind].summary().items()}  # type: ignore[index]

    def curve_point(evaluation: Any) -> dict[str, Any]:
        point: dict[str, Any] = {"round": evaluation.round}
        for kind, scores in evaluation.scores.items():
            values = scores.summary()
            point[kind] = {
                name: {"mean": summary.mean, "weighted": summary.weighted, "worst": summary.worst}
                for name, summary in values.items()
            }
        return point

    return {
        "method": result.method.name,
        "rounds": result.rounds,
        "seed": result.seed,
        "seconds": result.seconds,
        "global": full("global"),
        "personalized": full("personalized"),
        "history": [curve_point(evaluation) for evaluation in result.history],
        "config": config,
    }


def write_json(path: Path, value: Any) -> None:
    """Write a file whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    os.replace(partial, path)
