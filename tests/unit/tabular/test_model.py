"""Records become a matrix, and what the model cannot read is an error."""

from __future__ import annotations

import math
from decimal import Decimal

import numpy as np
import pytest

from steadytrain.components.tabular.model import Preparation, date_parts, plain_number

KINDS = {"size": "number", "color": "category", "when": "date"}
RECORDS = [
    {"size": "1.5", "color": "red", "when": "2024-01-31"},
    {"size": None, "color": "red", "when": None},
    {"size": 3, "color": "blue", "when": "1970-01-02T06:30:00"},
]


@pytest.fixture
def fitted():
    preparation = Preparation(KINDS)
    preparation.fit(RECORDS)
    return preparation


def test_matrix_holds_numbers_places_of_categories_and_parts_of_dates(fitted):
    matrix = fitted.matrix(RECORDS)
    names = ["size", "color", *(f"when ({part})" for part in ("day", "month", "weekday", "hour"))]
    assert fitted.columns == names
    assert fitted.categories == [1]
    expected = [
        [1.5, 0, 19753, 1, 2, 0],
        [math.nan, 0, *[math.nan] * 4],
        [3, 1, 1 + 6.5 / 24, 1, 4, 6.5],
    ]
    np.testing.assert_allclose(matrix, expected)


def test_category_that_training_did_not_see_has_no_value(fitted):
    row = {"size": 1, "color": "green", "when": None}
    assert np.isnan(fitted.matrix([row])[0, 1])
    dense = fitted.one_hot(fitted.matrix([*RECORDS, row]))
    np.testing.assert_array_equal(dense[:, 1:4], [[1, 0, 0], [1, 0, 0], [0, 1, 0], [0, 0, 1]])


def test_rare_categories_share_a_column_of_a_linear_model(fitted):
    dense = fitted.one_hot(fitted.matrix(RECORDS), width=1)
    np.testing.assert_array_equal(dense[:, 1:3], [[1, 0], [1, 0], [0, 1]])


@pytest.mark.parametrize(
    ("record", "named"),
    [
        ({"size": "large", "color": "red", "when": None}, ["'size'", "'large'", "number"]),
        ({"size": 1, "color": "red", "when": "yesterday"}, ["'when'", "'yesterday'", "date"]),
        ({"size": 1, "when": None}, ["'color'"]),
    ],
)
def test_record_that_the_model_cannot_read_is_an_error(fitted, record, named):
    with pytest.raises(ValueError, match="column") as error:
        fitted.matrix([record])
    for name in named:
        assert name in str(error.value)
    assert fitted.matrix([record], strict=False).shape == (1, 6)


def test_no_records_are_an_empty_matrix(fitted):
    assert fitted.matrix([]).shape == (0, 6)


def test_category_has_one_name_in_every_format():
    made = Preparation({"flag": "category", "code": "category"})
    made.fit([{"flag": "true", "code": "2"}, {"flag": "False", "code": "x"}])
    rows = [{"flag": True, "code": 2}, {"flag": False, "code": 2.0}, {"flag": "TRUE", "code": "2"}]
    matrix = made.matrix(rows)
    assert np.array_equal(matrix[0], matrix[2])
    assert not np.isnan(matrix).any()
    assert matrix[0, 0] != matrix[1, 0]


def test_category_named_like_a_part_of_a_date_is_itself():
    made = Preparation({"d": "date", "d (month)": "category"})
    assert made.categories == [4]
    assert made.places == {"d": 0, "d (month)": 4}


def test_date_with_a_time_zone_is_in_utc():
    assert date_parts("2024-01-24T14:00:00-05:00") == date_parts("2024-01-24T19:00:00")


@pytest.mark.parametrize(
    ("levels", "value", "named"),
    [
        (["017", "029"], 17, ["'017'", "int"]),
        (["017", "123"], np.float64(17), ["'017'"]),
        (["red", "blue"], 5, ["'blue'", "'5'"]),
        (["true", "false"], 1, ["'false'"]),
        (["red", "blue"], b"red", ["bytes"]),
    ],
)
def test_category_of_another_type_is_an_error_and_not_an_unseen_one(levels, value, named):
    made = Preparation({"code": "category"})
    made.fit([{"code": level} for level in levels])
    with pytest.raises(ValueError, match="column 'code' of record 1") as error:
        made.matrix([{"code": levels[0]}, {"code": value}])
    for name in named:
        assert name in str(error.value)
    assert np.isnan(made.matrix([{"code": value}], strict=False)).all()


def test_number_that_no_level_has_is_an_unseen_category():
    made = Preparation({"code": "category"})
    made.fit([{"code": "123"}, {"code": "x"}])
    assert np.isnan(made.matrix([{"code": 17}])).all()


@pytest.mark.parametrize("number", [np.int64(3), np.float32(3), Decimal("3.0"), "3.0"])
def test_number_may_have_any_type_of_number(number):
    made = Preparation({"size": "number", "code": "category"})
    made.fit([{"size": 1, "code": "3"}])
    assert made.matrix([{"size": number, "code": 3}]).tolist() == [[3, 0]]
    assert np.isnan(made.matrix([{"size": np.float32("nan"), "code": None}])).all()


def test_whole_number_is_one_category_however_a_data_frame_wrote_it():
    made = Preparation({"code": "category"})
    made.fit([{"code": code} for code in ("3.0", "3", "3.0", "-2.00", "1.10", "03", "0.0", "-0.0")])
    assert made.levels["code"] == ["3", "0", "-2", "03", "1.10"]
    served = [3, 3.0, "3", "3.0", -2, "0", "1.10", "03", "3.10"]
    codes = made.matrix([{"code": code} for code in served])[:, 0].tolist()
    assert codes[:8] == [0, 0, 0, 0, 2, 1, 4, 3]
    assert math.isnan(codes[8])
    assert made.unseen([{"code": code} for code in served]) == {"code": 1}
    earlier = Preparation({"code": "category"}, {"code": ["2.0", "3", "2"]})
    codes = earlier.matrix([{"code": code} for code in (2, "2", "2.0", 3)])
    assert codes.tolist() == [[0], [0], [0], [1]]


def test_fraction_is_one_category_however_it_is_written():
    made = Preparation({"size": "category"})
    made.fit([{"size": size} for size in ("0.50", "0.50", "1.5", "1.5", "2.25", "1e3", "7.0")])
    assert made.levels["size"] == ["0.50", "1.5", "1e3", "2.25", "7"]
    served = [0.5, Decimal("0.50"), "0.50", np.float32(1.5), 2.25, 7.0]
    codes = made.matrix([{"size": size} for size in served])[:, 0].tolist()
    assert codes == [0, 0, 0, 1, 3, 4]
    assert made.unseen([{"size": size} for size in served]) == {}
    # Texts may be versions, and 1e3 a code.
    for other in ("0.5", "1.50", 1000, 0.75, 10**400, float("inf")):
        assert made.unseen([{"size": other}]) == {"size": 1}
    versions = Preparation({"size": "category"}, {"size": ["1.10", "1.1"]})
    assert versions.matrix([{"size": 1.1}, {"size": "1.10"}]).tolist() == [[1], [0]]


def test_number_is_as_large_as_text_and_as_a_number():
    assert math.isnan(plain_number(1e305))
    assert math.isnan(plain_number("1e305"))
    assert plain_number("-1e300") == plain_number(-1e300) == -1e300
