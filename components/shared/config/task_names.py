"""Names of tasks that several packages tell apart."""

from __future__ import annotations

from typing import Final

MULTI_LABEL: Final = "multi_label_classification"
"""The task whose records have any number of labels."""
TABULAR_MULTI_LABEL: Final = "tabular_multi_label"
"""The task of a table whose records have any number of labels."""
LABEL_SETS: Final = (MULTI_LABEL, TABULAR_MULTI_LABEL)
"""The tasks whose records have any number of labels."""
TABLES: Final = ("tabular_classification", "tabular_regression", TABULAR_MULTI_LABEL)
"""The tasks that learn from the columns of a table."""
MULTI_TASK: Final = "multi_task"
"""The task that learns several data sets, each with its own head."""
MIXED: Final = ("causal_lm", "supervised_finetuning")
"""The tasks that learn a mixture of several data sets (`training.mixture`)."""
ANSWERING: Final = (
    "supervised_finetuning",
    "preference",
    "unpaired_preference",
    "text_embedding",
)
"""The tasks whose records are a prompt and what answers it."""
MULTIMODAL: Final = ("multimodal_classification",)
"""The tasks that learn from texts, images and columns of a table together."""
IMAGES: Final = ("image_classification",)
"""The tasks that learn from images."""
SERIES: Final = ("forecasting",)
"""The tasks that forecast time series."""
