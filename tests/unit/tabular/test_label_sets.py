"""Sets of labels: every family learns each label, as scikit-learn does for several outputs."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest
from sklearn.ensemble import HistGradientBoostingClassifier, RandomForestClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import (
    balanced_accuracy_score,
    f1_score,
    hamming_loss,
    log_loss,
    roc_auc_score,
)
from sklearn.multiclass import OneVsRestClassifier
from sklearn.multioutput import MultiOutputClassifier

from steadytrain.components.automl.calibration import Calibration
from steadytrain.components.automl.explanation import explanation_of
from steadytrain.components.automl.task import task_of
from steadytrain.components.automl.unit_scores import joined_folds, out_of_fold
from steadytrain.components.evaluate.metric import Scores, point_values
from steadytrain.components.evaluate.scoring import judged_records
from steadytrain.components.preprocess.step import run as preprocess
from steadytrain.components.shared import plugins
from steadytrain.components.shared.config import from_mapping
from steadytrain.components.shared.config.space import changed
from steadytrain.components.shared.errors import BadInput, ConfigError, DataError
from steadytrain.components.tabular.encoder import FEATURES, LabelSetTableEncoder
from steadytrain.components.tabular.explained import explain
from steadytrain.components.tabular.learners import read_side
from steadytrain.components.tabular.learners.base import LabelSetsLearner
from steadytrain.components.tabular.learners.ensemble import TableEnsembleLearner
from steadytrain.components.tabular.model import load
from steadytrain.components.tabular.scoring import TableLabelsScorer
from steadytrain.components.tasks.checks import check_task
from steadytrain.components.tasks.encoding.fields import Defect

from support.label_sets import NAMES, SETS, labeled_table
from support.tables import prepared, table_config

LEARNED = {
    "dummy": ("sklearn", {}),
    "linear": ("sklearn", {}),
    "knn": ("sklearn", {"n_neighbors": 7}),
    "random_forest": ("sklearn", {"rounds_per_step": 3}),
    "hist_boosting": ("sklearn", {"rounds_per_step": 3}),
    "lightgbm": ("lightgbm", {"rounds_per_step": 3}),
    "xgboost": ("xgboost", {"rounds_per_step": 3}),
    "catboost": ("catboost", {"rounds_per_step": 3}),
    "mlp": ("pytorch_tables", {"width": 32, "batch_size": 16}),
    "tabm": ("pytorch_tables", {"width": 16, "layers": 2, "batch_size": 16}),
}


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    return prepared(tmp_path_factory.mktemp("sets"), labeled_table(), *SETS)


def made(table, family, steps=0, **settings):
    config, data = table
    framework, given = LEARNED[family]
    own = {"model_type": family, **given, **settings}
    learner = plugins.load(plugins.TRAINERS, framework).learner(
        from_mapping(changed(config, {"model.framework": framework, "model.config": own})), data
    )
    for _ in range(steps):
        learner.learn([], learning_rate_scale=1.0)
    return learner


def exported(learner, folder):
    folder.mkdir(exist_ok=True)
    learner.export(folder)
    return load(folder)


@pytest.mark.parametrize("family", LEARNED)
def test_each_family_resumes_and_exports_what_was_validated(table, tmp_path, family):
    whole, second = made(table, family, 3), made(table, family)
    second.restore({key: it.copy() for key, it in made(table, family, 1).state().items()})
    for _ in range(2):
        second.learn([], learning_rate_scale=1.0)
    records, targets = read_side(table[1], "validation")
    left, right = (
        exported(learner, tmp_path / str(place)).outputs(records)
        for place, learner in enumerate((whole, second))
    )
    assert (left == right).all()
    chances, told = np.exp(left), whole.validate([])
    assert chances.shape == (len(records), 4)
    expected = np.mean(
        [log_loss(t, c, labels=[0, 1]) for t, c in zip(targets.T, chances.T, strict=True)]
    )
    assert told["loss"] == pytest.approx(expected, rel=1e-5)
    predicted = chances >= 0.5
    assert told["micro_f1"] == pytest.approx(f1_score(targets, predicted, average="micro"))
    assert told["subset_accuracy"] == pytest.approx((predicted == targets).all(axis=1).mean())
    if family != "dummy":
        assert told["loss"] < made(table, "dummy", 1).validate([])["loss"]


def test_linear_model_is_scikit_learns_one_versus_rest(table, tmp_path):
    learner = made(table, "linear", 1)
    records, _ = read_side(table[1], "validation")
    found = np.exp(exported(learner, tmp_path / "model").outputs(records))
    inputs = learner.learners[0].inputs
    targets = np.stack([each.targets for each in learner.learners], axis=1)
    theirs = OneVsRestClassifier(LogisticRegression(max_iter=1000)).fit(inputs, targets)
    held = learner.model().members[0].standardized(learner.learners[0].held_out_matrix)
    assert found == pytest.approx(theirs.predict_proba(held), abs=1e-9)


def test_boosting_is_scikit_learns_multi_output_classifier(table, tmp_path):
    learner = made(table, "hist_boosting", 4)
    first = learner.learners[0]
    targets = np.stack([each.targets for each in learner.learners], axis=1)
    theirs = MultiOutputClassifier(
        HistGradientBoostingClassifier(
            max_iter=12, early_stopping=False, categorical_features=first.preparation.categories
        )
    ).fit(first.matrix, targets)
    expected = np.stack([own[:, 1] for own in theirs.predict_proba(first.held_out_matrix)], axis=1)
    records, _ = read_side(table[1], "validation")
    found = np.exp(exported(learner, tmp_path / "model").outputs(records))
    assert found == pytest.approx(expected, rel=1e-9)


def test_forest_is_scikit_learns_multi_output_classifier(table, tmp_path):
    learner = made(table, "random_forest", 1)
    first = learner.learners[0]
    targets = np.stack([each.targets for each in learner.learners], axis=1)
    theirs = MultiOutputClassifier(RandomForestClassifier(3, random_state=first.seed))
    votes = theirs.fit(first.matrix, targets).predict_proba(first.held_out_matrix)
    shares = (targets.sum(axis=0) + 1) / (len(targets) + 2)
    # The shares count as one more tree.
    expected = (3 * np.stack([own[:, 1] for own in votes], axis=1) + shares) / 4
    records, _ = read_side(table[1], "validation")
    found = np.exp(exported(learner, tmp_path / "model").outputs(records))
    assert found == pytest.approx(expected, rel=1e-9)


def test_network_has_an_output_for_each_label_and_the_others_a_learner(table):
    assert made(table, "mlp").weights["head"].shape[2] == 4
    for family in ("linear", "lightgbm", "xgboost", "catboost"):
        learner = made(table, family)
        assert isinstance(learner, LabelSetsLearner)
        assert len(learner.learners) == 4


def test_scores_are_those_of_scikit_learn(table, tmp_path):
    config, data = table
    model, records = exported(made(table, "linear", 1), tmp_path / "m"), judged_records(*table)
    rows = [json.loads(text) for text in records[FEATURES].to_pylist()]
    scorer = TableLabelsScorer(config, data)
    found = point_values(Scores.of(scorer.score({"model": model}, records)))
    names = records["label"].to_pylist()
    truth = np.array([[label in own for label in data.labels] for own in names])
    answers = model.rows(rows)
    predicted = np.array([[label in own["prediction"] for label in data.labels] for own in answers])
    chances = np.array([[own[f"probability_{label}"] for label in data.labels] for own in answers])
    assert found["micro_f1"] == pytest.approx(f1_score(truth, predicted, average="micro"))
    assert found["macro_f1"] == pytest.approx(f1_score(truth, predicted, average="macro"))
    assert found["hamming_loss"] == pytest.approx(hamming_loss(truth, predicted))
    area = roc_auc_score(truth, chances, average="macro")
    assert found["auroc"] == pytest.approx(area, rel=1e-5)
    assert area > 0.5
    balanced = [balanced_accuracy_score(*both) for both in zip(truth.T, predicted.T, strict=True)]
    assert found["balanced_accuracy"] == pytest.approx(np.mean(balanced))
    losses = [log_loss(t, c, labels=[False, True]) for t, c in zip(truth.T, chances.T, strict=True)]
    assert found["loss"] == pytest.approx(np.mean(losses))
    baseline = point_values(Scores.of(scorer.score_baseline(records)))
    assert found["micro_f1"] > baseline["micro_f1"]
    assert baseline["auroc"] == baseline["balanced_accuracy"] == 0.5


def test_lists_in_json_are_the_same_as_separated_text(table, tmp_path):
    frame = labeled_table()
    frame["target"] = [text.split(";") if text else [] for text in frame["target"]]
    path = tmp_path / "table.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in frame.to_dict("records")))
    config = table_config(path, SETS[0])
    assert preprocess(config).labels == table[1].labels == sorted(NAMES)
    lists, texts = LabelSetTableEncoder(config.data), LabelSetTableEncoder(table[0].data)
    separated = labeled_table().to_dict("records")
    for row, text in zip(frame.to_dict("records"), separated, strict=True):
        assert lists.read(row) == texts.read(text)
    twice = lists.read({"x": 1, "target": ["wet", "hot", "wet"]})
    assert (twice.label, twice.noticed) == (
        '["hot", "wet"]',
        "name a label twice, which counts once",
    )
    assert task_of({"source": [str(path)], "target": "target"})[0] == "tabular_multi_label"


def test_columns_of_0_and_1_are_the_same_as_lists(table, tmp_path):
    frame = labeled_table()
    sets = frame.pop("target").str.split(";")
    for place, name in enumerate(NAMES):
        flags = np.array([int(name in own) for own in sets])
        # As people write them: numbers, fractions, truth values, texts.
        frame[name] = [flags, flags / 1.0, flags == 1, np.where(flags == 1, "True", "0")][place]
    path = tmp_path / "table.csv"
    frame.to_csv(path, index=False)
    target = f"data.target=[{', '.join(NAMES)}]"
    config = table_config(path, SETS[0], target)
    found = preprocess(config)
    assert found.labels == table[1].labels == sorted(NAMES)
    for side in ("train", "validation"):
        (ours, flags), (theirs, truth) = read_side(found, side), read_side(table[1], side)
        assert ours == theirs
        assert (flags == truth).all()
    assert judged_records(config, found).equals(judged_records(*table))
    assert task_of({"source": [str(path)], "target": [*NAMES]})[0] == "tabular_multi_label"


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["data.label_separator=;"], "data.label_separator"),
        (["data.labels=[hot, wet]"], "data.labels"),
        (["data.features=[x0, wet]"], "'wet' is data.target"),
        (["data.task=tabular_classification"], "predicts one column"),
        (["data.target=[hot]"], "data.target"),
        (["data.target=[hot, hot]"], "data.target"),
    ],
)
def test_columns_of_labels_at_odds_with_other_fields_are_refused(tmp_path, overrides, words):
    given = (SETS[0], "data.target=[hot, wet]", *overrides)
    with pytest.raises(ConfigError, match=words):
        table_config(tmp_path / "table.csv", *given)


def test_column_of_a_label_that_is_neither_0_nor_1_is_reported(tmp_path):
    encoder = LabelSetTableEncoder(
        table_config(tmp_path / "table.csv", SETS[0], "data.target=[hot, wet]").data
    )
    assert encoder.read({"x": 1, "hot": 0, "wet": "1"}).label == '["wet"]'
    for value, kind in ((2, "not_a_class"), ("yes", "not_a_class"), (None, "missing_field")):
        with pytest.raises(Defect, match="wet") as raised:
            encoder.read({"x": 1, "hot": 0, "wet": value})
        assert raised.value.reason == kind
    path = tmp_path / "other.csv"
    labeled_table(50).to_csv(path, index=False)
    with pytest.raises(DataError, match=r"'wet' \(data\.target\)"):
        preprocess(table_config(path, SETS[0], "data.target=[hot, wet]"))


def test_labels_that_are_written_as_missing_are_reported(tmp_path):
    for settings, written in (
        ((), ["?", ["hot", "NA"], "null"]),
        (("data.label_separator=;",), ["?", "n/a", "None", "hot; NA"]),
        (("data.label_separator=/",), ["n/a", "hot/?"]),
    ):
        config = table_config(tmp_path / "table.csv", SETS[0], *settings)
        for value in written:
            with pytest.raises(Defect, match="which counts as missing") as raised:
                LabelSetTableEncoder(config.data).read({"x": 1, "target": value})
            assert raised.value.reason == "missing_field"
    named = table_config(tmp_path / "table.csv", SETS[0], "data.labels=['?', hot]")
    assert LabelSetTableEncoder(named.data).read({"x": 1, "target": ["?"]}).label == '["?"]'
    settings = *SETS, "data.label_separator=;", "data.labels=['?', hot]"
    encoder = LabelSetTableEncoder(table_config(tmp_path / "table.csv", *settings).data)
    assert encoder.read({"x": 1, "target": "hot;?"}).label == '["?", "hot"]'


def test_task_is_found_by_the_separator(table):
    source = {"source": table[0].data.source, "target": "target"}
    assert task_of({**source, "label_separator": ";"})[0] == "tabular_multi_label"


@pytest.mark.slow
def test_label_that_all_training_records_have_is_constant(tmp_path):
    frame = labeled_table(200)
    frame["target"] = [f"{text};always".strip(";") for text in frame["target"]]
    table = prepared(tmp_path, frame, *SETS)
    place = table[1].labels.index("always")
    records, _ = read_side(table[1], "validation")
    for family in LEARNED:
        learner = made(table, family, 1 if family not in ("mlp", "tabm") else 10)
        chances = np.exp(exported(learner, tmp_path / family).outputs(records))[:, place]
        assert (chances > 0.5).all(), family


def test_ensemble_mixes_and_calibrates_the_odds_of_each_label(table, tmp_path):
    config, data = table
    members = [
        {"framework": "sklearn", "config": {"model_type": "linear"}, "weight": 3},
        {"framework": "pytorch_tables", "config": {"model_type": "mlp", "width": 16}},
    ]
    settings = {"model_type": "ensemble", "members": members, "temperature": 2.0}
    fields = {
        "model.framework": "ensemble",
        "model.config": settings,
        "training.max_steps": 2,
        "training.load_best_model_at_end": False,
        "training.early_stopping_patience": None,
    }
    learner = TableEnsembleLearner(from_mapping(changed(config, fields)), data)
    for _ in members:
        learner.learn((), learning_rate_scale=1.0)
    records, _ = read_side(data, "validation")
    found = np.exp(exported(learner, tmp_path / "model").outputs(records))
    each = [np.exp(model.outputs(records)) for model in learner.models]
    mixed = 0.75 * each[0] + 0.25 * each[1]
    odds = (mixed / (1 - mixed)) ** 0.5
    assert found == pytest.approx(odds / (1 + odds), rel=1e-9)
    each = dict(zip(data.labels, (0.2, 0.4, 0.6, 0.8), strict=True))
    decided = {**fields, "model.config": {**settings, "decision": each}}
    learner = TableEnsembleLearner(from_mapping(changed(config, decided)), data)
    for _ in members:
        learner.learn((), learning_rate_scale=1.0)
    model = exported(learner, tmp_path / "decided")
    predicted = found >= np.array(list(each.values()))
    assert (model.decided(model.outputs(records)) == predicted).all()
    tested = judged_records(config, data)
    scores = TableLabelsScorer(config, data).score({"model": model}, tested)
    assert scores["thresholds"].to_pylist()[0] == list(each.values())
    served = [row["prediction"] for row in model.rows([json.loads(tested[FEATURES][0].as_py())])]
    assert served == [[data.labels[place] for place in scores["predictions"][0].as_py()]]
    given = {**settings, "decision": dict.fromkeys(data.labels, 1.5)}
    with pytest.raises(BadInput, match=r"model\.config\.decision"):
        TableEnsembleLearner(from_mapping(changed(config, {**fields, "model.config": given})), data)


def test_search_and_explanation_use_each_label_of_a_record(table, tmp_path):
    config, data = table
    model, records = exported(made(table, "linear", 1), tmp_path / "m"), judged_records(*table)
    half = len(records) // 2
    sides = [records.slice(0, half), records.slice(half)]
    scorer = TableLabelsScorer(config, data)
    scores = joined_folds([scorer.score({"model": model}, side) for side in sides])
    found = out_of_fold([scores])
    losses = found.losses(found.mixed({0: 1})).reshape(len(records), 4).mean(axis=1)
    assert losses == pytest.approx(scores["loss"].to_numpy(), rel=1e-4)
    keys = list(zip(scores["id"].to_pylist(), scores["fold"].to_pylist(), strict=True))
    parts = {0: [explain(model, side, fold) for fold, side in enumerate(sides)]}
    calibration = Calibration(2.0)
    ours = explanation_of(parts, {0: 1}, found, keys, calibration)
    assert {item.column for item in ours.importances} == {*model.preparation.kinds}
    names = [name for name, kind in model.preparation.kinds.items() if kind == "number"]
    rows = [json.loads(text) for text in sides[0][FEATURES].to_pylist()][:25]

    def softened(frame):
        filled = [{**row, **one} for row, one in zip(rows, frame.to_dict("records"), strict=True)]
        odds = np.exp(model.raw(model.preparation.matrix(filled)) / 2.0)
        return odds / (1 + odds)

    frame = pd.DataFrame([{name: row[name] for name in names} for row in rows])
    for name in names[:3]:
        at = ours.dependence[name].at
        expected = [softened(frame.assign(**{name: value})).mean(axis=0) for value in at]
        assert ours.dependence[name].values == pytest.approx(np.array(expected), rel=1e-4)


def test_column_that_gives_one_label_away_is_left_out(tmp_path):
    frame = labeled_table()
    frame["code"] = ["A" if "hot" in text else "B" for text in frame["target"]]
    _, data = prepared(tmp_path, frame, *SETS)
    columns = json.loads(data.path("columns.json").read_text())["columns"]
    (code,) = [one for one in columns if one["name"] == "code"]
    assert code["kind"] is None
    assert "belongs to one class of the target" in code["reason"]


@pytest.mark.parametrize(
    ("overrides", "field"),
    [
        (["training.class_weights={weighting: balanced}"], "training.class_weights"),
        (["training.label_thresholds=per_label"], "training.label_thresholds"),
    ],
)
def test_setting_that_sets_of_labels_do_not_have_is_refused(tmp_path, overrides, field):
    with pytest.raises(ConfigError, match=field):
        check_task(table_config(tmp_path / "table.csv", *SETS, *overrides))


def test_separator_is_refused_for_single_classes(tmp_path):
    with pytest.raises(ConfigError, match=r"data\.label_separator"):
        table_config(tmp_path / "table.csv", SETS[1])
