"""A teacher's stored answers: the same losses as with the teacher, whole files, and no teacher."""

from __future__ import annotations

import json

import pyarrow as pa
import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from steadytrain.components.shared import chunks
from steadytrain.components.shared.batch import BatchSettings
from steadytrain.components.shared.errors import BadInput, PathTaken, StorageError
from steadytrain.components.tasks import causal_lm, models
from steadytrain.components.techniques.distillation.teacher import AnsweringTeacher
from steadytrain.components.train.loop import teacher_answers
from steadytrain.components.train.loop.control import OUTCOMES, StoppedEarly, Watch
from steadytrain.components.train.loop.data import Rows
from steadytrain.components.train.loop.setup import set_up

from support.answering import IN_A_FILE, TOGETHER, store_on_a_rank
from support.forked import on_ranks
from support.training import (
    CLASSES,
    LLAMA,
    VOCABULARY,
    Bench,
    class_rows,
    language_rows,
    losses_of,
    write_data,
)
from support.weight_digests import BERT

LABELS = ["a", "b", "c"]
RECIPE = {
    "max_steps": 2,
    "global_batch_size": 4,
    "micro_batch_size": 2,
    "learning_rate": 5e-3,
    "logging_steps": 1,
}
STILL = {**BERT, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


@pytest.fixture(autouse=True)
def small_files(monkeypatch):
    monkeypatch.setattr(chunks, "ANSWERED_TOKENS", TOGETHER)
    monkeypatch.setattr(teacher_answers, "_FILE_TOKENS", IN_A_FILE)


@pytest.fixture
def loads(monkeypatch):
    """Return a list that gets an entry for each teacher that is loaded."""
    found = []
    for module in (causal_lm, models):
        load = module.load_frozen
        monkeypatch.setattr(
            module, "load_frozen", lambda *given, load=load: found.append(1) or load(*given)
        )
    return found


@pytest.fixture
def asked(monkeypatch):
    """Return a list that gets the number of rows that a teacher answers, each time."""
    found, answer = [], AnsweringTeacher.answer
    monkeypatch.setattr(
        AnsweringTeacher,
        "answer",
        lambda self, rows, device: found.append(len(rows)) or answer(self, rows, device),
    )
    return found


def write_teacher(folder, auto, fields):
    torch.manual_seed(1)
    auto.from_config(AutoConfig.for_model(**fields, vocab_size=VOCABULARY)).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def language(tmp_path):
    data = write_data(tmp_path / "data" / "rows", language_rows(20), language_rows(4, seed=1))
    fields = {**LLAMA, "hidden_size": 48}
    return data, LLAMA, write_teacher(tmp_path / "teacher", AutoModelForCausalLM, fields)


@pytest.fixture
def labeled(tmp_path):
    data = write_data(
        tmp_path / "data" / "rows",
        class_rows(20),
        class_rows(4, seed=1),
        task="sequence_classification",
        schema=CLASSES,
        labels=LABELS,
    )
    fields = {**STILL, "id2label": dict(enumerate(LABELS))}
    teacher = write_teacher(tmp_path / "teacher", AutoModelForSequenceClassification, fields)
    return data, STILL, teacher


def train(folder, given, *, micro_batch=2, **distillation):
    data, fields, teacher = given
    bench = Bench.make(
        folder,
        data,
        model={"config": fields},
        training={
            **RECIPE,
            "micro_batch_size": micro_batch,
            "distillation": {"teacher": teacher, **distillation},
        },
        compute={"device": "cpu"},
    )
    training = bench.train_here()
    return training, list(losses_of(bench.workspace).values())


def files(tmp_path):
    return sorted((tmp_path / "data").glob("rows.teacher-*/*"))


@pytest.mark.parametrize(("kind", "top_k"), [("language", VOCABULARY), ("labeled", 3)])
def test_stored_answers_teach_like_the_teacher_itself(tmp_path, request, kind, top_k, loads):
    given = request.getfixturevalue(kind)
    _, online = train(tmp_path / "online", given)
    training, stored = train(tmp_path / "stored", given, top_k=top_k)
    assert stored == pytest.approx(online, rel=1e-5)
    # Only the answers are left of the teacher.
    assert training.parts.task.teacher is None
    assert loads == [1, 1]
    # A later run does not load it at all.
    _, again = train(tmp_path / "again", given, top_k=top_k)
    assert again == stored
    assert loads == [1, 1]


def test_fewer_answers_teach_in_any_micro_batch(tmp_path, language):
    _, two = train(tmp_path / "two", language, top_k=4)
    _, one = train(tmp_path / "one", language, top_k=4, micro_batch=1)
    assert one == pytest.approx(two, rel=1e-5)
    _, online = train(tmp_path / "online", language)
    assert two != pytest.approx(online, rel=1e-5)


@pytest.mark.slow
def test_ranks_store_the_same_files_as_one(tmp_path, language):
    train(tmp_path / "one", language, top_k=4)
    before = {path.name: path.read_bytes() for path in files(tmp_path)}
    assert len(before) == 4
    for path in files(tmp_path):
        path.unlink()
    data, fields, teacher = language
    bench = Bench.make(
        tmp_path / "two",
        data,
        model={"config": fields},
        training={**RECIPE, "distillation": {"teacher": teacher, "top_k": 4}},
        compute={"device": "cpu", "nproc_per_node": 2},
    )
    data.save(tmp_path / "data.json")
    content = bench.config.model_dump(mode="json", exclude_unset=True)
    on_ranks(2, store_on_a_rank, content, tmp_path / "data.json", tmp_path)
    assert {path.name: path.read_bytes() for path in files(tmp_path)} == before
    # Either rank has all answers: three columns beside the data's three.
    assert (tmp_path / "columns").read_text() == str([6] * 20)


class Killed(Exception):
    pass


def test_a_killed_attempt_leaves_whole_files_and_the_next_one_computes_the_rest(
    tmp_path, language, asked, monkeypatch
):
    write, done = teacher_answers.LocalStorage.write, []

    def killed(self, name, content, **options):
        if name.endswith(".arrow") and len(done) == 2:
            # What a kill during the write leaves.
            (self.folder / ".partial-0").write_bytes(content[:100])
            raise Killed
        if name.endswith(".arrow"):
            done.append(name)
        return write(self, name, content, **options)

    with monkeypatch.context() as patch:
        patch.setattr(teacher_answers.LocalStorage, "write", killed)
        with pytest.raises(Killed):
            train(tmp_path / "killed", language, top_k=4)
    before = [path for path in files(tmp_path) if path.suffix == ".arrow"]
    assert len(before) == 2
    assert sum(asked) == 3 * 6  # the third file was lost
    asked.clear()
    _, resumed = train(tmp_path / "resumed", language, top_k=4)
    assert sum(asked) == 20 - 2 * 6
    after = {path.name: path.read_bytes() for path in files(tmp_path)}
    for path in files(tmp_path):
        path.unlink()
    _, whole = train(tmp_path / "whole", language, top_k=4)
    assert resumed == whole
    assert {path.name: path.read_bytes() for path in files(tmp_path)}.items() <= after.items()


def damage(path, how):
    content = bytearray(path.read_bytes())
    if how == "truncated":
        content = content[:-50]
    elif how == "empty":
        content = b""
    else:
        # Among the numbers, far from the file's structure.
        content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)


@pytest.mark.parametrize("how", ["truncated", "empty", "flipped"])
def test_a_damaged_file_is_computed_again(tmp_path, language, asked, how):
    train(tmp_path / "first", language, top_k=4)
    path = files(tmp_path)[1]
    good = path.read_bytes()
    damage(path, how)
    assert path.read_bytes() != good
    asked.clear()
    train(tmp_path / "second", language, top_k=4)
    assert sum(asked) == 6
    assert path.read_bytes() == good


def test_a_folder_in_the_place_of_a_file_is_an_error_before_the_teacher_is_asked(
    tmp_path, language, asked
):
    train(tmp_path / "first", language, top_k=4)
    path = files(tmp_path)[0]
    path.unlink()
    path.mkdir()
    asked.clear()
    with pytest.raises(PathTaken, match=f"{path}: Is a directory") as caught:
        train(tmp_path / "second", language, top_k=4)
    assert "move away what is in its place" in caught.value.remedy
    assert not asked


def test_damaged_files_are_reported_and_ranks_that_are_asked_to_stop_keep_the_others(
    tmp_path, language
):
    training, _ = train(tmp_path / "first", language, top_k=4)
    config, data = training.parts.config, language[0]
    for path in files(tmp_path):
        damage(path, "flipped")
    told, done = [], []
    asked = [0] * len(OUTCOMES)
    asked[OUTCOMES.index("preempted")] = 1
    watch = Watch(
        flags=lambda: asked,
        progress=lambda work, count, total: done.append((work, count, total)),
        warn=told.append,
    )
    for state in (AcceleratorState, GradientState):
        state._reset_state()
    with pytest.raises(StoppedEarly) as stop:
        set_up(config, data, BatchSettings(2), watch=watch)
    assert stop.value.outcome == "preempted"
    assert done == [("storing the teacher's answers", 0, 20)]
    assert len(told) == 1
    assert str(files(tmp_path)[0]) in told[0]


def test_damage_while_training_asks_for_another_attempt(tmp_path, language):
    """StorageError is retried, and the next attempt computes the answers again."""
    train(tmp_path / "first", language, top_k=4)
    path = files(tmp_path)[0]
    damage(path, "flipped")
    answers = teacher_answers._Answers([path])
    with pytest.raises(StorageError, match="a teacher's answers are damaged"):
        answers[0]


@pytest.mark.slow
def test_answers_of_other_settings_are_others(tmp_path, language, asked):
    train(tmp_path / "first", language, top_k=4)
    for number, change in enumerate(({"top_k": 5}, {"top_k": 4, "temperature": 3.0})):
        asked.clear()
        train(tmp_path / str(number), language, **change)
        assert sum(asked) == 20
    # What the loss makes of the answers needs no others.
    asked.clear()
    train(tmp_path / "weight", language, top_k=4, weight=0.9, divergence="reverse")
    assert not asked
    # The same address, another teacher.
    config = tmp_path / "teacher" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "rms_norm_eps": 1e-3}))
    train(tmp_path / "changed", language, top_k=4)
    assert sum(asked) == 20


def test_each_row_has_its_own_answers(tmp_path, language):
    """Row by row, in the order of the data, with one answer for each target."""
    train(tmp_path / "run", language, top_k=4)
    data = language[0]
    rows = Rows([data.path(name) for name in data.sides["train"].shards])
    answers = Rows(files(tmp_path))
    assert len(answers) == len(rows)
    for row, answer in zip(rows, answers, strict=True):
        targets = int(sum(row["targets"]))
        assert len(answer["teacher_rest"]) == targets
        assert len(answer["teacher_classes"]) == len(answer["teacher_likely"]) == 4 * targets


def test_more_answers_than_tokens_are_an_error(tmp_path, language):
    with pytest.raises(BadInput, match=r"top_k = 65: the teacher has 64 to choose from"):
        train(tmp_path / "run", language, top_k=65)


def test_a_task_that_draws_what_it_learns_is_an_error(tmp_path, language, monkeypatch):
    draw = lambda self, row, place, *, training: {**row}  # noqa: E731
    monkeypatch.setattr(causal_lm.SupervisedFineTuning, "draw", draw, raising=False)
    with pytest.raises(BadInput, match=r"top_k = 4: data\.task causal_lm draws what it learns"):
        train(tmp_path / "run", language, top_k=4)


def test_columns_beside_others_belong_to_the_same_rows(tmp_path):
    found = []
    for name, values in (("a", range(5)), ("b", range(10, 15))):
        batch = pa.RecordBatch.from_pydict({name: pa.array(values)})
        with pa.ipc.new_file(str(tmp_path / name), batch.schema) as writer:
            writer.write_batch(batch)
        found.append(tmp_path / name)
    rows = Rows(found[:1], Rows(found[1:]))
    assert rows[3] == {"a": 3, "b": 13}
