"""Learn how texts of a table become numbers: TF-IDF, then a truncated SVD, by scikit-learn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from steadytrain.components.tabular.model import TEXT_PARTS, Text, is_missing

_WORDS: Final = 5000
"""The most frequent words of a column that count."""


def fit_texts(kinds: Mapping[str, str], records: Sequence[Mapping[str, Any]]) -> Mapping[str, Text]:
    """Return what was learned from the texts of records, by column.

    Args:
        kinds: of the columns.
    """
    return {
        name: _fitted([record.get(name) for record in records])
        for name, kind in kinds.items()
        if kind == "text"
    }


def _fitted(values: Sequence[Any]) -> Text:
    # Scikit-learn takes a second to import.
    from sklearn.decomposition import TruncatedSVD
    from sklearn.feature_extraction.text import TfidfVectorizer

    texts = [str(value) for value in values if not is_missing(value)]
    vectorizer = TfidfVectorizer(max_features=_WORDS, min_df=2)
    try:
        matrix = vectorizer.fit_transform(texts)
    except ValueError:  # no word is in two of them
        return Text([], np.zeros(0), np.zeros((TEXT_PARTS, 0)))
    components = np.zeros((TEXT_PARTS, matrix.shape[1]))
    # Of a matrix, there are fewer directions than rows and columns.
    count = min(TEXT_PARTS, min(matrix.shape) - 1)
    if count > 0:
        # If all texts are the same, there is no variance to explain.
        with np.errstate(divide="ignore", invalid="ignore"):
            components[:count] = TruncatedSVD(count, random_state=0).fit(matrix).components_
    words = vectorizer.get_feature_names_out().tolist()
    return Text(words, vectorizer.idf_, components.astype(np.float32))
