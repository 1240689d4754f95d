"""Rows scored by a reference model: the values, the file, a stop, and models that do not fit."""

from __future__ import annotations

import re

import numpy as np
import pyarrow as pa
import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

from steadytrain.components.shared.config.data_sections import MULTI_TASK
from steadytrain.components.shared.errors import BadInput, ConfigError, PathTaken
from steadytrain.components.tasks.checks import check_task
from steadytrain.components.train.attempt import AttemptFolder
from steadytrain.components.train.loop import row_losses as scoring
from steadytrain.components.train.loop.control import OUTCOMES, StoppedEarly, Watch
from steadytrain.components.train.loop.main import Rank

from support.forked import on_ranks
from support.scoring import (
    IDS,
    PARTS,
    bench_of,
    classes,
    fresh,
    language,
    save,
    score_on_rank,
    scored,
)
from support.training import CLASSES, GPT2, LLAMA, VOCABULARY, class_rows, language_rows
from support.weight_digests import BERT


def plain_language(folder, rows):
    """Each document alone, in double precision."""
    model = AutoModelForCausalLM.from_pretrained(folder).double().eval()
    for row in rows:
        start, total, count = 0, 0.0, 0
        for length in row["lengths"]:
            ids = torch.tensor(row["input_ids"][start : start + length])
            found = model(ids[None]).logits[0, :-1].log_softmax(1)
            total -= found.gather(1, ids[1:, None]).sum().item()
            start, count = start + length, count + length - 1
        yield total / count


@pytest.mark.parametrize("fields", [LLAMA, GPT2], ids=["llama", "gpt2"])
@torch.no_grad()
def test_loss_of_packed_rows_is_that_of_their_documents(tmp_path, fields):
    bench = language(tmp_path, fields)
    expected = list(plain_language(tmp_path / "model", language_rows(70)))
    assert scored(bench) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    "fields", [BERT, LLAMA, {**LLAMA, "pad_token_id": 0}], ids=["bert", "no padding", "other"]
)
@torch.no_grad()
def test_loss_of_a_text_is_that_of_its_label(tmp_path, fields):
    bench = classes(tmp_path, fields)
    kind = AutoModelForSequenceClassification
    model = kind.from_pretrained(tmp_path / "model").double().eval()
    expected = [
        -model(torch.tensor([row["input_ids"]])).logits[0].log_softmax(0)[row["label"]].item()
        for row in class_rows(70)
    ]
    assert scored(bench) == pytest.approx(expected, rel=1e-5)


@torch.no_grad()
def test_loss_of_a_part_is_among_its_own_labels(tmp_path):
    ids = {"id2label": dict(enumerate(PARTS))}
    model = save(tmp_path / "model", AutoModelForSequenceClassification, BERT, **ids)
    rows = class_rows(40)
    bench = bench_of(tmp_path, MULTI_TASK, rows, model, CLASSES, PARTS)
    kind = AutoModelForSequenceClassification
    loaded = kind.from_pretrained(tmp_path / "model").double().eval()
    expected = []
    for row in rows:
        logits, label = loaded(torch.tensor([row["input_ids"]])).logits[0], row["label"]
        own = slice(0, 2) if label < 2 else slice(2, 3)
        expected.append((logits[own].logsumexp(0) - logits[label]).item())
    assert scored(bench) == pytest.approx(expected, rel=1e-5, abs=1e-6)


@torch.no_grad()
def test_loss_of_hidden_tokens_is_their_mean(tmp_path):
    model = save(tmp_path / "model", AutoModelForMaskedLM, BERT)
    rows = [{"input_ids": row["input_ids"]} for row in class_rows(40)]
    bench = bench_of(tmp_path, "masked_lm", rows, model, IDS)
    tokenizer = AutoTokenizer.from_pretrained(bench.data.path("tokenizer"))
    tokenizer.add_special_tokens({"mask_token": "w2"})
    tokenizer.save_pretrained(bench.data.path("tokenizer"))
    from steadytrain.components.tasks.masked_lm import MaskedLanguageModel

    task = MaskedLanguageModel(bench.config, bench.data)
    loaded = AutoModelForMaskedLM.from_pretrained(tmp_path / "model").double().eval()
    expected = []
    for index, row in enumerate(rows):
        drawn = task.draw(row, index, training=False)
        logs = loaded(torch.tensor(drawn["input_ids"])[None].long()).logits[0].log_softmax(1)
        targets = torch.tensor(drawn["targets"])
        kept = (targets != -100).nonzero().flatten()
        expected.append(-logs[kept, targets[kept]].mean().item() if len(kept) else 0.0)
    assert scored(bench) == pytest.approx(expected, rel=1e-5)


def test_stored_losses_are_read_and_damaged_ones_computed_again(tmp_path, monkeypatch):
    bench = classes(tmp_path)
    whole = scored(bench)
    (file,) = bench.workspace.losses.iterdir()
    content = file.read_bytes()

    def refuse(*_):
        raise AssertionError("the model was loaded")

    with monkeypatch.context() as patched:
        patched.setattr(scoring._Scoring, "complete", refuse)
        assert scored(bench).tolist() == whole.tolist()
    value = np.array(whole[3:5]).tobytes()
    damaged = content.replace(value, np.array([9.0, 8.0]).tobytes())
    assert damaged != content
    said = []
    for change in (damaged, content[: len(content) // 2], b""):
        file.write_bytes(change)
        found = scored(bench, Watch(warn=said.append))
        assert found.tolist() == whole.tolist()
        assert file.read_bytes() == content
    assert len(said) == 3
    assert all("computed again" in message for message in said)


def test_folder_in_the_place_of_the_file_is_an_error_before_the_rows_are_scored(tmp_path):
    bench = classes(tmp_path)
    scored(bench)
    (file,) = bench.workspace.losses.iterdir()
    file.unlink()
    file.mkdir()
    beats = []
    with pytest.raises(PathTaken, match=f"{file}: Is a directory") as caught:
        scored(bench, Watch(beat=lambda: beats.append(1)))
    assert "move away what is in its place" in caught.value.remedy
    assert not beats


def test_another_model_or_other_data_have_losses_of_their_own(tmp_path):
    bench = classes(tmp_path)
    first = scored(bench)
    kind = AutoModelForSequenceClassification
    model = kind.from_pretrained(tmp_path / "model")
    torch.nn.init.normal_(model.classifier.weight)
    model.save_pretrained(tmp_path / "model")
    assert scored(bench).tolist() != first.tolist()
    bench.data = bench.data.model_copy(update={"fingerprint": "1" * 64})
    scored(bench)
    assert len(list(bench.workspace.losses.iterdir())) == 3


def test_stopped_scoring_continues_where_it_was(tmp_path, monkeypatch):
    monkeypatch.setattr(scoring, "_ROUND", 1)
    monkeypatch.setattr(scoring, "_ROWS", 8)
    bench = classes(tmp_path / "stopped")
    rounds, done = [], []

    def flags():
        rounds.append(1)
        asked = {"preempted"} if len(rounds) == 3 else set()
        return [int(name in asked) for name in OUTCOMES]

    watch = Watch(flags=flags, progress=lambda _work, count, _total: done.append(count))
    with pytest.raises(StoppedEarly) as stop:
        scored(bench, watch)
    assert (stop.value.outcome, done) == ("preempted", [0, 8, 16])
    found = scored(bench, watch)
    assert done[3:] == [24, 32, 40, 48, 56, 64, 70]
    assert found.tolist() == scored(classes(tmp_path / "whole")).tolist()


def test_rank_that_is_asked_to_stop_while_it_scores_leaves(tmp_path):
    bench = classes(tmp_path)
    fresh()
    rank = Rank(AttemptFolder(bench.attempt()))
    rank.requests.received.add("preempted")
    assert rank.run() == "preempted"
    assert rank.training is None
    (file,) = bench.workspace.losses.iterdir()
    kept = file.read_bytes()
    assert bench.train_here(2).progress.step == 6
    assert file.read_bytes() == kept


def test_killed_scoring_keeps_what_was_written(tmp_path, monkeypatch):
    """A write replaces the file, so a kill between two writes loses only what came after."""
    for name in ("_ROUND", "_SAVE_SECONDS"):
        monkeypatch.setattr(scoring, name, 1 if name == "_ROUND" else 0.0)
    bench = language(tmp_path / "killed", LLAMA)
    beats = []

    def beat():
        beats.append(1)
        if len(beats) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        scored(bench, Watch(beat=beat))
    (file,) = bench.workspace.losses.iterdir()
    kept = np.isfinite(pa.ipc.open_file(str(file)).read_all().column("loss").to_numpy())
    assert 0 < kept.sum() < len(kept)
    assert scored(bench).tolist() == scored(language(tmp_path / "whole", LLAMA)).tolist()


@pytest.mark.slow
def test_two_ranks_find_the_losses_of_one(tmp_path):
    on_ranks(2, score_on_rank, tmp_path)
    one = scored(classes(tmp_path / "one"))
    for rank in ("0", "1"):
        assert np.load(tmp_path / f"{rank}.npy").tolist() == one.tolist()


def test_model_that_does_not_fit_is_an_error(tmp_path):
    other = {"id2label": dict(enumerate(["x", "b", "c"]))}
    with pytest.raises(BadInput, match=r"training\.curriculum\.model = .*labels are x, b, c"):
        scored(classes(tmp_path / "labels", **other))
    bench = language(tmp_path / "task", LLAMA)
    save(tmp_path / "task" / "model", AutoModelForSequenceClassification, BERT)
    with pytest.raises(BadInput, match=r"training\.curriculum\.model: "):
        scored(bench)
    small = tmp_path / "small"
    bench = language(small, LLAMA)
    fields = {**LLAMA, "vocab_size": VOCABULARY - 8}
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields)).save_pretrained(
        small / "model"
    )
    with pytest.raises(BadInput, match=r"64 tokens, training\.curriculum\.model's vocabulary 56"):
        scored(bench)


def test_loss_that_is_not_finite_is_an_error(tmp_path):
    bench = language(tmp_path, LLAMA)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    model.lm_head.weight.data[3] = torch.nan
    model.save_pretrained(tmp_path / "model")
    with pytest.raises(BadInput, match="loss of a training row is not finite"):
        scored(bench)
    assert not bench.workspace.losses.exists()


def test_tasks_without_a_loss_of_a_row_are_rejected(tmp_path):
    bench = language(tmp_path, LLAMA)
    check_task(bench.config)
    data = bench.config.data.model_copy(update={"task": "preference"})
    model = bench.config.model.model_copy(update={"base": str(tmp_path)})
    with pytest.raises(ConfigError, match=re.escape("no loss of a row alone")):
        check_task(bench.config.model_copy(update={"data": data, "model": model}))
