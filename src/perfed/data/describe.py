"""Description of a federation: its clients' sizes, and how much their labels differ."""

from dataclasses import dataclass
from typing import final

import numpy as np
from jaxtyping import Float, Int

from perfed.data.examples import FlatExamples
from perfed.data.federation import Federation
from perfed.data.splits import label_counts


@final
@dataclass(frozen=True)
class Description:
    """Sizes and label counts of a federation, one row per client.

    Attributes:
        names: the clients' names.
        train: the number of training examples of each client.
        test: the number of held-out examples of each client.
        labels: the names of the classes; None: a regression.
        counts: training examples of each client and class; no columns for a regression, and 0 for
            remote clients.
        test_counts: held-out examples of each client and class.
        scales: the least and the largest standard deviation of a feature; None: inputs are scaled.
        caution: what one must know before reading its scores; "": nothing unusual.
    """

    names: tuple[str, ...]
    train: Int[np.ndarray, " clients"]
    test: Int[np.ndarray, " clients"]
    labels: tuple[str, ...] | None
    counts: Int[np.ndarray, "clients classes"]
    test_counts: Int[np.ndarray, "clients classes"]
    scales: tuple[float, float] | None
    caution: str = ""

    @classmethod
    def of(cls, federation: Federation) -> "Description":
        """Describe a federation."""
        parts = federation.train, federation.test
        counts, test_counts = (_counts(federation, part) for part in parts)
        return cls(
            federation.names,
            np.asarray(federation.train.size),
            np.asarray(federation.test.size),
            federation.labels,
            counts,
            test_counts,
            _scales(federation),
            federation.caution,
        )

    @property
    def classes_held(self) -> Int[np.ndarray, " clients"]:
        """The number of classes of which each client has training examples."""
        return np.asarray(np.count_nonzero(self.counts, axis=1))

    @property
    def distance(self) -> Float[np.ndarray, " clients"]:
        """Total variation between each client's labels and those of all training data, 0 to 1."""
        return _distance(self.counts, self.counts.sum(axis=0, keepdims=True))

    @property
    def test_distance(self) -> Float[np.ndarray, " clients"]:
        """Total variation between each client's training and held-out labels."""
        return _distance(self.counts, self.test_counts)


def _counts(federation: Federation, part: FlatExamples) -> Int[np.ndarray, "clients classes"]:
    classes = 0 if federation.labels is None else len(federation.labels)
    if federation.labels is None or not federation.has_examples:
        return np.zeros((federation.clients, classes), int)
    owner = np.repeat(np.arange(federation.clients), part.size)
    return label_counts(part.y, owner, federation.clients, classes)


def _distance(counts: np.ndarray, others: np.ndarray) -> Float[np.ndarray, " clients"]:
    mixture, other = (c / np.maximum(c.sum(axis=1, keepdims=True), 1) for c in (counts, others))
    return np.asarray(0.5 * np.abs(mixture - other).sum(axis=1))


def _scales(federation: Federation) -> tuple[float, float] | None:
    """From up to 10,000 training examples; None for inputs that are scaled, or are symbols."""
    scaled = federation.vocabulary is not None or federation.scaling is not None
    if scaled or not federation.has_examples:
        return None
    rows = np.linspace(0, len(federation.train.x) - 1, 10_000).astype(int)
    x = np.asarray(federation.train.x[np.unique(rows)], np.float64)
    spread = x.reshape(len(x), -1).std(axis=0)
    spread = spread[spread > 0]
    return (float(spread.min()), float(spread.max())) if len(spread) else None


def remarks(facts: Description) -> list[str]:
    """What a user should know before training on these data."""
    notes = [facts.caution] if facts.caution else []
    if facts.scales is not None and facts.scales[1] > 100 * facts.scales[0]:
        low, high = facts.scales
        notes.append(
            f"features have very different scales (deviations from {low:.3g} to {high:.3g}), which "
            'makes gradient steps slow or unstable; try standardize = "feature"'
        )
    tiny = int(np.sum(facts.test < 5))
    if tiny:
        notes.append(f"{tiny} client(s) hold out fewer than 5 examples, so their scores are coarse")
    if facts.labels is not None:
        absent = [
            label for label, n in zip(facts.labels, facts.counts.sum(axis=0), strict=True) if n == 0
        ]
        if absent:
            notes.append(f"no client has training examples of: {', '.join(absent[:10])}")
    return notes
