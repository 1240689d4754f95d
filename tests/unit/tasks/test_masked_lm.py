"""Masked language modeling: which tokens are masked, when they change, and the loss."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
import torch
from transformers import AutoConfig, AutoModelForMaskedLM, DataCollatorForLanguageModeling

from steadytrain.components.preprocess.model import train_tokenizer
from steadytrain.components.shared.batch import BatchSettings
from steadytrain.components.shared.config import DataConfig, from_mapping
from steadytrain.components.shared.errors import BadInput, ConfigError
from steadytrain.components.tasks.checks import check_task
from steadytrain.components.tasks.encoding.base import Content, Fitted
from steadytrain.components.tasks.encoding.plain_text import MaskedTextEncoder
from steadytrain.components.tasks.encoding.tokens import load_tokenizer
from steadytrain.components.tasks.fused_head import fuse_head
from steadytrain.components.tasks.masked_lm import MaskedLanguageModel, masked_loss
from steadytrain.components.tasks.scoring.language import MaskedScorer
from steadytrain.components.techniques.base import IGNORED
from steadytrain.components.techniques.masked_tokens.masking import Masking
from steadytrain.components.techniques.order import RowOrder
from steadytrain.components.train.loop.batches import take_share

from support.declared import assert_declared
from support.training import VOCABULARY, write_data, write_tokenizer
from support.weight_digests import BERT

MASKING = Masking(0.15, mask=4, special=(0, 1, 4), vocabulary=1000)
TEXTS = ["import json and a class", "def add(first, second): return first + second", "a " * 60]


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokens")
    train_tokenizer(TEXTS * 5, MaskedTextEncoder.tokenizer, vocab_size=320).save_pretrained(folder)
    return folder


def configure(**training):
    return from_mapping(
        {
            "name": "tiny",
            "data": {"source": ["unused"], "task": "masked_lm"},
            "model": {"config": BERT},
            "training": {"global_batch_size": 8, **training},
        }
    )


@pytest.fixture
def task(tmp_path, tokens):
    data = write_data(tmp_path, [], [], task="masked_lm", tokenizer=False)
    load_tokenizer(tokens).save_pretrained(tmp_path / "tokenizer")
    return MaskedLanguageModel(configure(), data.model_copy(update={"tokenizer": "tokenizer"}))


def test_the_shares_are_those_of_transformers(tokens):
    """So many tokens are drawn that each share is known to 1 %."""
    tokenizer = load_tokenizer(tokens)
    generator = np.random.default_rng(0)
    ids = generator.integers(5, len(tokenizer), size=400_000)
    hidden, targets = Masking.by(tokenizer, 0.15).apply(ids, 0)
    collator = DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.15, seed=1)
    theirs = collator([{"input_ids": torch.from_numpy(ids)}])

    def shares(given, wanted):
        chosen = wanted != IGNORED
        return [
            chosen.mean(),
            (given == tokenizer.mask_token_id)[chosen].mean(),
            (given == ids)[chosen].mean(),
        ]

    ours = shares(hidden, targets)
    expected = shares(theirs["input_ids"][0].numpy(), theirs["labels"][0].numpy())
    assert ours == pytest.approx(expected, abs=0.01)
    assert ours == pytest.approx([0.15, 0.8, 0.1], abs=0.01)
    np.testing.assert_array_equal(hidden[targets == IGNORED], ids[targets == IGNORED])
    np.testing.assert_array_equal(targets[targets != IGNORED], ids[targets != IGNORED])


def test_special_tokens_are_never_chosen():
    ids = np.tile([0, 1, 4, 9], 1000)
    hidden, targets = MASKING.apply(ids, 0)
    special = np.isin(ids, MASKING.special)
    assert (targets[special] == IGNORED).all()
    np.testing.assert_array_equal(hidden[special], ids[special])
    assert (targets[~special] != IGNORED).any()


def shares_of(task, world, micro, step=0):
    """Return what the ranks of a world learn from in a step, one row after the other."""
    generator = np.random.default_rng(0)
    rows = [{"input_ids": generator.integers(5, 60, size=20)} for _ in range(11)]
    found = []
    for rank in range(world):
        parts = SimpleNamespace(
            config=task.config,
            skipped_batches=(),
            order=RowOrder(len(rows), seed=42),
            rank=rank,
            world_size=world,
            train=rows,
            task=task,
            batch=BatchSettings(micro),
            sequences=None,
        )
        for batch in take_share(parts, step).batches:
            found += zip(batch["input_ids"].tolist(), batch["targets"].tolist(), strict=True)
    return found


def test_masks_do_not_depend_on_ranks_and_micro_batches(task):
    whole = shares_of(task, 1, 8)
    assert shares_of(task, 2, 2) == whole
    assert shares_of(task, 4, 1) == whole
    assert shares_of(task, 1, 8) == whole
    assert any(target != IGNORED for _, targets in whole for target in targets)


def test_each_epoch_and_each_seed_mask_other_tokens(task):
    row = {"input_ids": np.arange(5, 60)}
    drawn = [task.draw(row, place, training=True)["targets"].tolist() for place in (3, 14)]
    task.config = configure(seed=7)
    drawn.append(task.draw(row, 3, training=True)["targets"].tolist())
    assert len(set(map(tuple, drawn))) == 3


def test_validation_masks_are_the_same_for_every_seed(task):
    row = {"input_ids": np.arange(5, 60)}
    first = task.draw(row, 3, training=False)
    task.config = configure(seed=7)
    np.testing.assert_array_equal(
        first["input_ids"], task.draw(row, 3, training=False)["input_ids"]
    )
    other = task.draw(row, 4, training=False)
    assert (first["targets"] != other["targets"]).any()


@pytest.mark.parametrize("fused", [True, False])
def test_loss_is_that_of_transformers(task, fused):
    torch.manual_seed(0)
    config = AutoConfig.for_model(**BERT, vocab_size=len(task.tokenizer))
    model = AutoModelForMaskedLM.from_config(config).eval()
    rows = [{"input_ids": np.arange(5, 5 + length)} for length in (40, 23)]
    batch = task.collate([task.draw(row, place, training=True) for place, row in enumerate(rows)])
    expected = model(
        input_ids=batch["input_ids"],
        attention_mask=batch["attention_mask"],
        labels=batch["targets"],
    ).loss
    if fused:
        assert fuse_head(model) == ""
    found = masked_loss(model, batch)
    assert found.item() / task.weight(batch) == pytest.approx(expected.item(), rel=1e-5)
    parts = [task.collate([task.draw(row, place, training=True)]) for place, row in enumerate(rows)]
    halves = sum(masked_loss(model, part).item() for part in parts)
    assert halves == pytest.approx(found.item(), rel=1e-5)


def encoder(**data):
    return MaskedTextEncoder(DataConfig(source=["unused"], task="masked_lm", **data))


def test_every_window_has_the_ends_of_a_text(tokens):
    rows = encoder(sequence_length=16).row_encoder(Fitted(tokens, (), frozenset(), tokens))
    (found,) = rows.encode([Content(TEXTS[2])])
    tokenizer = load_tokenizer(tokens)
    pieces = [row.values["input_ids"].tolist() for row in found.rows]
    assert len(pieces) > 2
    assert {(piece[0], piece[-1]) for piece in pieces} == {(tokenizer.eos_token_id,) * 2}
    inner = [token for piece in pieces for token in piece[1:-1]]
    assert tokenizer.decode(inner) == TEXTS[2]
    assert found.tokens == len(inner) + 2


def test_a_tokenizer_without_a_mask_token_is_an_error(tmp_path):
    write_tokenizer(tmp_path, VOCABULARY)
    with pytest.raises(BadInput, match="no mask token"):
        encoder().row_encoder(Fitted(tmp_path, (), frozenset(), tmp_path))


def test_other_tasks_do_not_read_the_probability():
    content = {
        "name": "tiny",
        "data": {"source": ["unused"]},
        "model": {"config": BERT},
        "training": {"masking": {"probability": 0.3}},
    }
    with pytest.raises(ConfigError, match=r"training\.masking.*does not include it"):
        check_task(from_mapping(content))
    with pytest.raises(ConfigError, match=r"training\.masking\.probability"):
        from_mapping({**content, "training": {"masking": {"probability": 1}}})


def test_scores_depend_on_the_record_alone(task):
    torch.manual_seed(0)
    config = AutoConfig.for_model(**BERT, vocab_size=len(task.tokenizer))
    model = AutoModelForMaskedLM.from_config(config)
    records = pa.table({"id": ["a", "b", "c"], "text": TEXTS})
    components = {"model": model, "tokenizer": task.tokenizer}
    found = MaskedScorer(task.config, task.data).score(components, records)
    assert_declared("masked_lm", found)
    one = task.config.model_copy(
        update={"evaluation": task.config.evaluation.model_copy(update={"batch_size": 1})}
    )
    turned = MaskedScorer(one, task.data).score(components, records.take([2, 0]))
    losses, others = found["loss"].to_pylist(), turned["loss"].to_pylist()
    assert others == pytest.approx([losses[2], losses[0]], rel=1e-5)
    targets = found["targets"].to_pylist()
    assert targets[2] > 1
    assert losses[2] / targets[2] == pytest.approx(np.log(len(task.tokenizer)), abs=0.7)
