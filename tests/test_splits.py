"""Splits: the papers' in their exact numbers, and what holds for every one of them."""

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfed import DataError, Federation, FieldError, load
from perfed.data import SPLITS, Dataset
from perfed.data.splits import (
    DirichletSplit,
    IIDSplit,
    LabeledRows,
    NaturalSplit,
    PerFedAvgSplit,
    PFedMeSplit,
    QuantitySplit,
    ShardSplit,
    Split,
    hold_out_mask,
    label_counts,
    proportional_counts,
)
from real_data import REAL, needs_real_data


def histograms(data: Federation, part: str = "train") -> np.ndarray:
    """How many examples of each class each client has."""
    flat = getattr(data, part)
    return np.array(
        [np.bincount(flat.client(i)[1], minlength=data.outputs) for i in range(data.clients)]
    )


def test_the_per_fedavg_split_of_the_digits() -> None:
    data = load("digits", clients=20, a=12)
    counts, held = histograms(data), histograms(data, "test")
    np.testing.assert_array_equal(counts[:10], [[12] * 5 + [0] * 5] * 10)
    for histogram in counts[10:]:
        assert sorted(histogram[:5]) == [0, 0, 0, 0, 6]
        assert sorted(histogram[5:]) == [0, 0, 0, 0, 24]
    np.testing.assert_array_equal(counts[10:].sum(axis=0), [12] * 5 + [48] * 5)
    for mine, out in zip(counts, held, strict=True):
        np.testing.assert_allclose(out / out.sum(), mine / mine.sum(), atol=1e-9)


def test_diff_hetero_drops_the_minor_class() -> None:
    data = load("digits", clients=20, diff_hetero=True)
    for i in range(10, 20):
        assert len(set(data.train.client(i)[1].tolist())) == 1


def test_a_split_larger_than_the_data_is_refused_with_the_numbers() -> None:
    with pytest.raises(
        DataError, match=r"needs 2200 examples of class 0, and there are \d+; .* is 12"
    ):
        load("digits", clients=20, a=200)
    with pytest.raises(FieldError, match="clients = 7: must be even for the Per-FedAvg split"):
        load("digits", clients=7)
    with pytest.raises(DataError, match="use fewer clients"):
        load("digits", clients=400)
    with pytest.raises(DataError, match="1797 examples are too few for 1000 clients"):
        load("digits", clients=1000, split="dirichlet")


def pixels(data: Federation) -> list[bytes]:
    return [row.tobytes() for part in (data.train, data.test) for row in part.x]


@pytest.mark.parametrize("split", ["per-fedavg", "dirichlet"])
def test_no_digit_goes_to_two_places(split: str) -> None:
    data = load("digits", clients=10, split=split, seed=5)
    rows = pixels(data)
    assert len(set(rows)) == len(rows)
    if split == "dirichlet":
        assert len(rows) == 1797
        assert data.train.size.min() >= 1
        assert data.test.size.min() >= 1


def test_splits_follow_their_seed() -> None:
    a, b, c = (load("digits", clients=10, split="dirichlet", seed=s) for s in (1, 1, 2))
    np.testing.assert_array_equal(a.train.x, b.train.x)
    assert a.train.size.tolist() != c.train.size.tolist()


def test_a_smaller_concentration_is_more_uneven() -> None:
    def classes_held(alpha: float) -> float:
        data = load("digits", clients=10, split="dirichlet", alpha=alpha)
        shares = [np.bincount(data.train.client(i)[1], minlength=10) for i in range(10)]
        return float(np.mean([(s / s.sum()).max() for s in shares]))

    assert classes_held(0.1) > classes_held(1.0) + 0.1 > classes_held(100.0) + 0.2


@settings(max_examples=60, deadline=None)
@given(
    labels=st.lists(st.integers(0, 4), min_size=2, max_size=200),
    groups=st.integers(1, 8),
    fraction=st.floats(0.05, 0.95),
    seed=st.integers(0, 99),
)
def test_held_out_parts(labels: list[int], groups: int, fraction: float, seed: int) -> None:
    """Each group gives its fraction, to the nearest row, evenly over labels; never all of it."""
    y = np.array(labels)
    owner = np.arange(len(y)) % groups
    out = hold_out_mask(y, owner, fraction, np.random.default_rng(seed))
    for g in range(min(groups, len(y))):
        n, held = int((owner == g).sum()), int(out[owner == g].sum())
        if n >= 2:
            assert held == min(max(round(n * fraction), 1), n - 1)
        for c in range(5):
            cell = (owner == g) & (y == c)
            assert abs(out[cell].sum() - cell.sum() * held / n) <= 1


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"clients": 0}, "clients"),
        ({"test_fraction": 1.0}, "test_fraction"),
        ({"split": "dirichlet", "alpha": 0.0}, "alpha"),
        ({"a": 5}, "a"),
        ({"split": "niid"}, "split"),
        ({"split": "iid", "a": 2}, "a"),
        ({"split": "iid", "examples": 2000}, "examples"),
        ({"split": "pfedme", "labels_per_client": 11}, "labels_per_client"),
        ({"split": "shards", "shards_per_client": 0}, "shards_per_client"),
        ({"test_from": "train"}, "test_from"),
        ({"standardize": "log"}, "standardize"),
        ({"standardize_target": True}, "standardize_target"),
        ({"clip": 0.0}, "clip"),
        ({"clip": "off"}, "clip"),
        ({"sede": 1}, "sede"),
        ({"seed": -1}, "seed"),
        ({"clients": 2.5}, "clients"),
    ],
)
def test_bad_settings_name_themselves(settings: dict[str, Any], field: str) -> None:
    with pytest.raises(FieldError) as caught:
        load("digits", **settings)
    assert caught.value.field == field


LABEL_SPLITS: list[Split] = [
    PerFedAvgSplit(4),
    PerFedAvgSplit(2, diff_hetero=True),
    PFedMeSplit(4),
    PFedMeSplit(3, labels_per_client=1),
    IIDSplit(5),
    IIDSplit(3, examples=20),
    DirichletSplit(6, 0.1),
    DirichletSplit(4, 5.0, balanced=True),
    DirichletSplit(9, 0.05, balanced=True),
    ShardSplit(5, 2),
    QuantitySplit(7, 1.0),
]


@pytest.mark.parametrize("split", LABEL_SPLITS, ids=str)
@pytest.mark.parametrize("test_from", ["client", "test-set"])
@settings(max_examples=25, deadline=None)
@given(
    labels=st.lists(st.integers(0, 3), min_size=2, max_size=160),
    seed=st.integers(0, 99),
    published=st.booleans(),
)
def test_every_split_of_any_set(
    split: Split, test_from: Any, labels: list[int], seed: int, published: bool
) -> None:
    """Either a clear refusal, or: no row twice, no empty client, rows keep their labels."""
    y = np.array(labels, np.int32)
    row = np.arange(len(y), dtype=np.int64)[:, None]
    test = np.random.default_rng(seed).random(len(y)) < 0.3 if published else None
    pool = Dataset(row, y, tuple("abcd"), test=test)
    try:
        data = pool.federation(split, test_from=test_from, test_fraction=0.4, seed=seed)
    except (DataError, FieldError) as refusal:
        numbers = [c for c in str(refusal) if c.isdigit()]
        assert numbers, "it may be refused, but with the numbers"
        return
    rows = np.concatenate([data.train.x, data.test.x])[:, 0]
    assert len(set(rows.tolist())) == len(rows)
    assert min(data.train.size.min(), data.test.size.min()) >= 1
    for part in (data.train, data.test):
        np.testing.assert_array_equal(part.y, y[part.x[:, 0]])
        assert part.size.sum() == len(part.y)
    if test_from == "test-set" and test is not None:
        assert test[data.test.x[:, 0]].all()
        assert not test[data.train.x[:, 0]].any()
    again = pool.federation(split, test_from=test_from, test_fraction=0.4, seed=seed)
    np.testing.assert_array_equal(data.train.x, again.train.x)
    np.testing.assert_array_equal(data.test.x, again.test.x)


@pytest.mark.parametrize("split", LABEL_SPLITS, ids=str)
@pytest.mark.parametrize("test_from", ["client", "test-set"])
def test_held_out_data_have_the_clients_own_distribution(split: Split, test_from: Any) -> None:
    y = np.random.default_rng(0).permutation(np.repeat(np.arange(4), 500)).astype(np.int32)
    pool = Dataset(np.zeros((len(y), 1)), y, tuple("abcd"))
    data = pool.federation(split, test_from=test_from)
    for train, test in zip(histograms(data), histograms(data, "test"), strict=True):
        # Each cell is rounded to whole rows.
        rounding = 2 / test.sum()
        np.testing.assert_allclose(test / test.sum(), train / train.sum(), atol=rounding)


def sorted_rows(classes: int = 10, each: int = 200) -> LabeledRows:
    """Rows in the order of their labels, as many published files have them."""
    return LabeledRows(np.repeat(np.arange(classes), each).astype(np.int32), classes)


def assigned(split: Split, rows: LabeledRows, seed: int = 0) -> np.ndarray:
    """The number of rows of each class of each client."""
    owner, names = split.assign(rows, np.random.default_rng(seed))
    return label_counts(rows.y, owner, len(names), rows.classes or 1)


def test_iid_shuffles() -> None:
    """From sorted rows, everyone still gets all classes in equal parts, to within chance."""
    counts = assigned(IIDSplit(10), sorted_rows())
    assert counts.sum(axis=1).tolist() == [200] * 10
    assert np.abs(counts - 20).max() < 5 * np.sqrt(20)


@pytest.mark.parametrize(
    # Those that share a class's 300 rows out among several clients.
    "split",
    [s for s in LABEL_SPLITS if s not in (PFedMeSplit(3, 1), IIDSplit(3, 20))],
    ids=str,
)
def test_rows_of_a_class_are_assigned_at_random(split: Split) -> None:
    """Not in the order of the file, and otherwise with another seed."""
    rows = sorted_rows(classes=4, each=300)
    a, b = (split.assign(rows, np.random.default_rng(seed)).owner for seed in (0, 1))
    assert not np.array_equal(a, b)
    for c in range(4):
        owners = a[rows.y == c]
        owners = owners[owners >= 0]
        changes = np.count_nonzero(np.diff(owners))
        if len(set(owners)) > 1:
            assert changes > 2 * len(set(owners))


def test_quantity_skew_follows_its_concentration() -> None:
    """Sizes as uneven as DirichletSplit ones; labels the same for everyone, to within chance."""

    def spread(alpha: float) -> float:
        split, rows = QuantitySplit(20, alpha), sorted_rows(each=1000)
        sizes = [assigned(split, rows, seed).sum(axis=1) for seed in range(20)]
        return float(np.sqrt(np.var(sizes, axis=1).mean()) / 500)

    # The relative spread of a DirichletSplit(c x 20) part is sqrt(19 / (20 c + 1)).
    assert spread(0.5) == pytest.approx(np.sqrt(19 / 11), rel=0.25)
    assert spread(50.0) == pytest.approx(np.sqrt(19 / 1001), rel=0.25)
    counts = assigned(QuantitySplit(5, 5.0), sorted_rows(each=1000))
    mixture = counts / counts.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(mixture, 0.1, atol=0.05)


def test_shards_are_assigned_at_random() -> None:
    """A client's shards seldom touch each other; each holds one label or two."""
    counts = assigned(ShardSplit(10, 2), sorted_rows())
    assert np.count_nonzero(counts, axis=1).max() <= 4
    held = [np.flatnonzero(row) for row in counts]
    apart = sum(bool(len(h) > 1 and np.diff(h).max() > 1) for h in held)
    assert apart >= 4


def test_per_fedavg_pairs_all_kinds_of_classes() -> None:
    """The minor and the major class of the second half come in other pairs from turn to turn."""
    counts = assigned(PerFedAvgSplit(50, a=4), sorted_rows(each=600))[25:]
    pairs = {(int(row[:5].argmax()), int(row[5:].argmax())) for row in counts}
    assert len(pairs) == 25


def test_natural_clients_are_chosen_at_random() -> None:
    rows = LabeledRows(np.zeros(100, np.int32), 1, np.arange(100) // 5, tuple(map(str, range(20))))
    chosen = {NaturalSplit(3).assign(rows, np.random.default_rng(s)).names for s in range(8)}
    assert len(chosen) > 4


def test_a_test_set_is_as_large_as_asked_for() -> None:
    for fraction in (0.2, 0.6):
        data = load("digits", clients=10, test_fraction=fraction, split="iid", test_from="test-set")
        held = data.test.size.sum() / 1797
        assert held == pytest.approx(fraction, abs=0.02)


def test_own_test_rows_are_never_trained_on() -> None:
    """Where data mark test rows themselves, any split holds out those and no others."""
    y = (np.arange(200) % 2).astype(np.int32)
    marks = np.random.default_rng(0).random(200) < 0.3
    pool = Dataset(np.arange(200)[:, None], y, ("n", "y"), test=marks, test_from="test-set")
    for split in (IIDSplit(4), DirichletSplit(4, 5.0), ShardSplit(4)):
        data = pool.federation(split)
        assert marks[data.test.x[:, 0]].all()
        assert not marks[data.train.x[:, 0]].any()
    with pytest.raises(FieldError, match="the data have test rows of their own"):
        pool.federation(IIDSplit(4), test_fraction=0.1)
    with pytest.raises(FieldError, match="no test rows of their own"):
        natural_pool().federation(NaturalSplit(min_examples=2), test_from="test-set")


def test_small_clients_are_tested_on_what_they_train_on() -> None:
    """A hundred clients of 50 rows, and a test set of a fifth: ten rows each, of like labels."""
    rows = sorted_rows(each=600)
    test = np.arange(6000) % 6 == 0
    pool = Dataset(np.zeros((6000, 1)), rows.y, tuple("0123456789"), test=test)
    data = pool.federation(IIDSplit(100), test_from="test-set")
    assert data.test.size.sum() > 0.85 * test.sum()
    assert data.test.size.min() >= 7
    train, held = histograms(data), histograms(data, "test")
    gap = np.abs(train / train.sum(1, keepdims=True) - held / held.sum(1, keepdims=True))
    assert (gap.sum(axis=1) / 2).mean() < 0.25  # 10 rows of 10 labels: rounding alone is 0.2


def test_dirichlet_uses_every_row_and_leaves_nobody_out() -> None:
    y = np.repeat(np.arange(10), 600).astype(np.int32)
    rows = LabeledRows(y, 10)
    for balanced in (False, True):
        split = DirichletSplit(2000, 0.1, balanced)
        owner, _ = split.assign(rows, np.random.default_rng(0))
        sizes = np.bincount(owner, minlength=2000)
        assert owner.min() == 0
        assert sizes.min() >= 2
        if balanced:
            assert set(sizes) == {3}


def test_balanced_dirichlet_keeps_its_mixtures_uneven() -> None:
    """Using up every class bends the mixtures, but does not wash them out."""
    y = np.repeat(np.arange(10), 1000).astype(np.int32)
    pool = Dataset(np.zeros((len(y), 1)), y, tuple("0123456789"))

    def largest(alpha: float) -> float:
        counts = histograms(pool.federation(DirichletSplit(50, alpha, balanced=True)))
        return float((counts / counts.sum(axis=1, keepdims=True)).max(axis=1).mean())

    # The mean largest part of a mixture is about 0.66 for alpha = 0.1, and 0.13 for 100.
    assert 0.5 < largest(0.1) < 0.75
    assert largest(100.0) < 0.2


def test_balanced_dirichlet_bends_mixtures_as_little_as_it_must() -> None:
    """With one class ten times as common, mixtures still differ, and every class is used up."""
    y = np.repeat(np.arange(4), [4000, 400, 400, 400]).astype(np.int32)
    counts = assigned(DirichletSplit(20, 1.0, balanced=True), LabeledRows(y, 4))
    assert counts.sum(axis=0).tolist() == [4000, 400, 400, 400]
    assert set(counts.sum(axis=1)) == {260}
    # Without fitting, rows that do not fit are moved at random, and all mixtures become alike.
    rare = counts[:, 1:] / 260
    assert rare.std(axis=0).min() > 0.05


def test_impossible_requests_are_refused_at_once() -> None:
    pool = Dataset(np.zeros((10, 1)), np.zeros(10, np.int32), ("a", "b"))
    for split in (
        IIDSplit(6),
        DirichletSplit(6),
        QuantitySplit(6),
        ShardSplit(3, 4),
        PFedMeSplit(8, 1),
    ):
        with pytest.raises(DataError, match=r"\d+ (examples|pieces)"):
            pool.federation(split)
    with pytest.raises(DataError, match="these data have no natural clients"):
        pool.federation(NaturalSplit())
    regression = Dataset(np.zeros((10, 1)), np.ones(10, np.float32), None)
    assert regression.federation(IIDSplit(2)).labels is None
    with pytest.raises(DataError, match="needs classes, and these data are a regression"):
        regression.federation(DirichletSplit(2))


def natural_pool(**more: Any) -> Dataset:
    client = np.array([0] * 8 + [1] * 4 + [2])
    y = np.arange(13, dtype=np.int32) % 2
    return Dataset(
        np.arange(13)[:, None], y, ("n", "y"), client=client, names=("A", "B", "C"), **more
    )


def test_natural_clients() -> None:
    with pytest.raises(DataError, match=r"client C has 1 example.*min_examples = 2"):
        natural_pool().federation(NaturalSplit())
    data = natural_pool().federation(NaturalSplit(min_examples=2))
    assert data.names == ("A", "B")
    assert (data.train.size + data.test.size).tolist() == [8, 4]
    assert set(data.train.client(1)[0][:, 0]) | set(data.test.client(1)[0][:, 0]) == {8, 9, 10, 11}
    one = natural_pool().federation(NaturalSplit(clients=1, min_examples=2))
    assert one.names in (("A",), ("B",))
    with pytest.raises(FieldError, match="there are only 2 with at least 4"):
        natural_pool().federation(NaturalSplit(clients=3, min_examples=4))


def test_natural_clients_with_test_rows_of_their_own() -> None:
    test = np.array([False, True] * 6 + [False])
    data = natural_pool(test=test).federation(NaturalSplit(min_examples=2))
    assert data.test.x[:, 0].tolist() == [1, 3, 5, 7, 9, 11]
    with pytest.raises(DataError, match="client C gets none of the 6 test examples"):
        natural_pool(test=test).federation(NaturalSplit())


def test_windows_of_a_text_share_nothing() -> None:
    """The end of each client's text is held out, after a gap as long as a window."""
    client = np.repeat([0, 1], [40, 60])
    row = np.concatenate([np.arange(40), np.arange(60)])
    vocabulary = tuple("abc")
    pool = Dataset(
        row[:, None], np.zeros(100, np.int32), vocabulary,
        client=client, names=("A", "B"), vocabulary=vocabulary, gap=5,
    )  # fmt: skip
    data = pool.federation(NaturalSplit(), test_fraction=0.25)
    for i, n in enumerate((40, 60)):
        held = n // 4
        assert data.test.client(i)[0][:, 0].tolist() == list(range(n - held, n))
        assert data.train.client(i)[0][:, 0].tolist() == list(range(n - held - 5))
    with pytest.raises(DataError, match='use split = "natural"'):
        pool.federation(IIDSplit(2))
    with pytest.raises(FieldError, match="characters of texts, which are not scaled"):
        pool.federation(NaturalSplit(), standardize="feature")


def test_proportional_counts_fit_and_keep_proportions() -> None:
    counts = np.array([[196, 196, 0], [98, 0, 392]])
    scaled = proportional_counts(counts, np.array([53, 40, 100]), np.random.default_rng(0))
    assert (scaled.sum(axis=0) <= [53, 40, 100]).all()
    np.testing.assert_allclose(scaled / 0.18, counts, atol=6)


MNIST_TRAIN = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]


@needs_real_data
def test_the_per_fedavg_split_of_mnist() -> None:
    """Section 5: a = 196, 50 users; users 1-25 hold 196 of each of 0-4."""
    data = load("mnist", root=str(REAL), clients=50, a=196)
    counts = histograms(data)
    np.testing.assert_array_equal(counts[:25], [[196] * 5 + [0] * 5] * 25)
    for low, high in zip(counts[25:, :5], counts[25:, 5:], strict=True):
        assert sorted(low) == [0, 0, 0, 0, 98]
        assert sorted(high) == [0, 0, 0, 0, 392]
    np.testing.assert_array_equal(counts[25:].sum(axis=0), [5 * 98] * 5 + [5 * 392] * 5)
    test = histograms(data, "test")
    mixture, held = (part / part.sum(axis=1, keepdims=True) for part in (counts, test))
    np.testing.assert_allclose(held, mixture, atol=0.02)
    rows = np.concatenate([data.train.x, data.test.x]).reshape(-1, 784)
    assert len(np.unique(rows, axis=0)) == len(rows)
    other = histograms(load("mnist", root=str(REAL), clients=50, a=196, diff_hetero=True))
    assert (np.count_nonzero(other[25:], axis=1) == 1).all()
    with pytest.raises(
        DataError, match=r"needs 5885 examples of class 4, .* 5842; the largest a is 212"
    ):
        load("mnist", root=str(REAL), clients=50, a=214)


@pytest.mark.slow
@needs_real_data
def test_the_per_fedavg_split_of_cifar10() -> None:
    counts = histograms(load("cifar10", root=str(REAL), clients=50, a=68))
    np.testing.assert_array_equal(counts[:25], [[68] * 5 + [0] * 5] * 25)
    assert set(counts[25:, :5].ravel()) == {0, 34}
    assert set(counts[25:, 5:].ravel()) == {0, 136}


@needs_real_data
def test_the_pfedme_split_of_mnist() -> None:
    """Section 5.1: the complete set, 20 clients, 2 labels each, 1165 to 3834 training examples."""
    data = load("mnist", root=str(REAL), split="pfedme")
    counts = histograms(data)
    assert data.clients == 20
    assert (np.count_nonzero(counts, axis=1) == 2).all()
    assert data.train.size.sum() + data.test.size.sum() == 70000
    assert (data.train.size.min(), data.train.size.max()) == (1167, 3834)


def shown_to_others(data: Federation) -> tuple[int, float]:
    """Held-out rows that are the client's own training rows, and the part that are another's."""
    train = [{row.tobytes() for row in data.train.client(i)[0]} for i in range(data.clients)]
    own, others, total = 0, 0, 0
    for i in range(data.clients):
        for row in data.test.client(i)[0]:
            at = [j for j in range(data.clients) if row.tobytes() in train[j]]
            own += i in at
            others += any(j != i for j in at)
            total += 1
    return own, others / total


def test_rows_as_published_overlap_and_say_so() -> None:
    """On the digits: all pieces of a class begin with its first or second row, then shuffled."""
    data = load("digits", split="pfedme", overlap="as-published")
    assert data.clients == 20
    assert "as-published" in data.caution
    disjoint = load("digits", split="pfedme")
    assert (disjoint.caution, shown_to_others(disjoint)[0]) == ("", 0)
    own, others = shown_to_others(data)
    assert (own, others > 0.5) == (0, True)
    again = load("digits", split="pfedme", overlap="as-published", seed=5)
    assert again.checksum() == data.checksum()
    for wrong, field in (
        ({"clients": 10}, "clients"),
        ({"labels_per_client": 3}, "labels_per_client"),
        ({"test_fraction": 0.5}, "test_fraction"),
        ({"test_from": "client"}, "test_from"),
        ({"overlap": "some"}, "overlap"),
    ):
        with pytest.raises(FieldError, match=field):
            load("digits", split="pfedme", **{"overlap": "as-published"} | wrong)
    for y in (np.arange(30) % 3, np.arange(40) % 10):
        pool = Dataset(np.zeros((len(y), 2)), y, tuple("abcdefghij"[: y.max() + 1]))
        with pytest.raises(DataError, match=r"needs 10 classes|class of 4 examples into 4 pieces"):
            pool.federation(PFedMeSplit(overlap="as-published"))


@needs_real_data
def test_the_pfedme_split_of_mnist_as_published() -> None:
    """What is known of the authors' rows: sizes, overlap, and the labels that are wrong."""
    data = load(
        "mnist", root=str(REAL), split="pfedme", overlap="as-published", standardize="whole-set"
    )
    assert (data.train.size.min(), data.train.size.max()) == (1165, 3834)
    assert data.train.size[:4].tolist() == [3834, 3740, 2916, 3189]
    assert (data.train.size.sum(), data.test.size.sum()) == (52470, 17499)
    distinct = len({row.tobytes() for row in data.train.x})
    assert 22194 - 30 <= distinct <= 22194  # a few pictures of MNIST come twice
    pool = load("mnist", root=str(REAL), split="iid", clients=1, test_fraction=0.001)
    truth = {row.tobytes(): label for part in (pool.train, pool.test)
             for row, label in zip(part.x, part.y, strict=True)}  # fmt: skip
    wrong = sum(
        truth[row.tobytes()] != label
        for part in (data.train, data.test)
        for row, label in zip(part.x, part.y, strict=True)
    )
    assert wrong == 19
    for i in range(20):
        labels = np.bincount(data.train.client(i)[1], minlength=10)
        assert set(np.flatnonzero(labels)) == {i % 10, (i + 1) % 10}
    own, others = shown_to_others(data)
    assert own <= 3
    assert others == pytest.approx(0.891, abs=0.002)
    assert data.scaling is not None
    x = np.concatenate([pool.train.x, pool.test.x]).reshape(70000, -1).astype(np.float64)
    np.testing.assert_allclose(data.scaling.shift.ravel(), x.mean(axis=0), atol=1e-3)
    np.testing.assert_allclose(1 / data.scaling.scale.ravel(), x.std(axis=0) + 0.001, rtol=1e-4)
    assert np.isinf(data.scaling.clip).all()


@pytest.mark.slow
@needs_real_data
def test_the_fedpaq_splits() -> None:
    """Figure 1: digits 0 and 8, 50 nodes of 200 examples; 10,000 examples of CIFAR-10."""
    settings: dict[str, Any] = {
        "root": str(REAL), "split": "iid", "clients": 50, "examples": 10_000,
        "test_from": "test-set",
    }  # fmt: skip
    data = load("mnist", only=(0, 8), **settings)
    assert data.labels == ("0", "8")
    assert (data.train.size == 200).all()
    share = histograms(data).sum(axis=0) / data.train.size.sum()
    np.testing.assert_allclose(share, [0.5, 0.5], atol=0.02)
    cifar = load("cifar10", **settings)
    assert (cifar.train.size == 200).all()


def test_all_splits_are_tested() -> None:
    assert {type(split) for split in LABEL_SPLITS} | {NaturalSplit} == set(SPLITS.values())


@pytest.mark.slow
@needs_real_data
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_cifar10_in_ten_thousand_parts_needs_little_memory() -> None:
    """Loading and splitting it peaks under 1.5 GiB, in a process of its own."""
    code = (
        "import sys, perfed\n"
        "data = perfed.load('cifar10', root=sys.argv[1], split='dirichlet', clients=10_000,\n"
        "                   alpha=0.1, standardize='client')\n"
        "assert data.clients == 10_000\n"
        "print(open('/proc/self/status').read().split('VmHWM:')[1].split()[0])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(REAL)], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) / 2**20 < 1.5  # the most it ever held, in KiB
