"""A curriculum: what each step draws from, and that the number of a batch alone decides."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from steadytrain.components.preprocess.step import run
from steadytrain.components.shared.arrow_files import DIFFICULTY
from steadytrain.components.shared.config import load
from steadytrain.components.shared.effects import Use
from steadytrain.components.shared.errors import ConfigError, DataError
from steadytrain.components.tasks.checks import check_task
from steadytrain.components.tasks.encoding.fields import Defect, number_of
from steadytrain.components.techniques.curriculum import CurriculumConfig
from steadytrain.components.techniques.curriculum.order import Curriculum, difficulty_of, share_at
from steadytrain.components.techniques.order import RowOrder
from steadytrain.components.train.loop.data import Rows

from support.data import quarantined, sentence, write_jsonl
from support.training import write_data

ROWS, BATCH, STEPS = 100, 8, 20
DIFFICULTIES = np.random.default_rng(0).permutation(ROWS).astype(np.float64)


def curriculum(pacing="root", *, rows=ROWS, batch=BATCH, seed=1, difficulty=DIFFICULTIES):
    config = CurriculumConfig(by="length", pacing=pacing, start=0.1)
    plain = RowOrder(rows, seed)
    return Curriculum(plain, difficulty[:rows], config, seed=seed, batch=batch, steps=STEPS)


def platanios(progress, start):
    """Equation 8 of Platanios et al. 2019, with p = 2 and t/T as the progress."""
    return min(1.0, (progress * (1 - start**2) + start**2) ** (1 / 2))


@pytest.mark.parametrize("start", [0.01, 0.2, 0.9])
def test_root_pacing_is_that_of_the_paper(start):
    config = CurriculumConfig(by="length", start=start)
    for progress in np.linspace(0, 1.5, 31):
        assert share_at(config, progress) == pytest.approx(platanios(progress, start), abs=1e-12)


@given(progress=st.floats(0, 1), later=st.floats(0, 1), start=st.floats(0.001, 0.999))
@pytest.mark.parametrize("pacing", ["linear", "root", "step"])
def test_share_grows_from_start_to_one(pacing, progress, later, start):
    config = CurriculumConfig(by="length", pacing=pacing, start=start)
    assert share_at(config, 0) == pytest.approx(start)
    assert share_at(config, 1) == 1
    first, second = sorted((progress, later))
    assert share_at(config, first) <= share_at(config, second) <= 1


@pytest.mark.parametrize("pacing", ["linear", "root", "step"])
def test_each_batch_has_the_easiest_rows_alone_and_none_twice(pacing):
    order, drawn = curriculum(pacing), set()
    for step in range(STEPS):
        taken = order.take(step * BATCH, BATCH)
        allowed = max(BATCH, math.ceil(share_at(order.config, step / STEPS) * ROWS))
        assert max(DIFFICULTIES[taken]) < allowed
        assert len(set(taken)) == BATCH
        drawn |= set(taken)
    assert len(drawn) > allowed / 3


def test_after_the_curriculum_each_epoch_has_every_row_once():
    order = curriculum()
    after = order.take(STEPS * BATCH, 2 * ROWS)
    assert after == RowOrder(ROWS, 1).take(0, 2 * ROWS)


@given(position=st.integers(0, 30 * BATCH), count=st.integers(1, 40), earlier=st.integers(0, 300))
def test_rows_depend_on_the_position_alone(position, count, earlier):
    used = curriculum()
    used.take(earlier, 13)
    assert [*used.take(position, count)] == [
        row for place in range(position, position + count) for row in curriculum().take(place, 1)
    ]


def test_seed_decides_and_equal_difficulties_are_no_problem():
    assert curriculum().take(0, BATCH) != curriculum(seed=2).take(0, BATCH)
    order = curriculum(difficulty=np.zeros(ROWS))
    assert len(set(order.take(0, BATCH))) == BATCH


def test_data_smaller_than_a_batch_fill_it():
    taken = curriculum(rows=5).take(0, BATCH)
    assert len(taken) == BATCH
    assert set(taken) <= set(range(5))


def test_curriculum_that_cannot_be_followed_is_an_error():
    found = {
        "training.curriculum.over": ["training.curriculum.over=50", "training.max_steps=40"],
        "training.curriculum.by": ["training.curriculum.by=column"],
        "training.curriculum.column": ["training.curriculum.column=hard"],
        "training.curriculum.model": ["training.curriculum.model=hub:other"],
    }
    for field, overrides in found.items():
        with pytest.raises(ConfigError) as caught:
            load("sequence-classification", ["training.curriculum.by=length", *overrides])
        assert [item.field for item in caught.value.problems] == [field]


@pytest.mark.parametrize("option", ["pacing=step", "start=0.5", "over=0.9"])
def test_option_without_a_curriculum_is_an_error(option):
    with pytest.raises(ConfigError) as caught:
        load("sequence-classification", [f"training.curriculum.{option}"])
    (problem,) = caught.value.problems
    assert problem.field == f"training.curriculum.{option.partition('=')[0]}"
    assert "training.curriculum.by" in problem.remedy


def test_curriculum_by_loss_needs_a_model():
    with pytest.raises(ConfigError, match=r"training\.curriculum\.model is missing"):
        load("sequence-classification", ["training.curriculum.by=loss"])
    fields = ["training.curriculum.by=loss", "training.curriculum.model=hub:"]
    with pytest.raises(ConfigError, match="names nothing"):
        load("sequence-classification", fields)


def test_packed_rows_are_rejected_with_the_reason():
    check_task(load("causal-lm", ["training.curriculum={by: loss, model: hub:other}"]))
    with pytest.raises(ConfigError, match="packs several documents into a row"):
        check_task(load("causal-lm", ["training.curriculum.by=length"]))
    check_task(load("sequence-classification", ["training.curriculum.by=length"]))


def test_only_a_curriculum_changes_a_runs_identity():
    plain = load("sequence-classification")
    assert load("sequence-classification", ["training.curriculum.by=none"]).run_id == plain.run_id
    found = load("sequence-classification", ["training.curriculum.by=length"])
    assert found.run_id != plain.run_id
    assert "model" not in found.counted(Use.TRAINING)["training"]["curriculum"]


def test_column_of_the_data_decides_and_the_task_does_not_see_it(tmp_path):
    rows = [
        {"text": sentence(number), "label": f"l{number % 2}", "loss": number / 10}
        for number in range(60)
    ]
    rows[7]["loss"], rows[8]["loss"], rows[9]["loss"] = "1_000", True, "1,5"
    config = load(
        "sequence-classification",
        [
            ("data.source", [str(write_jsonl(tmp_path / "rows.jsonl", rows))]),
            "data.format=jsonl",
            "data.exclude=[]",
            "data.columns={}",
            "data.sequence_length=32",
            "training.curriculum={by: column, column: loss}",
            f"output={tmp_path}",
        ],
    )
    data = run(config)
    shown = {
        entry["detail"].removesuffix(", not a finite decimal number") for entry in quarantined(data)
    }
    assert shown == {"loss is '1_000'", "loss is True", "loss is '1,5'"}
    stored = Rows([data.path(name) for name in data.sides["train"].shards])
    found = difficulty_of(stored, config.training.curriculum, "input_ids")
    assert set(found) <= {number / 10 for number in range(60)}
    assert len(set(found)) == len(stored)
    assert DIFFICULTY not in stored[0]


@pytest.mark.parametrize(
    ("value", "number"),
    [
        *((text, float(text)) for text in ("3", "-0.5", "+.5", "7.", "1e-3", "2.5E+2", " 007 ")),
        *((value, value) for value in (3, -0.5, 10**18)),
        *((text, None) for text in ("1_000", "infinity", "-inf", "nan", "1e999", "0x10", "1,5")),
        *((text, None) for text in ("1 0", "1\n", "\u00a01", "", "e5", ".", "1e")),
        # Full-width, Arabic and superscript digits.
        *((text, None) for text in ("\uff11\uff12", "\u0661", "1\u00b2")),
        *((value, None) for value in (True, False, float("nan"), float("inf"), [1])),
        pytest.param(10**400, None, id="huge"),
    ],
)
def test_only_finite_decimal_numbers_are_a_difficulty(value, number):
    if number is not None:
        assert number_of({"hard": value}, "hard") == number
        return
    with pytest.raises(Defect, match=r"hard is .*, not a finite decimal number") as caught:
        number_of({"hard": value}, "hard")
    assert caught.value.reason == "wrong_type"


def test_data_without_the_column_are_an_error(tmp_path):
    data = write_data(tmp_path, [{"input_ids": [1], "targets": [1], "lengths": [1]}] * 4, [])
    rows = Rows([data.path(name) for name in data.sides["train"].shards])
    config = CurriculumConfig(by="column", column="loss")
    with pytest.raises(DataError, match=r"prepared without the column 'loss'"):
        difficulty_of(rows, config, "")
