"""`summary.json`: what a run came to, in one small file."""

import json
import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Self, final

import numpy as np

from perfed.evaluation import Gain, Values, by_name, gain_over
from perfed.training import Costs, Result


@final
class LocalRun(NamedTuple):
    """What a Local run came to: each client alone.

    Attributes:
        path: its folder, or another name.
        names: its clients.
        scores: every client's last scores, by name; None where one is not defined.
        checksum: that of its data; None: they are known to be the same.
    """

    path: str
    names: tuple[str, ...]
    scores: dict[str, list[float | None]]
    checksum: str | None = None

    @classmethod
    def of_summary(cls, path: str, summary: dict[str, Any], checksum: str | None = None) -> Self:
        """From the run's summary."""
        last = {name: own["clients"] for name, own in summary["personalized"].items()}
        return cls(path, tuple(summary["names"]), last, checksum)

    def of_clients(self, names: Sequence[str], score: str) -> Values:
        """The scores of these clients; NaN for those it has none of."""
        return by_name(self.scores.get(score, [None] * len(self.names)), self.names, names)


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
        "worse_off": _worse_off(result),
        "history": [curve_point(evaluation) for evaluation in result.history],
        "clients": everyone,
        "names": list(scored.names),
        "labels": scored.labels and list(scored.labels),
        "config": config,
    }


def with_local_run(summary: dict[str, Any], local: LocalRun) -> dict[str, Any]:
    """A run's summary, with how many of its clients are worse off than alone."""
    score, names = summary["worse_off"]["score"], summary["names"]
    own = by_name(summary["personalized"][score]["clients"], names, names)
    alone = local.of_clients(names, score)
    than_local = _counts(gain_over(own, alone, score))
    than_local |= {"run": local.path, "scores": alone.tolist()}
    return summary | {"worse_off": summary["worse_off"] | {"than_local": than_local}}


def _counts(gain: Gain) -> dict[str, Any]:
    """How many clients gain and lose."""
    return {
        "worse": gain.worse,
        "much_worse": gain.much_worse,
        "better": gain.better,
        "defined": gain.defined,
        "share": gain.share_worse,
    }


def _worse_off(result: Result) -> dict[str, Any]:
    """How many clients have a worse headline score with their own model than with another one.

    `than_global` is None for a method without a global model, and `than_local` until there is a
    Local run to compare with (`with_local_run`).
    """
    own = result.scores["personalized"]
    score = next(iter(own.values))
    than_global = None
    if "global" in result.scores:
        common = result.scores["global"].values[score]
        than_global = _counts(gain_over(own.values[score], common, score))
    return {"score": score, "than_global": than_global, "than_local": None}


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
