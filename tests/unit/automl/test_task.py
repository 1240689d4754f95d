"""What a search predicts follows from the target's values, or is an error."""

from __future__ import annotations

import pandas as pd
import pytest

from steadytrain.components.automl.task import task_of
from steadytrain.components.shared.errors import ConfigError, DataError
from steadytrain.pipelines.searches import searched


@pytest.fixture
def task(tmp_path):
    """Return a function that returns the task for values of the target."""

    def found(values):
        path = tmp_path / "table.csv"
        pd.DataFrame({"x": range(len(values)), "y": values}).to_csv(path, index=False)
        return task_of({"source": [str(path)], "target": "y"})[0]

    return found


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([row // 60 for row in range(3000)], "tabular_regression"),
        ([1 + row % 5 / 2 for row in range(300)], "tabular_regression"),
        (["unknown", *(row * 1.5 for row in range(300))], "tabular_regression"),
        ([row % 20 for row in range(300)], "tabular_classification"),
        ([("1.0", "2.0")[row % 2] for row in range(300)], "tabular_classification"),
        ([("a", "b", "7")[row % 3] for row in range(300)], "tabular_classification"),
        ([row % 2 == 0 for row in range(300)], "tabular_classification"),
    ],
)
def test_task_follows_from_the_values_of_the_target(task, values, expected):
    assert task(values) == expected


def test_labels_say_that_the_target_has_classes(tmp_path):
    path = tmp_path / "table.csv"
    path.write_text("x,y\n" + "".join(f"{row},{('none', '?')[row % 2]}\n" for row in range(50)))
    found = task_of({"source": [str(path)], "target": "y", "labels": ["none", "?"]})
    assert found == ("tabular_classification", "data.labels names its classes")
    with pytest.raises(DataError, match="every value is missing"):
        task_of({"source": [str(path)], "target": "y"})


@pytest.mark.parametrize("form", ["1,{:03d}", "the text with number {}"])
def test_different_values_that_are_not_numbers_are_an_error(task, form):
    with pytest.raises(DataError, match="300 of 300 values are different"):
        task([form.format(row) for row in range(300)])


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"test_share": 2}, "data.test_share = 2"),
        ({"features": ["y"]}, "data.features"),
        ({"test_shard": 1}, "data.test_shard = 1: no such field"),
    ],
)
def test_wrong_fields_of_the_data_are_named(tmp_path, fields, named):
    path = tmp_path / "table.csv"
    path.write_text("x,y\n1,2\n3,4\n")
    with pytest.raises(ConfigError) as caught:
        task_of({"source": [str(path)], "target": "y", **fields})
    assert named in str(caught.value)
    overrides = [("data.target", "y"), *((f"data.{name}", it) for name, it in fields.items())]
    with pytest.raises(ConfigError) as caught:
        searched(str(path), overrides)
    assert named in str(caught.value)
