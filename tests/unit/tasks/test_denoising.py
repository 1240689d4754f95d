"""Denoising: which spans are hidden, when they change, the loss, and the scores."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from steadytrain.components.evaluate.metric import Scores, point_values
from steadytrain.components.preprocess.model import train_tokenizer
from steadytrain.components.shared.config import DataConfig, from_mapping
from steadytrain.components.shared.errors import BadInput, ConfigError
from steadytrain.components.tasks.causal_lm import Denoising
from steadytrain.components.tasks.checks import check_task
from steadytrain.components.tasks.encoding.base import Content, Fitted
from steadytrain.components.tasks.encoding.plain_text import (
    SENTINELS,
    DenoisedTextEncoder,
    sentinels_of,
)
from steadytrain.components.tasks.encoding.tokens import load_tokenizer
from steadytrain.components.tasks.scoring.language import DenoisingScorer
from steadytrain.components.techniques.base import IGNORED
from steadytrain.components.techniques.hidden_spans.spans import SpanCorruption

from support.declared import assert_declared
from support.training import LLAMA, VOCABULARY, write_data, write_shard, write_tokenizer

LENGTH = 64
CORRUPTION = SpanCorruption(0.15, 3.0, ends=(0, 1), sentinels=tuple(range(100, 200)))
TEXTS = [
    "import json and a class",
    "def add(first, second): return first + second",
    "a b " * 80 + "c",
]


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokens")
    train_tokenizer(TEXTS * 5, DenoisedTextEncoder.tokenizer, vocab_size=400).save_pretrained(
        folder
    )
    return folder


def configure(**training):
    return from_mapping(
        {
            "name": "tiny",
            "data": {"source": ["unused"], "task": "denoising", "sequence_length": LENGTH},
            "model": {"config": LLAMA},
            "training": {"global_batch_size": 8, **training},
        }
    )


@pytest.fixture
def data(tmp_path, tokens):
    rows = [{"input_ids": list(range(110, 140))}]
    schema = DenoisedTextEncoder.schema
    data = write_data(tmp_path, [], [], task="denoising", schema=schema, sequence_length=LENGTH)
    load_tokenizer(tokens).save_pretrained(tmp_path / "tokenizer")
    write_shard(tmp_path / "train-0.arrow", rows, schema)
    return data


def restored(found, corruption):
    """Return the text that a corrupted one was made from, and the spans."""
    ids = found.input_ids[1:-1]
    border = ids.index(corruption.sentinels[0], ids.index(corruption.sentinels[0]) + 1)
    text, answer = ids[:border], ids[border:]
    starts = [place for place, token in enumerate(answer) if token in corruption.sentinels]
    spans = [answer[a + 1 : b] for a, b in zip(starts, [*starts[1:], None], strict=True)]
    assert [answer[start] for start in starts] == list(corruption.sentinels[: len(starts)])
    whole = []
    for token in text:
        if token in corruption.sentinels:
            whole += spans[corruption.sentinels.index(token)]
        else:
            whole.append(token)
    return whole, spans


@pytest.mark.parametrize("density", [0.15, 0.5, 0.9])
@pytest.mark.parametrize("length", [2, 3, 10, 57])
def test_the_spans_complete_the_text(length, density):
    corruption = SpanCorruption(density, 3.0, (0, 1), CORRUPTION.sentinels)
    ids = list(range(2, 2 + length))
    for seed in range(20):
        found = corruption.apply(ids, 500, seed)
        whole, spans = restored(found, corruption)
        assert whole == ids
        assert all(spans)
        hidden, count = corruption.counts(length)
        assert (sum(map(len, spans)), len(spans)) == (hidden, count)
        # The spans, the sentinels between them and the end; the first sentinel is given.
        assert sum(found.targets) == hidden + count
        assert found.targets == sorted(found.targets)


def test_the_shares_are_those_of_t5():
    """512 tokens give 77 hidden ones in 26 spans, as in random_spans_noise_mask of T5's code."""
    assert CORRUPTION.counts(512) == (77, 26)
    lengths = [
        len(span)
        for seed in range(400)
        for span in restored(CORRUPTION.apply(range(1000, 1512), 1000, seed), CORRUPTION)[1]
    ]
    assert np.mean(lengths) == pytest.approx(77 / 26)
    # A random composition of 77 into 26 parts has a part of 1 with probability 25 / 76.
    assert np.mean(np.array(lengths) == 1) == pytest.approx(25 / 76, abs=0.02)


@pytest.mark.parametrize("density", [0.1, 0.15, 0.5])
@pytest.mark.parametrize("span", [1.0, 3.0, 8.0])
@pytest.mark.parametrize("length", [8, 9, 64, 511])
def test_a_drawn_row_fills_the_sequence_and_no_more(length, span, density):
    corruption = SpanCorruption(density, span, (0, 1), CORRUPTION.sentinels)
    found = corruption.apply(range(1000, 1000 + length), length, 5)
    assert length - 3 < len(found.input_ids) <= length
    whole, _ = restored(found, corruption)
    assert whole == list(range(whole[0], whole[0] + len(whole)))
    starts = {
        restored(corruption.apply(range(1000, 1511), 511, n), corruption)[0][0] for n in range(30)
    }
    assert len(starts) > 3


def test_each_place_and_each_seed_hide_other_spans(data):
    row = {"input_ids": np.arange(110, 150)}
    first = Denoising(configure(), data)
    again = Denoising(configure(), data)
    other = Denoising(configure(seed=7), data)
    drawn = [
        task.draw(row, place, training=True)["input_ids"]
        for task, place in ((first, 3), (first, 14), (other, 3))
    ]
    assert len(set(map(tuple, drawn))) == 3
    assert again.draw(row, 3, training=True)["input_ids"] == drawn[0]
    validated = [task.draw(row, 3, training=False)["input_ids"] for task in (first, other)]
    assert validated[0] == validated[1]


def test_the_loss_is_on_the_spans_alone(data):
    torch.manual_seed(0)
    task = Denoising(configure(), data)
    model = task.build_model().eval()
    rows = [
        task.draw({"input_ids": np.arange(110, 110 + length)}, 0, training=True)
        for length in (30, 7)
    ]
    task.ready(model)
    batch = task.collate(rows)
    expected = 0.0
    for row in rows:
        ids = torch.tensor(row["input_ids"])
        chances = model(input_ids=ids[None], use_cache=False).logits[0].double().log_softmax(1)
        for place, target in enumerate(row["targets"]):
            expected -= chances[place - 1, ids[place]].item() if target else 0.0
    assert task.compute_loss(model, batch).total.item() == pytest.approx(expected, rel=1e-4)
    assert task.weight(batch) == sum(sum(row["targets"]) for row in rows)
    assert (batch["targets"] == IGNORED).any()


def test_windows_have_no_ends_and_lose_at_most_a_last_token(tokens):
    encoder = DenoisedTextEncoder(
        DataConfig(source=["unused"], task="denoising", sequence_length=16)
    )
    rows = encoder.row_encoder(Fitted(tokens, (), frozenset(), tokens))
    long, short = rows.encode([Content(TEXTS[2]), Content("a")])
    tokenizer = load_tokenizer(tokens)
    assert len(long.rows) > 2
    inner = [token for row in long.rows for token in row.values["input_ids"].tolist()]
    whole = tokenizer(TEXTS[2], add_special_tokens=False)["input_ids"]
    assert inner == whole[: len(inner)]
    assert len(whole) - len(inner) == long.skipped <= 1
    assert (len(short.rows), short.skipped) == (0, 1)


def test_a_tokenizer_without_sentinels_is_an_error(tmp_path, tokens):
    write_tokenizer(tmp_path, VOCABULARY)
    encoder = DenoisedTextEncoder(DataConfig(source=["unused"], task="denoising"))
    with pytest.raises(BadInput, match="no sentinel tokens"):
        encoder.row_encoder(Fitted(tmp_path, (), frozenset(), tmp_path))
    tokenizer = load_tokenizer(tokens)
    assert tokenizer.convert_ids_to_tokens(sentinels_of(tokenizer)) == list(SENTINELS)


def test_other_tasks_do_not_read_its_settings():
    check_task(configure(denoising={"noise_density": 0.3}))
    content = configure(denoising={"noise_density": 0.3}).model_dump(mode="json")
    content["data"]["task"] = "causal_lm"
    with pytest.raises(ConfigError, match=r"training\.denoising.*does not include it"):
        check_task(from_mapping(content))
    with pytest.raises(ConfigError, match=r"training\.denoising\.mean_noise_span_length"):
        configure(denoising={"mean_noise_span_length": 0.5})


def test_scores_depend_on_the_record_alone(data):
    torch.manual_seed(0)
    task = Denoising(configure(), data)
    config = AutoConfig.for_model(**LLAMA, vocab_size=len(task.tokenizer))
    model = AutoModelForCausalLM.from_config(config)
    records = pa.table({"id": ["a", "b", "c"], "text": TEXTS})
    components = {"model": model, "tokenizer": task.tokenizer}
    scorer = DenoisingScorer(task.config, task.data)
    found = scorer.score(components, records)
    assert_declared("denoising", found)
    turned = scorer.score(components, records.take([2, 0]))
    losses, targets = found["loss"].to_pylist(), found["targets"].to_pylist()
    assert turned["loss"].to_pylist() == pytest.approx([losses[2], losses[0]], rel=1e-5)
    assert losses[2] / targets[2] == pytest.approx(np.log(len(task.tokenizer)), abs=0.7)
    assert (
        0
        < point_values(Scores.of(scorer.score_baseline(records)))["loss"]
        < np.log(len(task.tokenizer)) + 1
    )
