"""What a local run imports while one step runs, so that the steps after it begin at once."""

from __future__ import annotations

import pytest

from steadytrain.components.shared.config import load
from steadytrain.pipelines import local

MEMBERS = [{"framework": "xgboost", "config": {}}, {"framework": "catboost", "config": {}}]
LEARNER = "steadytrain.components.tabular.learners"
SCORING = "steadytrain.components.tabular.scoring"


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ({"framework": "lightgbm"}, {f"{LEARNER}.boosting", "lightgbm"}),
        (
            {"framework": "ensemble", "config": {"members": MEMBERS}},
            {f"{LEARNER}.boosting", "xgboost", "catboost"},
        ),
        # A step refuses it.
        ({"framework": "ensemble", "config": {"members": []}}, set()),
    ],
)
def test_what_learns_and_scores_a_table_is_imported_while_it_is_prepared(model, expected):
    fields = ["data.target=target", "data.source=[table.csv]", f"training.max_steps={len(MEMBERS)}"]
    config = load("tabular", fields)
    settings = config.model.model_copy(update=model)
    found = local._imports(config.model_copy(update={"model": settings}))
    assert found.keys() == {"preprocess"}
    assert expected | {SCORING} <= {*found["preprocess"]}


def test_what_ranks_need_is_imported_while_their_data_is_prepared():
    assert local._imports(load("causal-lm")) == {"preprocess": local.RANK_IMPORTS}
