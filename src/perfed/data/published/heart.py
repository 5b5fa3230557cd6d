"""Heart disease, by hospital: the table, and the split that FLamby's results are of."""

import csv
from collections.abc import Iterator, Mapping
from importlib.resources import files

import numpy as np
from jaxtyping import Bool, Int

from perfed.core.errors import require
from perfed.data.dataset import Dataset

# Half of the patients and more have no value in these.
_DROPPED = ("st_slope", "vessels", "thal")

# The columns of inputs in FLamby's order: numbers, and words that are 1; then those of words with
# one input for each word but the first.
_NUMBERS: Mapping[str, str | None] = {
    "age": None,
    "sex": "male",
    "resting_bp": None,
    "cholesterol": None,
    "fasting_sugar": "yes",
    "max_heart_rate": None,
    "exercise_angina": "yes",
    "st_depression": None,
}
_WORDS = {
    "chest_pain": ("typical", "atypical", "non-anginal", "asymptomatic"),
    "resting_ecg": ("normal", "st-t", "hypertrophy"),
}
_LABELS = ("no disease", "disease")

# FLamby's split: the part to train on, and the seed.
_TRAIN_FRACTION = 0.66
_FLAMBY_SEED = 43

# A hospital is split by diagnosis if it has more than so many patients of each.
_STRATA_ABOVE = 2


def heart(split_seed: int = _FLAMBY_SEED) -> Dataset:
    """Heart disease: 740 patients of four hospitals, who are the clients; ships with the package.

    The protocol is that of Fed-Heart-Disease in FLamby (Ogier du Terrail et al., NeurIPS 2022):
    patients without missing values in ten columns, 13 inputs, 66 % of each hospital to train on,
    inputs standardized over each hospital's own training rows.

    Args:
        split_seed: which split into training and test rows; 43 is FLamby's.
    """
    whole = isinstance(split_seed, int) and not isinstance(split_seed, bool)
    require(
        whole and 0 <= split_seed < 2**32,
        "split_seed",
        split_seed,
        "must be a whole number between 0 and 2^32 - 1",
    )
    rows = list(_complete_rows())
    y = np.array([int(row["diagnosis"]) > 0 for row in rows], np.int32)
    names = tuple(dict.fromkeys(row["hospital"] for row in rows))
    client = np.array([names.index(row["hospital"]) for row in rows], np.int32)
    test = np.zeros(len(rows), bool)
    for i in range(len(names)):
        test[client == i] = _test_rows(y[client == i], split_seed)
    return Dataset(
        np.array([_inputs(row) for row in rows], np.float32),
        y,
        _LABELS,
        test=test,
        client=client,
        names=names,
        standardize="client",
        features=_feature_names(),
        ddof=1,
    )


def _complete_rows() -> Iterator[dict[str, str]]:
    """The patients who have a value in every column that is used."""
    text = files("perfed.data").joinpath("heart.csv").read_text(encoding="utf-8")
    for row in csv.DictReader(text.splitlines()):
        used = {name: cell for name, cell in row.items() if name not in _DROPPED}
        if all(used.values()):
            yield used


def _inputs(row: Mapping[str, str]) -> list[float]:
    """A patient's inputs."""
    plain = [
        float(row[name]) if one is None else float(row[name] == one)
        for name, one in _NUMBERS.items()
    ]
    return plain + [
        float(row[name] == word) for name, words in _WORDS.items() for word in words[1:]
    ]


def _feature_names() -> tuple[str, ...]:
    """The names of the inputs."""
    plain = [name if one in (None, "yes") else one for name, one in _NUMBERS.items()]
    words = [f"{name}_{word}" for name, words in _WORDS.items() for word in words[1:]]
    return tuple(str(name) for name in (*plain, *words))


def _test_rows(y: Int[np.ndarray, " rows"], seed: int) -> Bool[np.ndarray, " rows"]:
    """The test rows of one hospital: those of scikit-learn's `train_test_split` with this seed.

    Its published split is a sequence of draws of NumPy's RandomState, which will not change. So the
    draws are made again here, in their order.
    """
    rng = np.random.RandomState(seed)
    rows = len(y)
    train_size = int(np.floor(_TRAIN_FRACTION * rows))
    test_size = int(np.ceil((1.0 - _TRAIN_FRACTION) * rows))
    counts = np.bincount(y, minlength=len(_LABELS))
    test = np.zeros(rows, bool)
    if counts.min() <= _STRATA_ABOVE:
        test[rng.permutation(rows)[:test_size]] = True
        return test
    train_counts = _stratum_counts(counts, train_size, rng)
    test_counts = _stratum_counts(counts - train_counts, test_size, rng)
    for label, (first, count) in enumerate(zip(train_counts, test_counts, strict=True)):
        shuffled = np.flatnonzero(y == label)[rng.permutation(counts[label])]
        test[shuffled[first : first + count]] = True
    return test


def _stratum_counts(
    available: Int[np.ndarray, " strata"], size: int, rng: np.random.RandomState
) -> Int[np.ndarray, " strata"]:
    """How many of each stratum make a sample of this size: the largest remainders are rounded up.

    Between equal remainders a draw decides.
    """
    exact = available / available.sum() * size
    counts = np.floor(exact).astype(int)
    missing = size - int(counts.sum())
    remainder = exact - counts
    for value in np.unique(remainder)[::-1]:
        if missing == 0:
            break
        tied = np.flatnonzero(remainder == value)
        drawn = rng.choice(tied, size=min(len(tied), missing), replace=False)
        counts[drawn] += 1
        missing -= len(drawn)
    return np.asarray(counts)
