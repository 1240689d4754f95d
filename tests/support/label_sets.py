"""A table whose records have any number of labels, as people keep them in a CSV file."""

from __future__ import annotations

import numpy as np
import pandas as pd
from sklearn.datasets import make_multilabel_classification

SETS = ("data.task=tabular_multi_label", "data.label_separator=;")
NAMES = ("hot", "cold", "wet", "dry")


def labeled_table(rows: int = 400) -> pd.DataFrame:
    """Return a table with the columns x0 to x7, a category, and `target` such as "hot;wet"."""
    inputs, flags = make_multilabel_classification(rows, 8, n_classes=4, n_labels=2, random_state=0)
    frame = pd.DataFrame(inputs, columns=[f"x{place}" for place in range(8)])
    frame += np.random.default_rng(0).normal(size=frame.shape).round(3) / 10
    frame["color"] = [("red", "green", "blue")[int(value) % 3] for value in inputs[:, 0]]
    frame["target"] = [";".join(np.array(NAMES)[row > 0]) for row in flags]
    return frame
