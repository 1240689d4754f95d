"""Every family of models of tables: resumed, exported, checked against its library, refused."""

from __future__ import annotations

import gc
import re

import catboost
import numpy as np
import pandas as pd
import pytest
import xgboost
from sklearn import ensemble, neighbors

from steadytrain.components.shared import plugins
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.tabular.learners import read_side, read_table
from steadytrain.components.tabular.model import load

from support.tables import REGRESSION, prepared, shipped

FAMILIES = {
    "dummy": ("sklearn", {}),
    "linear": ("sklearn", {}),
    "knn": ("sklearn", {"n_neighbors": 7, "weights": "distance"}),
    "random_forest": ("sklearn", {"rounds_per_step": 3, "min_samples_leaf": 2}),
    "extra_trees": ("sklearn", {"rounds_per_step": 3, "min_samples_leaf": 2}),
    "hist_boosting": ("sklearn", {"rounds_per_step": 3}),
    "lightgbm": ("lightgbm", {"rounds_per_step": 3}),
    "xgboost": ("xgboost", {"rounds_per_step": 3, "subsample": 0.7, "colsample_bynode": 0.6}),
    "catboost": ("catboost", {"rounds_per_step": 3}),
    "mlp": ("pytorch_tables", {"width": 32, "batch_size": 16}),
    "tabm": ("pytorch_tables", {"width": 16, "layers": 2, "batch_size": 16}),
}
TREES = ("random_forest", "extra_trees", "hist_boosting")


def mixed(name):
    """Return a real table, also with missing values, many categories and dates."""
    frame = shipped(name)
    chance = np.random.default_rng(0)
    column = frame.columns[0]
    frame["group"] = [f"g{place}" for place in pd.qcut(frame[column], 12, labels=False)]
    frame["day"] = pd.Timestamp("2024-01-01") + pd.to_timedelta(
        (frame[frame.columns[1]] * 10).round() % 300, unit="D"
    )
    frame["day"] = frame["day"].dt.strftime("%Y-%m-%d")
    for each in frame.columns[1:]:
        if each != "target":
            frame.loc[chance.random(len(frame)) < 0.1, each] = None
    return frame


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    """Return a function that prepares a table once, and returns its configuration and data."""
    found = {}

    def get(name):
        if name not in found:
            overrides = [REGRESSION] if name == "diabetes" else []
            found[name] = prepared(tmp_path_factory.mktemp(name), mixed(name), *overrides)
        return found[name]

    return get


def made(table, family, **settings):
    config, data = table
    framework, given = FAMILIES[family]
    model = config.model.model_copy(
        update={"framework": framework, "config": {"model_type": family, **given, **settings}}
    )
    trainer = plugins.load(plugins.TRAINERS, framework)
    return trainer.learner(config.model_copy(update={"model": model}), data)


def learn(learner, steps):
    for _ in range(steps):
        learner.learn([], learning_rate_scale=1.0)
    return learner


def exported(learner, folder):
    folder.mkdir(exist_ok=True)
    learner.export(folder)
    return load(folder)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", ["breast_cancer", "wine", "diabetes"])
def test_model_resumes_to_identical_predictions_and_exports_what_was_validated(
    tables, tmp_path, family, name
):
    table = tables(name)
    whole = learn(made(table, family), 3)
    state = {key: value.copy() for key, value in learn(made(table, family), 1).state().items()}
    second = made(table, family)
    second.restore(state)
    learn(second, 2)
    assert second.validate([]) == whole.validate([])
    assert second.parameters == whole.parameters
    records, targets = read_side(table[1], "validation")
    left, right = (
        exported(learner, tmp_path / str(place)).outputs(records)
        for place, learner in enumerate((whole, second))
    )
    assert (left == right).all()
    # The registry knows a version by the digests of its files.
    files = [
        {path.name: path.read_bytes() for path in (tmp_path / folder).iterdir()}
        for folder in ("0", "1")
    ]
    assert files[0] == files[1]
    if name == "diabetes":
        loss = np.mean((left - targets) ** 2)
    else:
        loss = -left[np.arange(len(targets)), targets.astype(int)].mean()
        np.testing.assert_allclose(np.exp(left).sum(axis=1), 1)
    # XGBoost adds in 32 bits.
    near = 1e-5 if family == "xgboost" else 1e-9
    assert whole.validate([])["loss"] == pytest.approx(loss, rel=near)


@pytest.mark.parametrize(
    "family", [family for family in FAMILIES if family not in ("dummy", "linear", "tabm")]
)
def test_model_learns_more_than_constant_outputs(tables, family):
    for name, share in (("wine", 0.5), ("diabetes", 0.9)):
        table = tables(name)
        loss = learn(made(table, family), 10).validate([])["loss"]
        assert loss < share * learn(made(table, "dummy"), 1).validate([])["loss"]


@pytest.mark.parametrize("family", ["random_forest", "extra_trees"])
@pytest.mark.parametrize("name", ["breast_cancer", "wine", "diabetes"])
def test_forest_is_that_of_scikit_learn(tables, tmp_path, family, name):
    learner = learn(made(tables(name), family), 2)
    kind = "Regressor" if name == "diabetes" else "Classifier"
    cls = getattr(
        ensemble, {"random_forest": "RandomForest", "extra_trees": "ExtraTrees"}[family] + kind
    )
    seed = learner.seed
    forests = [
        cls(3, min_samples_leaf=2, random_state=seed + 3 * step).fit(
            learner.matrix, learner.targets
        )
        for step in range(2)
    ]
    rows = learner.held_out_matrix
    records, _ = read_side(tables(name)[1], "validation")
    found = exported(learner, tmp_path / "model").outputs(records)
    if name == "diabetes":
        np.testing.assert_allclose(found, np.mean([each.predict(rows) for each in forests], axis=0))
        return
    counts = np.bincount(learner.targets.astype(int)) + 1
    votes = 3 * sum(each.predict_proba(rows) for each in forests) + counts / counts.sum()
    np.testing.assert_allclose(np.exp(found), votes / 7, rtol=1e-9)


@pytest.mark.parametrize("name", ["breast_cancer", "wine", "diabetes"])
def test_histogram_boosting_is_that_of_scikit_learn(tables, tmp_path, name):
    learner = learn(made(tables(name), "hist_boosting"), 4)
    kind = "Regressor" if name == "diabetes" else "Classifier"
    alone = getattr(ensemble, f"HistGradientBoosting{kind}")(
        max_iter=12,
        early_stopping=False,
        categorical_features=learner.preparation.categories,
    ).fit(learner.matrix, learner.targets)
    records, _ = read_side(tables(name)[1], "validation")
    found = exported(learner, tmp_path / "model").outputs(records)
    rows = learner.held_out_matrix
    if name == "diabetes":
        np.testing.assert_allclose(found, alone.predict(rows), rtol=1e-9)
    else:
        np.testing.assert_allclose(np.exp(found), alone.predict_proba(rows), rtol=1e-9)


@pytest.mark.parametrize("name", ["breast_cancer", "wine", "diabetes"])
def test_xgboost_trains_the_model_that_it_trains_alone(tables, tmp_path, name):
    table = tables(name)
    alone_settings = {"max_depth": 3, "lambda": 2.0}
    config, data = table
    model = {"framework": "xgboost", "config": {"model_type": "xgboost", **alone_settings}}
    config = config.model_copy(update={"model": config.model.model_copy(update=model)})
    learner = learn(plugins.load(plugins.TRAINERS, "xgboost").learner(config, data), 3)
    classes = len(data.labels)
    objective = {0: "reg:squarederror", 2: "binary:logistic", 3: "multi:softprob"}[classes]
    places = learner.preparation.categories
    types = ["c" if place in places else "q" for place in range(learner.matrix.shape[1])]
    train, held_out = (
        xgboost.DMatrix(matrix, targets, feature_types=types, enable_categorical=True)
        for matrix, targets in (
            (learner.matrix, learner.targets),
            (learner.held_out_matrix, learner.held_out_targets),
        )
    )
    for side in (train, held_out):
        side.set_base_margin(np.tile(learner.base(), (side.num_row(), 1)))
    settings = {**alone_settings, "learning_rate": 0.1, "objective": objective}
    if classes > 2:
        settings["num_class"] = classes
    alone = xgboost.train(settings, train, num_boost_round=30)
    records, _ = read_side(data, "validation")
    found = exported(learner, tmp_path / "model")
    np.testing.assert_allclose(
        found.raw(learner.held_out_matrix),
        alone.predict(held_out, output_margin=True).reshape(len(records), -1),
        rtol=1e-4,
        atol=1e-5,
    )


@pytest.mark.parametrize("name", ["breast_cancer", "wine", "diabetes"])
def test_catboost_trains_the_model_that_it_trains_alone(tables, tmp_path, name):
    learner = learn(made(tables(name), "catboost", rounds_per_step=20, depth=4), 1)
    places = learner.preparation.categories
    frames = [pd.DataFrame(each) for each in (learner.matrix, learner.held_out_matrix)]
    for frame in frames:
        frame[places] = frame[places].fillna(-1).astype(int).astype(str)
    classes = len(tables(name)[1].labels)
    alone = catboost.CatBoost(
        {
            "loss_function": {0: "RMSE", 2: "Logloss", 3: "MultiClass"}[classes],
            "iterations": 20,
            "depth": 4,
            "learning_rate": 0.1,
            "random_seed": learner.seed,
            "thread_count": 1,
            "logging_level": "Silent",
            "allow_writing_files": False,
        }
    )
    base = np.tile(learner.base(), (len(learner.targets), 1))
    alone.fit(catboost.Pool(frames[0], learner.targets, cat_features=places, baseline=base))
    theirs = np.asarray(alone.predict(frames[1])).reshape(len(frames[1]), -1) + learner.base()
    found = exported(learner, tmp_path / "model").raw(learner.held_out_matrix)
    np.testing.assert_allclose(found, theirs, rtol=1e-6, atol=1e-6)


def test_catboost_model_outlives_its_learner(tmp_path):
    chance = np.random.default_rng(2)
    frame = pd.DataFrame({f"c{i}": chance.integers(0, 3 + i % 3, 600) for i in range(13)})
    target = frame["c0"] + frame["c3"] + chance.normal(size=600) > 3
    frame = frame.map("k{}".format).assign(target=target.map({True: "yes", False: "no"}))
    learner = learn(made(prepared(tmp_path, frame), "catboost", rounds_per_step=10), 2)
    model, matrix, expected = learner.model(), learner.matrix, learner.raw.copy()
    del learner
    gc.collect()
    _ = [b"\xff" * size for size in range(16, 65536, 16)]
    model.save(tmp_path)
    np.testing.assert_allclose(load(tmp_path).raw(matrix), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("weights", ["uniform", "distance"])
@pytest.mark.parametrize("name", ["wine", "diabetes"])
def test_neighbors_are_those_of_scikit_learn(tables, tmp_path, name, weights):
    learner = learn(made(tables(name), "knn", weights=weights), 1)
    kind = "Regressor" if name == "diabetes" else "Classifier"
    alone = getattr(neighbors, f"KNeighbors{kind}")(7, weights=weights, algorithm="brute")
    alone.fit(learner.inputs, learner.targets)
    model = exported(learner, tmp_path / "model")
    records, _ = read_side(tables(name)[1], "validation")
    rows, found = model.standardized(learner.held_out_matrix), model.outputs(records)
    if name == "diabetes":
        np.testing.assert_allclose(found, alone.predict(rows), rtol=1e-6)
        return
    counts = np.bincount(learner.targets.astype(int)) + 1
    votes = 7 * alone.predict_proba(rows) + counts / counts.sum()
    np.testing.assert_allclose(np.exp(found), votes / 8, rtol=1e-6)


@pytest.mark.parametrize("family", ["linear", "lightgbm", "xgboost", "catboost", "mlp"])
def test_numbers_that_are_codes_are_learned_as_categories(tmp_path, family):
    chance = np.random.default_rng(0)
    codes = chance.integers(1, 9, 900)
    effect = chance.permutation(np.linspace(-2, 2, 9))[codes]
    target = np.where(chance.random(900) < 1 / (1 + np.exp(-effect)), "yes", "no")
    # Equal records would be on one side of the split.
    noise = chance.random(900)
    records = [
        {"code": int(n), "noise": other, "target": one}
        for n, other, one in zip(codes, noise, target, strict=True)
    ]
    as_number = prepared(tmp_path, records)
    table = prepared(tmp_path, records, "data.categories=[code]")
    assert [read_table(data).features for _, data in (as_number, table)] == [
        {"code": "number", "noise": "number"},
        {"code": "category", "noise": "number"},
    ]
    rounds = {"rounds_per_step": 30} if family in ("lightgbm", "xgboost", "catboost") else {}
    steps = {"linear": 1, "mlp": 30}.get(family, 2)
    model = exported(learn(made(table, family, **rounds), steps), tmp_path / "model")
    mixed = (1, 2, "3", 4.0, 5, "6", "7.0", 8)
    at = np.linspace(0.02, 0.98, 20).tolist()
    found = model.outputs([{"code": code, "noise": x} for code in mixed for x in at])
    again = model.outputs([{"code": str(code), "noise": x} for code in range(1, 9) for x in at])
    np.testing.assert_array_equal(found, again)
    # A probability of its own for each code, in no order.
    shares = [np.mean(target[codes == code] == "yes") for code in range(1, 9)]
    chances = np.exp(found) / np.exp(found).sum(axis=1, keepdims=True)
    assert np.corrcoef(chances[:, 1].reshape(8, -1).mean(axis=1), shares)[0, 1] > 0.95


@pytest.mark.parametrize("family", ["lightgbm", "xgboost", "catboost"])
def test_missing_value_is_no_extreme_one_where_training_had_none(tmp_path, family):
    chance = np.random.default_rng(0)
    # All far from 0, which LightGBM would read, and CatBoost would read the smallest.
    column = chance.uniform(100, 200, 800)
    records = [
        {"x": x, "gaps": None if n % 3 else x, "target": x + noise}
        for n, (x, noise) in enumerate(zip(column, chance.normal(0, 1, 800), strict=True))
    ]
    table = prepared(tmp_path, records, REGRESSION, "data.allow_leaks=[x]")
    learner = learn(made(table, family, rounds_per_step=50), 2)
    middle = float(np.median(learner.matrix[:, learner.preparation.places["x"]]))
    model = exported(learner, tmp_path / "model")
    found = model.outputs([{"x": None, "gaps": None}, {"x": middle, "gaps": None}])
    assert found[0] == found[1]
    assert abs(found[0] - middle) < 5
    # Where training had gaps, the trees learned what a gap means.
    assert np.isnan(model.fill[learner.preparation.places["gaps"]])


def test_rare_categories_of_histogram_boosting_count_as_missing(tmp_path):
    chance = np.random.default_rng(1)
    codes = np.minimum(chance.geometric(0.008, 6000), 400)
    records = [{"code": f"c{code}", "target": "ab"[code % 2]} for code in codes]
    table = prepared(tmp_path, records, "data.allow_leaks=[code]")
    learner = learn(made(table, "hist_boosting", rounds_per_step=20), 2)
    assert len(learner.preparation.levels["code"]) > 260
    found = exported(learner, tmp_path / "model").outputs(
        [{"code": level} for level in learner.preparation.levels["code"]]
    )
    known = np.array([int(level[1:]) % 2 for level in learner.preparation.levels["code"]])
    assert (found.argmax(axis=1) == known)[:100].mean() > 0.9
    assert len(np.unique(found[255:, 0])) == 1
    records, _ = read_side(table[1], "validation")
    rate = exported(learner, tmp_path / "model").outputs(records)
    np.testing.assert_allclose(rate[:, 1] - rate[:, 0], learner.held_out()[:, 0], rtol=1e-9)


@pytest.mark.parametrize(
    ("family", "settings", "message"),
    [
        ("dummy", {"depth": 3}, "model.config.depth = 3"),
        ("knn", {"n_neighbors": 0}, "model.config.n_neighbors = 0"),
        ("knn", {"n_neighbors": 10**6}, "model.config.n_neighbors = 1000000"),
        ("knn", {"weights": "near"}, "model.config.weights = 'near'"),
        ("random_forest", {"max_features": "none"}, "'max_features'"),
        ("extra_trees", {"rounds_per_step": 0}, "model.config.rounds_per_step = 0"),
        ("hist_boosting", {"min_samples_leaf": 0.5}, "'min_samples_leaf'"),
        ("hist_boosting", {"max_iter": 5}, "model.config.max_iter = 5"),
        ("mlp", {"width": 0}, "model.config.width = 0: it is not a whole number from 1"),
        ("mlp", {"dropout": 1}, "model.config.dropout = 1: it is not a number from 0 to below 1"),
        ("tabm", {"members": 8}, "model.config.members = 8"),
        ("xgboost", {"max_depth": -3}, "max_depth"),
        ("xgboost", {"eta": 0.3}, "model.config.eta = 0.3"),
        ("catboost", {"depth": 40}, "depth"),
        ("catboost", {"iterations": 5}, "model.config.iterations = 5"),
    ],
)
def test_setting_that_a_family_does_not_read_is_refused(tables, family, settings, message):
    with pytest.raises(BadInput, match=re.escape(message)):
        learn(made(tables("wine"), family, **settings), 1)


def test_unknown_model_of_scikit_learn_is_refused(tables):
    with pytest.raises(BadInput, match=r"model_type = 'svm'.*no such model"):
        made(tables("wine"), "dummy", model_type="svm")


def test_learning_rate_is_refused_where_there_is_none(tmp_path):
    table = prepared(tmp_path, shipped("wine"), "training.learning_rate=0.1")
    for family in ("dummy", "knn", "random_forest"):
        with pytest.raises(BadInput, match=r"training\.learning_rate = 0\.1"):
            made(table, family)


@pytest.mark.parametrize("family", FAMILIES)
def test_class_without_a_training_record_is_refused_or_improbable(tmp_path, family):
    labels = "data.labels=[class_0, class_1, class_2, class_3]"
    table = prepared(tmp_path, shipped("wine"), labels)
    if family in ("dummy", "knn", "lightgbm", "xgboost"):
        model = exported(learn(made(table, family), 1), tmp_path / "model")
        found = model.outputs(read_side(table[1], "validation")[0])
        assert (np.exp(found[:, 3]) < 0.05).all()
    else:
        with pytest.raises(BadInput, match="no training record has the class 'class_3'"):
            made(table, family)
