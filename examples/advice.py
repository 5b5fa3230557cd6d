"""Advice against the defaults, on five federations: the table of docs/theory.md.

    python examples/advice.py [FEDERATION...]

For each method, 200 rounds with its default settings, with those that `perfed advise` proposes, and
with a condition broken: the step that "practice" bounds by 2/L (or 2/(lambda + L) for pFedMe's
inner steps) at ten times its limit. The loss is the mean over clients of the personalized models'
on held-out data, which the advice has not seen.
"""

import sys

from perfed.core.errors import ConfigError, DivergedError
from perfed.runs.config import Config
from perfed.theory.advice import advise

FEDERATIONS = {
    "Synthetic(0, 0)": {"source": "synthetic", "alpha": 0.0, "beta": 0.0},
    "Synthetic(0.5, 0.5)": {"source": "synthetic", "alpha": 0.5, "beta": 0.5},
    "Synthetic(1, 1)": {"source": "synthetic", "alpha": 1.0, "beta": 1.0},
    "digits": {"source": "digits", "split": "dirichlet", "clients": 20},
    "MNIST writers": {"source": "mnist-writers"},
}
METHODS = {"fedavg": "lr", "per-fedavg": "beta", "pfedme": "inner_lr"}


def loss(values, federation) -> str:
    """The final loss of a run."""
    config = Config.checked(values)
    try:
        result = config.train(config.build(federation))
    except DivergedError:
        return "diverged"
    return f"{result.scores['personalized'].loss.mean():.4g}"


def main() -> None:
    """Print the table."""
    print("| federation | method | defaults | advised | limit x 10 | advice |")
    print("| --- | --- | ---: | ---: | ---: | --- |")
    for name in sys.argv[1:] or FEDERATIONS:
        try:
            base = {"rounds": 200, "cohort": 10, "model": {"name": "mlr"}}
            base["data"] = FEDERATIONS[name]
            federation = Config.checked(base | {"method": {"name": "fedavg"}}).build_federation()
        except ConfigError as error:
            print(f"| {name} | {error} | | | | |")
            continue
        for method, step in METHODS.items():
            values = base | {"method": {"name": method}}
            advice = advise(values, federation=federation)
            L, chosen = advice.constants.L.value, advice.values["method"]
            limit = 2 / (chosen.get("lam", 15.0) + L) if method == "pfedme" else 2 / L
            broken = advice.values | {"method": chosen | {step: 10 * limit}}
            settings = ", ".join(f"{k} {v:g}" for k, v in advice.trials[0].settings.items())
            cells = [loss(each, federation) for each in (values, advice.values, broken)]
            print(f"| {name} | {method} | {' | '.join(cells)} | {settings} |", flush=True)


if __name__ == "__main__":
    main()
