"""Texts of a table become the numbers of scikit-learn, and help on real ones."""

from __future__ import annotations

import importlib.util
import inspect
import json

import numpy as np
import pandas as pd
import pytest
from sklearn.decomposition import TruncatedSVD
from sklearn.feature_extraction.text import TfidfVectorizer

from steadytrain.components.shared.config import from_mapping
from steadytrain.components.shared.config.space import changed
from steadytrain.components.tabular.encoder import fit_texts
from steadytrain.components.tabular.learners import read_side
from steadytrain.components.tabular.model import TEXT_PARTS, Preparation, load
from steadytrain.components.tasks.encoding.base import COLUMNS
from steadytrain.components.train.step import load_trainer

from support.tables import prepared


def documented():
    """Return what documentation says of the functions and classes of four packages."""
    rows = []
    for module in ("numpy", "scipy.stats", "pandas", "sklearn.metrics"):
        package = importlib.import_module(module)
        for name in sorted(dir(package)):
            made = getattr(package, name)
            text = (inspect.getdoc(made) or "").strip().split("\n\n")
            summary = " ".join(" ".join(text[:3]).split())
            if callable(made) and len(summary.split()) > 5 and not name.startswith("_"):
                rows.append(
                    {"summary": summary[:400], "length": len(name) + len(rows) % 3, "home": module}
                )
    return pd.DataFrame(rows).drop_duplicates("summary").rename(columns={"home": "target"})


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    return prepared(
        tmp_path_factory.mktemp("texts"),
        documented(),
        "model.framework=sklearn",
        "model.config={model_type: linear}",
        "training.max_steps=1",
    )


LEARNERS = [
    ("sklearn", {"model_type": "linear", "penalty": 10.0}, 1),
    ("sklearn", {"model_type": "extra_trees"}, 1),
    ("sklearn", {"model_type": "hist_boosting"}, 5),
    ("sklearn", {"model_type": "knn"}, 1),
    ("lightgbm", {"model_type": "lightgbm"}, 5),
    ("xgboost", {"model_type": "xgboost"}, 5),
    ("catboost", {"model_type": "catboost"}, 5),
    ("pytorch_tables", {"model_type": "mlp"}, 10),
]


def learned(config, data, framework, settings, steps, folder):
    """Return the exported model of a learner, and its loss on the validation side."""
    own = {"model.framework": framework, "model.config": settings, "training.max_steps": steps}
    learner = load_trainer(framework).learner(from_mapping(changed(config, own)), data)
    for _ in range(steps):
        learner.learn((), learning_rate_scale=1.0)
    folder.mkdir()
    learner.export(folder)
    return load(folder), learner.validate(())["loss"]


@pytest.mark.slow
@pytest.mark.parametrize(("framework", "settings", "steps"), LEARNERS)
def test_texts_help_each_learner(texts, tmp_path, framework, settings, steps):
    config, data = texts
    columns = json.loads(data.path(COLUMNS).read_text())["columns"]
    assert {one["name"]: one["kind"] for one in columns} == {"summary": "text", "length": "number"}
    model, loss = learned(config, data, framework, settings, steps, tmp_path / "model")
    held, truth = read_side(data, "validation")
    found = model.outputs(held)
    assert -found[np.arange(len(truth)), truth.astype(int)].mean() == pytest.approx(loss, rel=1e-4)
    chance = np.bincount(read_side(data, "train")[1].astype(int))
    chance = -np.log(chance / chance.sum())[truth.astype(int)].mean()
    # The other column says nothing about the package.
    assert loss < 0.75 * chance
    assert np.isfinite(model.outputs([{"length": 3.0, "summary": None}, *held[:1]])).all()


def test_numbers_of_a_text_are_scikit_learns(texts):
    _, data = texts
    train, held = (read_side(data, side)[0] for side in ("train", "validation"))
    preparation = Preparation({"summary": "text"})
    preparation.texts = dict(fit_texts(preparation.kinds, train))
    vectorizer = TfidfVectorizer(max_features=5000, min_df=2)
    svd = TruncatedSVD(TEXT_PARTS, random_state=0)
    svd.fit(vectorizer.fit_transform([record["summary"] for record in train]))
    odd = [{"summary": text} for text in ("", "zzzz", "ARRAY array, Array!", "näher, 12 ß")]
    rows = [*held, *odd]
    expected = svd.transform(vectorizer.transform([record["summary"] for record in rows]))
    ours = preparation.matrix(rows)
    assert np.isnan(ours[len(held)]).all(), "a missing text"
    expected[len(held)] = np.nan
    assert ours == pytest.approx(expected, abs=1e-5, nan_ok=True)
    assert len(preparation.columns) == TEXT_PARTS == ours.shape[1]


def test_exported_model_reads_texts_without_steadytrain(texts, tmp_path):
    config, data = texts
    model, _ = learned(config, data, *LEARNERS[0], tmp_path / "model")
    spec = importlib.util.spec_from_file_location("exported", tmp_path / "model" / "model.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    records = read_side(data, "validation")[0]
    assert module.load(tmp_path / "model").rows(records) == model.rows(records)
    with pytest.raises(ValueError, match="no column 'summary'"):
        model.rows([{"length": 1.0}])


@pytest.mark.parametrize(
    "rows", [["one two", "three four"], ["same words"] * 3, ["aa bb", "aa cc", "aa bb dd"], []]
)
def test_few_words_become_numbers_too(rows):
    records = [{"text": row} for row in rows]
    preparation = Preparation({"text": "text"})
    preparation.texts = dict(fit_texts(preparation.kinds, records))
    found = preparation.matrix([*records, {"text": "aa"}])
    assert found.shape == (len(rows) + 1, TEXT_PARTS)
    assert np.isfinite(found).all()
