"""Classification of texts by token counts. Nothing here imports torch or scikit-learn."""

from dataclasses import replace

from steadytrain.components.tasks.base import late
from steadytrain.components.tasks.built_in import SEQUENCE_CLASSIFICATION

_PARTS = "steadytrain_example.task"
# `model.framework: token_counts` trains it, so the built-in training part is never opened.
TOKEN_COUNTS = replace(
    SEQUENCE_CLASSIFICATION,
    scorer=late(f"{_PARTS}:TokenCountsScorer"),
    packager=late(f"{_PARTS}:TokenCountsPackager"),
)
