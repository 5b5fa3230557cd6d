"""Heart disease by hospital: the rows, the inputs, the split and the scaling that FLamby has."""

import csv
import hashlib
from pathlib import Path

import numpy as np
import pytest

import perfed
from perfed import MLR, ConfigError, FedAvg, Federation, FieldError, Local, simulate
from perfed.data.published import available, heart
from perfed.runs.config import DataConfig

HOSPITALS = ("cleveland", "budapest", "zurich-basel", "long-beach")
PATIENTS = [303, 261, 46, 130]
FEATURES = (
    "age",
    "male",
    "resting_bp",
    "cholesterol",
    "fasting_sugar",
    "max_heart_rate",
    "exercise_angina",
    "st_depression",
    "chest_pain_atypical",
    "chest_pain_non-anginal",
    "chest_pain_asymptomatic",
    "resting_ecg_st-t",
    "resting_ecg_hypertrophy",
)

# SHA-256 of each hospital's sorted test rows (int32, little-endian; counted within its complete
# rows), as train_test_split(np.arange(n), test_size=1 - 0.66, train_size=0.66, random_state=SEED,
# shuffle=True, stratify=...) of scikit-learn 1.9.1 gave them.
SPLITS = {
    43: ("65c57b7ad4ce1fe9", "6b0d67882be6362f", "945afb6efea5f861", "03c42a6d8800e125"),
    0: ("dc942c9424ece477", "9eab2b0f866f21de", "ee49ccf21ef85ed4", "00297b1114289cc2"),
    7: ("339e4befdf46f77b", "7c1ff4d7219607d1", "6a180b1c4d129f9e", "8492e324e75e46e6"),
}


@pytest.fixture(scope="module")
def federation() -> Federation:
    return perfed.load("heart")


def table() -> list[dict[str, str]]:
    path = Path(perfed.__file__).parent / "data" / "heart.csv"
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_patients_are_those_without_missing_values() -> None:
    assert len(table()) == 920
    data = heart()
    assert data.names == HOSPITALS
    assert data.client is not None
    assert np.bincount(data.client).tolist() == PATIENTS
    assert data.x.shape == (740, 13)
    assert (data.x.dtype.name, data.y.dtype.name) == ("float32", "int32")
    assert data.features == FEATURES
    assert data.labels == ("no disease", "disease")
    sick = [np.bincount(data.y[data.client == i]).tolist() for i in range(4)]
    assert sick == [[164, 139], [163, 98], [1, 45], [29, 101]]


def test_inputs_are_the_columns_in_numbers() -> None:
    """The first patients of the file, by hand; the second has a diagnosis of 2: disease."""
    assert heart().x[:2].tolist() == [
        [63, 1, 145, 233, 1, 150, 0, np.float32(2.3), 0, 0, 0, 0, 1],
        [67, 1, 160, 286, 0, 108, 1, 1.5, 0, 0, 1, 0, 1],
    ]
    assert heart().y[:3].tolist() == [0, 1, 1]
    x = heart().x
    named = dict(zip(FEATURES, x.T, strict=True))
    words = [name for name in FEATURES if "chest" in name or "ecg" in name]
    assert all(set(named[name].tolist()) == {0, 1} for name in (*words, "male", "fasting_sugar"))
    # A cholesterol of 0 means that it is missing; FLamby keeps it, as the file has it.
    assert (named["cholesterol"] == 0).any()


@pytest.mark.parametrize("seed", list(SPLITS))
def test_the_split_is_the_one_that_scikit_learn_gives(seed: int) -> None:
    data = heart(seed)
    assert data.client is not None
    assert data.test is not None
    rows = [np.flatnonzero(data.test[data.client == i]) for i in range(4)]
    checksums = [hashlib.sha256(own.astype("<i4").tobytes()).hexdigest()[:16] for own in rows]
    assert tuple(checksums) == SPLITS[seed]


def test_the_federation_has_the_split(federation: Federation) -> None:
    assert federation.names == HOSPITALS
    assert federation.train.size.tolist() == [199, 172, 30, 85]
    assert federation.test.size.tolist() == [104, 89, 16, 45]
    assert federation.features == FEATURES
    data = heart()
    assert data.client is not None
    assert data.test is not None
    for i in range(4):
        for part, marked in ((federation.train, ~data.test), (federation.test, data.test)):
            rows = (data.client == i) & marked
            assert np.array_equal(part.client(i)[0], data.x[rows])
            assert np.array_equal(part.client(i)[1], data.y[rows])


def test_inputs_are_standardized_by_the_hospitals_own_training_rows(federation: Federation) -> None:
    """Mean and deviation (n - 1) of training rows alone: test rows are scaled by the same."""
    for i in range(4):
        train, test = (p.client(i)[0].astype(float) for p in (federation.train, federation.test))
        mean, spread = train.mean(axis=0), train.std(axis=0, ddof=1)
        spread = np.where(spread > 0, spread, 1)
        for part in (train, test):
            scaled = federation.scale(part, i)
            np.testing.assert_allclose(scaled, (part - mean) / spread, rtol=1e-4, atol=1e-4)
            # No value of this split is clipped.
            assert np.abs(scaled).max() < 10
    # In Zurich and Basel cholesterol is always missing.
    assert not federation.scale(federation.train.client(2)[0], 2)[:, 3].any()


def test_other_splits_of_the_same_patients(federation: Federation) -> None:
    other = perfed.load("heart", split_seed=0)
    assert other.train.size.tolist() == federation.train.size.tolist()
    assert not np.array_equal(other.test.x, federation.test.x)
    part = federation.validation(0.25)
    assert (part.train.size + part.test.size).tolist() == federation.train.size.tolist()
    mixed = perfed.load("heart", split="iid", clients=5, test_from="client")
    assert (mixed.train.size + mixed.test.size).sum() == 740


@pytest.mark.parametrize("seed", [-1, 2**32, 1.5, True])
def test_a_split_seed_is_a_whole_number(seed: int) -> None:
    with pytest.raises(FieldError, match=r"split_seed = .*: must be a whole number between 0"):
        perfed.load("heart", split_seed=seed)


def test_it_is_a_source_of_configurations(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('[data]\nsource = "heart"\n')
    assert DataConfig.load(file).build_federation().names == HOSPITALS
    file.write_text('[data]\nsource = "heart"\nsplit_sed = 1\n')
    with pytest.raises(ConfigError, match="split_seed"):
        DataConfig.load(file)
    assert available("heart") == "ships with the package"


def test_the_methods_learn_on_it(federation: Federation) -> None:
    """FLamby prints .685 for FedAvg and .730 for Local, both after less training.

    One of the four accuracies is of 16 patients, so the ranges are wide.
    """
    scores = {}
    for method in (FedAvg(lr=0.01, tau=20, batch=8), Local(lr=0.01, tau=20, batch=8)):
        result = simulate(federation, MLR(13, 2), method, rounds=30, cohort=4)
        scores[method.name] = result.scores["personalized"].accuracy.mean()
    assert 0.70 <= scores["fedavg"] <= 0.80
    assert 0.74 <= scores["local"] <= 0.84
