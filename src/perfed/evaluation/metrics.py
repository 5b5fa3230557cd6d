"""Scores of clients, and their summaries."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, final

import numpy as np
from jaxtyping import Float, Int

Values = Float[np.ndarray, " clients"]

# Of these, less is better.
ERRORS = ("loss", "rmse", "train_loss", "train_rmse", "train_objective")


class Summary(NamedTuple):
    """One number per client, summarized over the clients that have one.

    Attributes:
        mean: the plain mean over clients, as Per-FedAvg reports it.
        weighted: the mean weighted by the clients' held-out examples.
        worst: the worst client's.
        p10: the 10th percentile over clients.
        p50: the median.
        p90: the 90th percentile.
        clients: each client's; NaN where it is not defined.
    """

    mean: float
    weighted: float
    worst: float
    p10: float
    p50: float
    p90: float
    clients: list[float]

    @classmethod
    def of(
        cls, values: Values, sizes: Int[np.ndarray, " clients"], less_is_better: bool = False
    ) -> "Summary":
        """Summarize one value per client."""
        clients, defined = [float(v) for v in values], np.isfinite(values)
        if not defined.any():
            return cls._make([*[float("nan")] * 6, clients])
        values, sizes = values[defined], sizes[defined]
        worst = values.max() if less_is_better else values.min()
        weighted = np.average(values, weights=sizes)
        percentiles = np.percentile(values, [10, 50, 90])
        numbers = map(float, (values.mean(), weighted, worst, *percentiles))
        return cls._make([*numbers, clients])


@final
@dataclass(frozen=True)
class Scores:
    """One model kind's scores on every client's held-out data.

    Attributes:
        values: every client's score, by name; the first name is the headline. `accuracy` and `loss`
            for classes; `r2`, `rmse` (in the targets' own unit) and `loss` for a regression. The
            same with `train_` before it, where training data were scored, and `train_objective`,
            f_i itself, where an l2 penalty makes it another than the loss.
        sizes: how many held-out examples there are.
    """

    values: dict[str, Values]
    sizes: Int[np.ndarray, " clients"]

    @property
    def accuracy(self) -> Values:
        """The part of its held-out examples each client's model gets right."""
        return self.values["accuracy"]

    @property
    def loss(self) -> Values:
        """The mean loss on each client's held-out examples."""
        return self.values["loss"]

    def summary(self) -> dict[str, Summary]:
        """All scores, summarized over clients."""
        return {k: Summary.of(v, self.sizes, k in ERRORS) for k, v in self.values.items()}


def mean_defined(values: Values) -> float:
    """The mean over the clients that have a score; NaN if none has."""
    defined = values[np.isfinite(values)]
    return float(defined.mean()) if len(defined) else float("nan")


def score_names(classes: bool, training: bool, penalty: bool) -> tuple[str, ...]:
    """The scores that an evaluation has.

    Args:
        classes: whether labels are classes.
        training: whether training data are scored too.
        penalty: whether there is an l2 penalty.
    """
    held_out = ("accuracy", "loss") if classes else ("r2", "rmse", "loss")
    if not training:
        return held_out
    extra = ("train_objective",) if penalty else ()
    return (*held_out, *(f"train_{name}" for name in held_out), *extra)


def score_order(name: str) -> tuple[bool, bool, str]:
    """A key to sort names of scores by: held-out before training data, losses last."""
    return (name.startswith("train_"), name.endswith(("loss", "objective")), name)


def named_scores(
    score: Values, targets: Sequence[np.ndarray] | None = None, spread: float = 1.0
) -> dict[str, Values]:
    """What `Measure.score` means: accuracy, or R2 = 1 - MSE / Var(y) and RMSE.

    Args:
        score: each client's.
        targets: each client's, in a regression; None: these are classes.
        spread: what targets were divided by.
    """
    if targets is None:
        return {"accuracy": score}
    variance = np.array([np.var(own, dtype=np.float64) for own in targets])
    # No model can be compared with the mean of targets that are all alike.
    r2 = 1 - np.divide(score, variance, out=np.full_like(score, np.nan), where=variance > 0)
    return {"r2": r2, "rmse": np.sqrt(score) * spread}
