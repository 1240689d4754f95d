"""What the columns of a table are, and which of them are not learned from."""

from __future__ import annotations

import numpy as np
import pytest
import statsmodels.datasets

from steadytrain.components.shared.errors import DataError
from steadytrain.components.tabular.columns import Target, inferred
from steadytrain.components.tabular.model import is_missing, numbers_of, plain_number

from support.tables import shipped

ROWS = 60
CLASSES = Target("y", [np.arange(ROWS) % 2], numbers=False)
NUMBERS = Target("y", [np.linspace(1, 9, ROWS) ** 2], numbers=True)
WORDS = ("red", "green", "blue")
THIRDS = Target("y", [np.arange(ROWS) % 3], numbers=False)
REPEATED = Target("y", [np.arange(ROWS) % 15 * 100.0 + 9], numbers=True)
CHANCE = np.random.default_rng(0)


def column(values, target=CLASSES, **how):
    """Return what the only column `x` is."""
    (found,) = inferred({"x": list(values)}, target, **how).columns
    return found


def cycled(*values):
    return [values[row % len(values)] for row in range(ROWS)]


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        (cycled(1, 2.5, None), "number"),
        (cycled("1", " -2.5", "1e3", "NA", ""), "number"),
        (cycled("red", "green", "?"), "category"),
        (cycled(True, False, True), "category"),
        (cycled("01234", "99999", "00001"), "category"),
        (cycled("3", "four", 5), "category"),
        (cycled("2024-01-31", "2023-12-01T10:30:00", None), "date"),
        (cycled("31/01/2024", "01/12/2023", "05/05/2020"), "category"),
        ([row * 7 % 61 for row in range(ROWS)], "number"),
        ([f"a text of many words number {row}" for row in range(ROWS)], "text"),
    ],
)
def test_kind_is_that_of_all_values(values, kind):
    found = column(values)
    assert (found.kind, found.reason) == (kind, "")


@pytest.mark.parametrize(
    "values",
    [
        cycled(10115, 20095.0, 80331, None, 10115),
        cycled("10115", "20095", "?"),
        cycled("2024-01-31", "2023-12-01", "2024-02-29"),
        [f"a text of many words number {row or 1}" for row in range(ROWS)],
    ],
)
def test_named_columns_are_categories_whatever_they_look_like(values):
    assert column(values).kind != "category"
    assert column(values, categories=["x"]).kind == "category"
    assert column(range(ROWS), categories=["x"]).reason.startswith("every value is different")
    assert column(range(ROWS), categories=["x"], allowed=["x"]).kind == "category"
    assert column([3] * ROWS, categories=["x"]).reason == "every value is '3'"
    with pytest.raises(DataError, match=r"'x', which data\.columns\.text says is text"):
        column(values, categories=["x"], text="x")


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ([None, "", float("nan")] * 20, "every value is missing"),
        (["same"] * ROWS, "every value is 'same'"),
        ([f"u-{row:x}" for row in range(ROWS)], "identifies a record"),
        ([{"a": 1}, [2]] * 30, "lists or mappings"),
    ],
)
def test_column_is_left_out_with_a_reason(values, reason):
    found = column(values)
    assert found.kind is None
    assert reason in found.reason


def test_values_that_are_not_dates_are_counted():
    days = [f"2024-01-{row % 31 + 1:02d}" for row in range(ROWS - 1)]
    found = column([*days, "31/02/2024"])
    assert found.kind == "category"
    assert "has 1 values that are not dates in ISO 8601, such as '31/02/2024'" in found.note
    different = column([f"{2000 + row}-01-01" for row in range(ROWS - 1)] + ["soon"])
    assert different.kind is None
    assert "has 1 values that are not dates in ISO 8601, such as 'soon'" in different.reason


def test_dates_of_which_only_some_have_a_time_zone_are_named():
    zoned, local = "2024-01-02T10:00:00+05:00", "2024-01-03T10:00"
    found = column(cycled(zoned, local, "2024-01-04"))
    assert (found.kind, found.reason) == ("date", "")
    assert found.note == "has 20 dates with a time zone; the other 40 count as UTC"
    for values in (cycled(zoned, *["2024-01-02T10:00Z"] * 2), cycled(local, *["2024-01-04"] * 2)):
        assert (column(values).kind, column(values).note) == ("date", "")


def test_dates_in_another_form_are_named():
    days = cycled("31/01/2024", "01/12/2023", None, "05/05/2020 10:30", "07/05/2020")
    found = column(days)
    assert found.kind == "category"
    assert "has 48 values that are not dates in ISO 8601, such as '31/01/2024'" in found.note
    assert "learned as categories" in found.note
    different = column([f"{row % 28 + 1}.{row % 12 + 1}.{1950 + row}" for row in range(ROWS)])
    assert different.kind is None
    assert "has 60 values that are not dates in ISO 8601, such as '1.1.1950'" in different.reason
    for values in (cycled("1/2", "a-b"), cycled("10-2", "3.4.5.6"), cycled("555-12-x", "1.2")):
        assert "dates" not in column(values).note


def test_many_columns_of_one_value_share_a_sentence():
    columns = {f"c{number:04d}": ["same"] * ROWS for number in range(3000)}
    columns |= {"gone": [None] * ROWS, "x": cycled("red", "green", "blue")}
    (remark,) = inferred(columns, CLASSES).remarks()
    assert remark.startswith("3,001 columns are not learned from, since each has one value or none")
    assert "'c0000', 'c0001', 'c0002' and 2,998 others" in remark


def test_row_numbers_are_left_out_unless_allowed():
    rows = range(1, 10_001)
    target = Target("y", [np.arange(10_000) % 2], numbers=False)
    values = np.random.default_rng(0).permutation(rows).tolist()
    assert "numbers the records" in column(values, target).reason
    assert column(values, target, allowed=["x"]).kind == "number"
    assert column([value * 100 for value in values], target).kind == "number"


def only(target, classes, others=()):
    """Return numbers for records of some classes alone, and for some of the others' records."""
    return [
        row * 7 % 31 if truth in classes or row in others else None
        for row, truth in enumerate(target.values[0].tolist())
    ]


def rare(count, total):
    return Target("y", [np.arange(total) < count], numbers=False)


@pytest.mark.parametrize(
    ("values", "target", "evidence"),
    [
        (cycled("no", "yes"), CLASSES, "each of its 2 values belongs to one class"),
        ([row % 2 + row / 1000 for row in range(ROWS)], CLASSES, "separate the 2 classes"),
        ((3 - 2 * NUMBERS.values[0]).tolist(), NUMBERS, "linear function of the target"),
        (only(CLASSES, {1}), CLASSES, "30 records of one class of the target has a value"),
        (only(THIRDS, {2}), THIRDS, "the 40 others have none"),
        (only(THIRDS, {0, 2}), THIRDS, "20 records of one class of the target has no value"),
        ([row % 50 if row > 3 else "n.n." for row in range(120)], rare(4, 120),
         "the 4 others have none"),
        (cycled("a1", "b1", "c1", "a2", "b2", "c2"), THIRDS, "each of its 6 values belongs to one"),
        (cycled("a", None, "b", None), Target("y", [np.arange(ROWS) % 4], numbers=False),
         "each of its 2 values belongs to one class"),
        (cycled(11, 12, 21, 22), CLASSES, "each of its 4 values belongs to one class"),
        ([value // 100 * 7 % 15 for value in REPEATED.values[0]], REPEATED,
         "values has one number as the target"),
        ([f"{value} USD" for value in REPEATED.values[0]], REPEATED,
         "each of its 15 values has one number as the target"),
        (np.sqrt(NUMBERS.values[0]).tolist(), NUMBERS, "monotone function of the target (rank cor"),
        ((-np.log(NUMBERS.values[0])).tolist(), NUMBERS, "(rank correlation -1)"),
        (np.log(REPEATED.values[0] + np.arange(ROWS) % 30).tolist(),
         Target("y", [REPEATED.values[0] + np.arange(ROWS) % 30], numbers=True), "monotone"),
    ],
)  # fmt: skip
def test_column_that_gives_the_target_away_is_left_out_with_evidence(values, target, evidence):
    found = column(values, target)
    assert found.kind is None
    assert evidence in found.reason
    assert found.reason.endswith("name it in data.allow_leaks to learn from it")
    assert column(values, target, allowed=["x"]).kind is not None


@pytest.mark.parametrize(
    ("values", "target"),
    [
        (cycled("no", "yes", "yes"), CLASSES),
        ([row % 2 + row / 50 for row in range(ROWS)], CLASSES),
        (np.sqrt(NUMBERS.values[0] + CHANCE.normal(size=ROWS) ** 2).tolist(), NUMBERS),
        # Nearly all records of a class have a value, and no other has one.
        ([*only(CLASSES, {1})[:-1], None], CLASSES),
        (only(CLASSES, {1}, others=[8]), CLASSES),
        # A record or two of a rare class have the largest value, the only ones, or a text.
        ([9.5, *range(-199, 0)], rare(1, 200)),
        ([1.5, 2.5, *[None] * 198], rare(2, 200)),
        (["rare", *["usual"] * 199], rare(1, 200)),
        # So many values that each has a record or two.
        ([f"v{row % 35}" for row in range(ROWS)], CLASSES),
        ([f"v{row // 2}" for row in range(200)], Target("y", [np.arange(200) // 2 % 2], False)),
        ([f"v{value // 2:.0f}" for value in NUMBERS.values[0]], NUMBERS),
        (cycled("a", "b", "c"), REPEATED),
        # Few different numbers may be in the order of the target.
        ([value // 300 for value in REPEATED.values[0]], REPEATED),
        (cycled(1, 2), Target("y", [np.arange(ROWS) % 2 * 3.0 + (np.arange(ROWS) == 7)], True)),
    ],
)
def test_column_that_only_predicts_well_is_learned_from(values, target):
    assert column(values, target).reason == ""


@pytest.mark.parametrize("seed", range(3))
def test_columns_of_chance_are_learned_from(seed):
    """Thousands of them, whatever the classes' sizes, the number of values and what is missing."""
    chance = np.random.default_rng(seed)
    rows, columns = 40, dict[str, list[object]]()
    for place in range(3000):
        values = chance.integers(0, chance.choice([2, 3, 30]), rows).astype(object)
        if place % 3:
            values = chance.normal(size=rows).astype(object)
        values[chance.random(rows) < chance.choice([0, 0.1, 0.9])] = None
        columns[f"c{place}"] = [v if place % 3 or v is None else f"v{v}" for v in values]
    few, even = np.arange(rows) < 2, chance.integers(0, 3, rows)
    for target in (
        Target("y", [few], numbers=False),
        Target("y", [even], numbers=False),
        Target("y", [even.astype(float)], numbers=True),
        Target("y", [chance.normal(size=rows)], numbers=True),
    ):
        leaks = [one.name for one in inferred(columns, target).columns if "target" in one.reason]
        assert leaks == []


def real_tables():
    for name in ("breast_cancer", "wine", "iris", "diabetes"):
        frame = shipped(name)
        yield name, frame, "target", name == "diabetes"
    for name, target, numbers in (
        ("anes96", "vote", False),
        ("anes96", "PID", False),
        ("anes96", "age", True),
        ("fair", "affairs", True),
        ("fair", "religious", False),
    ):
        frame = getattr(statsmodels.datasets, name).load_pandas().data
        yield f"{name} {target}", frame, target, numbers


@pytest.mark.parametrize(
    ("frame", "target", "numbers"),
    [pytest.param(*rest, id=name) for name, *rest in real_tables()],
)
def test_no_column_of_real_tables_is_a_leak(frame, target, numbers):
    truth = frame[target].to_numpy()
    if not numbers:
        truth = np.unique(truth, return_inverse=True)[1]
    columns = {name: frame[name].tolist() for name in frame if name != target}
    found = inferred(columns, Target(target, [truth], numbers=numbers))
    assert [*found.remarks()] == []
    # Numbers as categories, as codes are.
    codes = {name: [f"v{value}" for value in values] for name, values in columns.items()}
    reasons = [one.reason for one in inferred(codes, Target(target, [truth], numbers)).columns]
    assert not [reason for reason in reasons if "target" in reason]


def test_stray_texts_among_numbers_count_as_missing_and_are_named():
    values = [*range(100, 100 + ROWS - 2), "n.n.", "n.m."]
    found = column(values, allowed=["x"])
    assert found.kind == "number"
    assert "2 values that are not numbers, such as 'n.n.'; they count as missing" in found.note
    assert (found.low, found.high) == (100, 100 + ROWS - 3)


@pytest.mark.parametrize(
    "values",
    [
        (1.5, float("inf"), -float("inf"), None),
        ("1.5", "inf", "-Infinity", ""),
        (1, 10**400, "1e400", "NA"),
    ],
)
def test_infinite_numbers_count_as_missing_and_are_counted_by_column(values):
    """However a file writes them, and however many there are."""
    table = inferred({"x": cycled(*values), "y": cycled(1, 2)}, CLASSES)
    found, other = table.columns
    assert (found.kind, found.infinite, found.missing) == ("number", ROWS // 2, 0.25)
    assert found.low == found.high == float(values[0])
    assert other.infinite == 0
    assert [*table.remarks()] == [
        "the column 'x' has 30 infinite values; they count as missing",
        *(remark for remark in table.remarks() if "'y'" in remark),
    ]
    assert [*table.unread([{"x": value} for value in values], "test")] == [
        "the column 'x' of the test side has 2 infinite values; they count as missing"
    ]


def test_many_columns_with_infinite_numbers_share_a_sentence():
    columns = {f"x{place:02}": cycled(float("inf"), place, 3.5) for place in range(12)}
    (remark,) = inferred(columns, NUMBERS).remarks()
    assert remark == (
        "12 columns have 240 infinite values; they count as missing: "
        "'x00' (20), 'x01' (20), 'x02' (20) and 9 others"
    )


def test_column_of_infinite_numbers_alone_is_left_out():
    assert column(cycled(float("inf"), -float("inf"))).reason == "every value is infinite"


@pytest.mark.parametrize(
    "values",
    [
        (1, 2.5, None, float("nan"), 1e301, -(2**70), 10**400),
        ("1", "-2.5", "+3e-2", "0", "10.25E3", "1e305", "-0"),
        ("01", "1", "1.", ".5", " 2 ", "1\n2", "1_000", "\u0663", "", "NA", "x"),
        ("1\n2", "3"),
        ("7\n", "3"),
        (1, "2", True, None, np.float32(3), 4.0),
    ],
)
def test_numbers_of_a_column_are_those_of_its_values(values):
    """Columns of one type are parsed at once."""
    found, missing = numbers_of(values)
    np.testing.assert_array_equal(found, [plain_number(value) for value in values])
    assert missing.tolist() == [is_missing(value) for value in values]


def test_many_texts_among_numbers_are_categories_and_named():
    found = column(cycled("1", "2", "two"))
    assert found.kind == "category"
    assert "20 values that are not numbers, such as 'two'; all its values" in found.note


def test_statistics_are_those_of_the_values():
    found = column(cycled("1", "2", "2", None))
    assert (found.missing, found.distinct) == (0.25, 2)
    assert (found.low, found.high) == (1, 2)
    assert found.examples == ["2 (30)", "1 (15)"]
    assert found.quantiles == [1, 1, 2, 2, 2]
    assert found.histogram == [15, *[0] * 10, 30]


def test_a_distribution_is_that_of_the_finite_numbers():
    values = np.random.default_rng(0).lognormal(size=500)
    found = column([*values, None, "inf"], Target("y", [np.arange(502) % 2], numbers=False))
    assert found.histogram == np.histogram(values, 12)[0].tolist()
    shares = [(values <= quantile).mean() for quantile in found.quantiles]
    assert shares == [0.05, 0.25, 0.5, 0.75, 0.95]
    assert {*found.quantiles} <= {*values.tolist()}


@pytest.mark.parametrize(
    "values", [(-1e300, 0, 1e300), (1e16, 1e16 + 2, 1e16 + 4), (0, 5e-324, 1e-323)]
)
def test_a_distribution_of_extreme_numbers_is_finite(values):
    found = column(cycled(*values))
    assert sum(found.histogram) == ROWS
    assert np.isfinite(found.quantiles).all()
    assert type(found).model_validate_json(found.model_dump_json()) == found


def test_the_most_frequent_categories_are_counted():
    found = column([f"v{row % 11}" for row in range(ROWS - 1)] + ["v3"])
    assert found.examples[0] == "v3 (7)"
    assert len(found.examples) == 10
    assert (found.quantiles, found.histogram) == ([], [])


def test_columns_that_the_card_does_not_show_have_no_distribution():
    columns = {f"c{place:03}": cycled(1, 2, 3, 4, 5) for place in range(150)}
    columns |= {f"d{place:03}": cycled("a", "b", "c", "d", "e") for place in range(100)}
    columns |= {"e": cycled(1, 2, 3)}
    found = inferred(columns, CLASSES).columns
    assert [bool(one.histogram) for one in found] == [True] * 150 + [False] * 101
    assert [len(one.examples) for one in found[150:]] == [5] * 50 + [3] * 51
