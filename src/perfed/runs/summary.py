"""`summary.json`: what a run came to, in one small file."""

import json
import math
from typing import Any

import numpy as np

from perfed.training import Costs, Result


def summarize(result: Result, config: dict[str, Any] | None = None) -> dict[str, Any]:
    """The run's facts, its last scores with all clients' values, and its curves."""
    costs = result.costs
    last: dict[str, Any] = {
        kind: {name: summary._asdict() for name, summary in scores.summary().items()}
        for kind, scores in result.scores.items()
    }

    def curve_point(evaluation: Any) -> dict[str, Any]:
        point: dict[str, Any] = {"round": evaluation.round} | _costs(costs, evaluation.round)
        for kind, scores in evaluation.scores.items():
            values = scores.summary()
            point[kind] = {
                name: {"mean": summary.mean, "weighted": summary.weighted, "worst": summary.worst}
                for name, summary in values.items()
            }
        return point

    experiment, traffic = result.experiment, result.traffic
    scored, everyone = result.scored, experiment.federation.clients
    sent = np.zeros(everyone, np.int64)
    received = np.zeros(everyone, np.int64)
    taken = traffic.cohort >= 0
    np.add.at(sent, traffic.cohort[taken], traffic.uplink[taken])
    downlink = np.broadcast_to(traffic.downlink[:, None], taken.shape)
    np.add.at(received, traffic.cohort[taken], downlink[taken])
    shown = slice(None) if result.evaluator.clients is None else result.evaluator.clients
    return {
        "method": config["method"]["name"] if config else result.method.name,
        "rounds": result.rounds,
        "seed": result.seed,
        "seconds": result.seconds,
        **_costs(costs, result.rounds),
        "codec": experiment.pipeline.codec.name,
        "traffic": {
            "round_uplink_bytes": np.diff(costs.uplink_bytes).tolist(),
            "round_downlink_bytes": np.diff(costs.downlink_bytes).tolist(),
            "client_uplink_bytes": sent[shown].tolist(),
            "client_downlink_bytes": received[shown].tolist(),
        },
        "timing": result.train_state.timing,
        **last,
        "history": [curve_point(evaluation) for evaluation in result.history],
        "clients": everyone,
        "names": list(scored.names),
        "labels": scored.labels and list(scored.labels),
        "config": config,
    }


def _costs(costs: Costs, round: int) -> dict[str, Any]:
    """What a run has cost after so many rounds."""
    seconds = None if costs.seconds is None else float(costs.seconds[round])
    return {
        "uplink_bytes": int(costs.uplink_bytes[round]),
        "downlink_bytes": int(costs.downlink_bytes[round]),
        "simulated_seconds": seconds,
    }


def summary_bytes(summary: dict[str, Any]) -> bytes:
    """The file's contents."""
    return (json.dumps(_without_nan(summary), indent=1, allow_nan=False) + "\n").encode()


def _without_nan(value: Any) -> Any:
    """JSON has no NaN: what is not defined is null."""
    if isinstance(value, dict):
        return {k: _without_nan(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
