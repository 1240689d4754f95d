"""Augmented texts: what changes, how often, and that the place of a row alone decides."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from steadytrain.components.preprocess.step import run
from steadytrain.components.shared.arrow_files import TEXT
from steadytrain.components.shared.config import from_mapping, load
from steadytrain.components.shared.errors import ConfigError, DataError
from steadytrain.components.tasks.base import OpenTask
from steadytrain.components.tasks.checks import check_task
from steadytrain.components.tasks.encoding.base import Content
from steadytrain.components.tasks.encoding.labeled_text import ClassIndex, TextRows
from steadytrain.components.techniques.text_augmentation import AugmentationConfig
from steadytrain.components.techniques.text_augmentation.changes import (
    augmented,
    generator_of,
    with_deletions,
    with_swaps,
    with_typos,
)
from steadytrain.components.train.loop.data import Rows

from support.data import sentence, write_jsonl
from support.training import GPT2, TEXTS, Bench, class_rows, with_texts, write_data

TEXT_OF_WORDS = " ".join(f"word{number}" for number in range(40))
ALL = {"deletion": 0.2, "swap": 0.2, "character_noise": 0.1}


def generators(count):
    return (np.random.default_rng([7, number]) for number in range(count))


def test_each_word_is_deleted_with_the_same_probability_and_the_rest_keeps_its_order():
    words, kept = TEXT_OF_WORDS.split(), Counter()
    for random in generators(400):
        left = with_deletions(TEXT_OF_WORDS, 0.3, random).split()
        assert left == [word for word in words if word in set(left)]
        kept.update(left)
    shares = np.array([kept[word] / 400 for word in words])
    assert abs(shares.mean() - 0.7) < 0.01
    assert abs(shares - 0.7).max() < 5 * (0.3 * 0.7 / 400) ** 0.5


def test_one_word_is_never_deleted():
    found = {with_deletions("one two", 0.99, random).strip() for random in generators(50)}
    assert found == {"one", "two"}
    assert with_deletions("", 0.5, np.random.default_rng(0)) == ""


def test_swaps_exchange_as_many_words_as_asked():
    words, exchanges = TEXT_OF_WORDS.split(), []
    for random in generators(400):
        moved = with_swaps(TEXT_OF_WORDS, 0.0625, random).split()
        assert Counter(moved) == Counter(words)
        # The fewest exchanges that undo a permutation: its length minus its number of cycles.
        exchanges.append(len(words) - cycles([words.index(word) for word in moved]))
    # 2.5 of 40 on average. Rarely, one exchange undoes another.
    assert {2, 3} <= set(exchanges) <= {0, 1, 2, 3}
    assert np.mean(exchanges) == pytest.approx(2.5, abs=0.15)


def cycles(permutation):
    seen, count = set(), 0
    for start in range(len(permutation)):
        count += start not in seen
        while start not in seen:
            seen.add(start)
            start = permutation[start]
    return count


@pytest.mark.parametrize("text", ["  one\ttwo \n three ", "one  two", "one", " ", ""])
def test_white_space_stays_where_it_is(text):
    found = with_swaps(text, 1.0, np.random.default_rng(1))
    assert "".join(filter(str.isspace, found)) == "".join(filter(str.isspace, text))
    assert sorted(found.split()) == sorted(text.split())
    assert with_deletions(text, 0.0, np.random.default_rng(1)) == text


def test_one_operation_at_a_time_changes_a_text():
    config = AugmentationConfig(**ALL, probability=0.5)
    assert config.operations == ALL
    found = Counter()
    for number in range(600):
        text = augmented(TEXT_OF_WORDS, config, np.random.default_rng([3, number]))
        words = text.split()
        if text == TEXT_OF_WORDS:
            found["none"] += 1
        elif len(words) < 40 and set(words) < set(TEXT_OF_WORDS.split()):
            found["deletion"] += 1
        elif sorted(words) == sorted(TEXT_OF_WORDS.split()):
            found["swap"] += 1
        else:
            found["character_noise"] += 1
    assert abs(found["none"] - 300) < 60
    assert all(abs(found[name] - 100) < 45 for name in ALL)


def test_typing_errors_are_those_of_the_evaluation():
    config = AugmentationConfig(character_noise=0.2, probability=1.0)
    random = np.random.default_rng(5)
    random.random(), random.integers(1)
    expected = with_typos(TEXT_OF_WORDS, 0.2, random)
    assert augmented(TEXT_OF_WORDS, config, np.random.default_rng(5)) == expected


@pytest.fixture
def classifier(tmp_path):
    data = write_data(
        tmp_path,
        with_texts(class_rows(6)),
        [],
        task="sequence_classification",
        schema=TEXTS,
        labels=["a", "b", "c"],
        sequence_length=10,
    )

    def opened(seed=42):
        training = {"augmentation": ALL, "seed": seed}
        bench = Bench.make(tmp_path, data, model={"config": GPT2}, training=training)
        return OpenTask(bench.config, data).training

    return opened


def test_seed_and_place_alone_decide(classifier):
    row = with_texts(class_rows(1))[0]

    def drawn(place, seed=42, **changed):
        found = classifier(seed).draw({**row, **changed}, place, training=True)
        return tuple(found["input_ids"])

    places = [drawn(place) for place in range(20)]
    assert len(set(places)) > 5
    assert places == [drawn(place) for place in range(20)]
    assert places != [drawn(place, seed=1) for place in range(20)]
    # What is beside the text does not matter.
    assert places == [drawn(place, label=2) for place in range(20)]


def test_validation_is_clean_and_unchanged_texts_keep_their_tokens(classifier):
    task, row = classifier(), with_texts(class_rows(1))[0]
    assert all(task.draw(row, place, training=False) is row for place in range(20))
    kept = [task.draw(row, place, training=True) is row for place in range(200)]
    assert 0.2 < sum(kept) / 200 < 0.6


def test_tokens_are_those_that_preprocessing_makes_of_the_text(classifier, tmp_path):
    task, row = classifier(), with_texts(class_rows(30))[11]
    encoder = TextRows(tmp_path / "tokenizer", 10, ClassIndex({"a": 0}))
    for place in range(40):
        random = generator_of(42, f"augmentation {place}")
        text = augmented(row[TEXT], AugmentationConfig(**ALL), random)
        (encoded,) = encoder.encode([Content(text, "a")])
        found = task.draw(row, place, training=True)["input_ids"]
        if text == row[TEXT]:
            assert found == row["input_ids"]
        else:
            assert list(found) == encoded.rows[0].values["input_ids"].tolist()
            assert len(found) <= 10


def test_text_that_loses_all_its_tokens_stays_as_it_is(classifier):
    row = {"input_ids": [5], "label": 0, TEXT: "x"}
    drawn = [classifier().draw(row, place, training=True) for place in range(300)]
    assert all(len(found["input_ids"]) == 1 for found in drawn)


def configured(tmp_path, *changes):
    rows = [
        {"text": f"{sentence(number)} {'more ' * (number % 3 * 20)}", "label": f"l{number % 2}"}
        for number in range(60)
    ]
    return load(
        "sequence-classification",
        [
            ("data.source", [str(write_jsonl(tmp_path / "rows.jsonl", rows))]),
            "data.format=jsonl",
            "data.exclude=[]",
            "data.columns={}",
            "data.sequence_length=16",
            f"output={tmp_path}",
            *changes,
        ],
    )


def rows_of(data):
    return Rows([data.path(name) for name in data.sides["train"].shards])


def test_rows_keep_the_text_of_their_tokens(tmp_path):
    plain = rows_of(run(configured(tmp_path)))
    assert TEXT not in plain.columns
    with pytest.raises(DataError, match=r"prepared without training\.augmentation"):
        plain.check_texts()
    config = configured(tmp_path, "training.augmentation.swap=0.1")
    data = run(config)
    rows = rows_of(data)
    rows.check_texts()
    encoder = TextRows(data.path(data.tokenizer), 64, ClassIndex({"l0": 0, "l1": 1}))
    longest = 0
    for before, row in zip(plain, rows, strict=True):
        assert before["input_ids"].tolist() == row["input_ids"].tolist()
        # Where a text was truncated, the rest is not kept.
        (again,) = encoder.encode([Content(row[TEXT], "l0")])
        assert again.rows[0].values["input_ids"].tolist() == row["input_ids"].tolist()
        longest = max(longest, len(row["input_ids"]))
    assert longest == 16


def configure(task="sequence_classification", **training):
    return from_mapping(
        {
            "name": "tiny",
            "data": {"source": ["unused"], "task": task},
            "model": {"config": GPT2},
            "training": training,
        }
    )


def test_without_an_operation_nothing_reads_the_probability():
    with pytest.raises(
        ConfigError, match=r"training\.augmentation\.probability = 0\.5.*out an oper"
    ):
        configure(augmentation={"probability": 0.5})
    with pytest.raises(ConfigError, match=r"training\.augmentation\.deletion = 1\.0"):
        configure(augmentation={"deletion": 1.0})


def test_only_tasks_with_labeled_texts_support_it():
    check_task(configure(augmentation={"swap": 0.1}))
    with pytest.raises(ConfigError, match=r"augmentation.*causal_lm does not include it"):
        check_task(configure("causal_lm", augmentation={"swap": 0.1}))


def test_identity_changes_only_if_it_is_on():
    assert configure().run_id == configure(augmentation={"swap": 0}).run_id
    assert configure().run_id != configure(augmentation={"swap": 0.1}).run_id
