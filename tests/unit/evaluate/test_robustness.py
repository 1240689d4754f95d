"""Robustness: typing errors follow the seed and the record, and an attack costs accuracy."""

from __future__ import annotations

from types import SimpleNamespace

import pyarrow as pa
import pytest
import torch

from steadytrain.components.evaluate.extras import measure_robustness, noised
from steadytrain.components.evaluate.step import evaluation_page
from steadytrain.components.pages.evaluation_section import evaluation_section
from steadytrain.components.shared.config import from_mapping
from steadytrain.components.shared.errors import ConfigError
from steadytrain.components.shared.records import DataRecord, EvaluationRecord, Interval
from steadytrain.components.tasks.checks import check_task
from steadytrain.components.tasks.scoring.classification import (
    ClassificationScorer,
    MultiTaskScorer,
)
from steadytrain.components.techniques.adversarial_training import AttackConfig
from steadytrain.components.techniques.text_augmentation.changes import generator_of, with_typos

from support.tiny import TEXTS, make_classifier, make_tokenizer

LABELS = ["code", "prose"]


def records(count=12):
    return pa.table(
        {
            "id": [f"r{index}" for index in range(count)],
            "text": [TEXTS[index % len(TEXTS)] for index in range(count)],
            "label": [LABELS[index % 2] for index in range(count)],
        }
    )


def test_typing_errors_depend_on_the_seed_and_the_record_alone():
    table = records()
    whole = noised(table, 0.2, seed=1)["text"].to_pylist()
    assert noised(table.slice(5, 3), 0.2, seed=1)["text"].to_pylist() == whole[5:8]
    assert noised(table, 0.2, seed=2)["text"].to_pylist() != whole
    assert noised(table, 0.0, seed=1).equals(table)
    assert table["text"].to_pylist() == records()["text"].to_pylist()


@pytest.mark.parametrize("share", [0.05, 0.3])
def test_the_share_of_characters_is_wrong(share):
    text = "x" * 20_000
    found = with_typos(text, share, generator_of(0, "a"))
    # A swap takes two characters, and so leaves fewer to the other errors.
    expected = share / 3 / (1 + share / 3)
    assert 1 - len(found) / len(text) == pytest.approx(expected, rel=0.15)
    assert (len(found) - found.count("x")) / len(text) == pytest.approx(expected, rel=0.15)


def test_spaces_stay_and_letters_swap_within_words():
    found = with_typos("ab cd " * 500, 0.3, generator_of(0, "a"))
    assert found.count(" ") == 1000
    assert {"ba", "dc"} <= set(found.split())


def configure(task="sequence_classification", **evaluation):
    return from_mapping(
        {
            "name": "tiny",
            "data": {"source": ["unused"], "task": task},
            "model": {"config": {"model_type": "bert"}},
            "evaluation": {"bootstrap_samples": 100, **evaluation},
        }
    )


def test_an_attack_raises_the_loss_and_both_are_reported():
    tokenizer = make_tokenizer(100)
    components = {"model": make_classifier(tokenizer, LABELS), "tokenizer": tokenizer}
    config = configure(attack={"kind": "pgd", "epsilon": 3.0}, character_noise=0.2)
    data = DataRecord.model_construct(labels=LABELS, sequence_length=64)
    task = SimpleNamespace(
        scorer=ClassificationScorer(config, data),
        packager=SimpleNamespace(load_exported=lambda folder: components),
    )
    done = []
    found = measure_robustness(config, task, None, records(), done.append)
    assert list(found) == ["attack", "character_noise"]
    assert done == [12, 12]
    plain = task.scorer.score(components, records())["loss"].to_numpy()
    assert found["attack"]["loss"].value > plain.mean() * 1.01
    attacked = task.scorer.score_attacked(components, records(), config.evaluation.attack)
    assert (attacked["loss"].to_numpy() > plain).all()
    assert task.scorer.score(components, records())["loss"].to_numpy() == pytest.approx(plain)


PARTS = ["kind/code", "kind/prose", "mood/bad", "mood/good", "mood/none"]


def test_an_attack_on_several_data_sets_raises_the_loss_within_each():
    """So the loss that it raises is the one among the classes of a text's own part."""
    tokenizer = make_tokenizer(100)
    components = {"model": make_classifier(tokenizer, PARTS), "tokenizer": tokenizer}
    content = configure(attack={"kind": "fgm", "epsilon": 0.05}).model_dump(mode="json")
    parts = {name: {"source": ["unused"]} for name in ("kind", "mood")}
    content |= {
        "data": {"task": "multi_task", "parts": parts},
        "evaluation": {**content["evaluation"], "character_noise": 0.2},
        "gate": {"max_slice_regression": 0.02},
    }
    config = from_mapping(content)
    check_task(config)
    scorer = MultiTaskScorer(
        config, DataRecord.model_construct(labels=PARTS, sequence_length=64, task="multi_task")
    )
    labels = [PARTS[index % len(PARTS)] for index in range(12)]
    table = records().drop(["label"]).append_column("label", pa.array(labels))
    table = table.append_column("slice", pa.array([label.split("/")[0] for label in labels]))
    task = SimpleNamespace(
        scorer=scorer, packager=SimpleNamespace(load_exported=lambda folder: components)
    )
    found = measure_robustness(config, task, None, table, lambda done: None)

    scores = {
        "attack": scorer.score_attacked(components, table, config.evaluation.attack),
        "character_noise": scorer.score(components, noised(table, 0.2, config.training.seed)),
    }
    for field, scored in scores.items():
        owners = scored["part"].to_numpy()
        for index, part in enumerate(("kind", "mood")):
            own = scored.filter(pa.array(owners == index))
            right = (own["label"].to_numpy() == own["prediction"].to_numpy()).mean()
            assert found[field][f"{part}/accuracy"].value == pytest.approx(right)
            assert found[field][f"{part}/loss"].value == pytest.approx(
                own["loss"].to_numpy().mean()
            )
        assert found[field]["loss"].value == pytest.approx(scored["loss"].to_numpy().mean())
    # A small step along the gradient of the own part's loss raises it for every text.
    plain = scorer.score(components, table)["loss"].to_numpy()
    assert (scores["attack"]["loss"].to_numpy() > plain).all()


def test_an_attack_on_several_data_sets_ignores_the_classes_of_other_parts():
    tokenizer = make_tokenizer(100)
    model = make_classifier(tokenizer, PARTS)
    components = {"model": model, "tokenizer": tokenizer}
    scorer = MultiTaskScorer(
        configure(), DataRecord.model_construct(labels=PARTS, sequence_length=64)
    )
    labels = pa.array([PARTS[index % 2] for index in range(12)])
    table = records().drop(["label"]).append_column("label", labels)
    attack = AttackConfig(kind="pgd", epsilon=1.0)
    before = scorer.score_attacked(components, table, attack)["loss"].to_numpy()
    with torch.no_grad():
        model.get_parameter("classifier.weight")[2:] *= 50
    after = scorer.score_attacked(components, table, attack)["loss"].to_numpy()
    assert after == pytest.approx(before, rel=1e-5)


def test_it_is_on_the_pages():
    level = Interval(value=0.8, low=0.7, high=0.9)
    record = EvaluationRecord(
        task="sequence_classification",
        weights_digest="0",
        examples=3,
        metrics={"accuracy": level.model_copy(update={"value": 0.95})},
        scores="",
        slices={"topic": {"accuracy": 0.75}},
        robustness={"character_noise": {"accuracy": level, "topic/accuracy": level}},
    )
    row, part = evaluation_section(record)["robustness"]
    assert row == ("accuracy, character noise", ["0.8000", "0.7000 to 0.9000", "0.9500"])
    assert part == ("topic/accuracy, character noise", ["0.8000", "0.7000 to 0.9000", "0.7500"])
    scores = pa.table({"id": ["a"], "loss": [1.0], "targets": [1], "slice": ["x"]})
    texts = pa.table({"id": ["a"], "text": ["first of two"], "text_pair": ["second"]})
    page = evaluation_page(record, scores, texts, title="a run")
    assert "accuracy, character noise" in page
    assert "first of two\nsecond" in page
    assert "0.95" in page
    assert "0.75" in page


def test_language_models_are_rejected_before_anything_starts():
    check_task(configure(character_noise=0.1))
    with pytest.raises(ConfigError, match=r"character_noise = 0\.1: .* causal_lm cannot measure"):
        check_task(configure("causal_lm", character_noise=0.1))


def test_what_is_off_leaves_a_runs_identity_alone():
    plain = configure().run_id
    assert configure(attack={"kind": "none"}, character_noise=0).run_id == plain
    assert configure(attack={"kind": "fgm"}).run_id != plain
    assert configure(character_noise=0.1).run_id != plain
