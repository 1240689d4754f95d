"""What a local run imports while one step runs, so that the steps after it begin at once."""

from __future__ import annotations

import pytest

from steadytrain.components.shared.config import load
from steadytrain.pipelines import local

MEMBERS = [{"framework": "xgboost", "config": {}}, {"framework": "catboost", "config": {}}]
SCORING = "steadytrain.components.tabular.scoring"


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ({"framework": "lightgbm"}, [SCORING, "lightgbm"]),
        (
            {"framework": "ensemble", "config": {"members": MEMBERS}},
            [SCORING, "xgboost", "catboost"],
        ),
        # A step refuses it.
        ({"framework": "ensemble", "config": {"members": []}}, [SCORING]),
    ],
)
def test_what_scores_a_table_is_imported_while_its_model_learns(model, expected):
    config = load("tabular", ["data.target=target", "data.source=[table.csv]"])
    settings = config.model.model_copy(update=model)
    assert local._imports(config.model_copy(update={"model": settings})) == {"train": expected}


def test_what_ranks_need_is_imported_while_their_data_is_prepared():
    assert local._imports(load("causal-lm")) == {"preprocess": local.RANK_IMPORTS}
