"""Text embedding: pairs and halves, what a micro-batch compares, scores, and what is exported."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pytest
import torch
from transformers import AutoConfig, AutoModel

from steadytrain.components.evaluate.metric import Scores, point_values
from steadytrain.components.evaluate.metrics import MEAN_RECIPROCAL_RANK, RECALL_AT_1
from steadytrain.components.memory.shape import shape_of
from steadytrain.components.preprocess.model import train_tokenizer
from steadytrain.components.shared.config import DataConfig, from_mapping
from steadytrain.components.shared.errors import BadInput, ConfigError
from steadytrain.components.sizing.fit import at
from steadytrain.components.sizing.hardware import known_gpu
from steadytrain.components.sizing.machine import Machine, Workload
from steadytrain.components.sizing.strategy import options
from steadytrain.components.tasks.checks import check_task
from steadytrain.components.tasks.encoding.base import Fitted
from steadytrain.components.tasks.encoding.fields import Defect
from steadytrain.components.tasks.encoding.text_pairs import TextPairEncoder, halves
from steadytrain.components.tasks.encoding.tokens import load_tokenizer
from steadytrain.components.tasks.scoring.retrieval import RetrievalScorer
from steadytrain.components.tasks.text_embedding import TextEmbedding, TextEmbeddingPackager

from support.declared import assert_declared
from support.training import LLAMA, write_data, write_shard
from support.weight_digests import BERT

TEXTS = ["import json and a class", "def add(first, second): return first + second", "a b c " * 9]
ENCODER = TextPairEncoder(DataConfig(source=["unused"], task="text_embedding"))


def configure(model=BERT, **training):
    return from_mapping(
        {
            "name": "tiny",
            "data": {"source": ["unused"], "task": "text_embedding", "sequence_length": 32},
            "model": {"config": model},
            "training": {
                "global_batch_size": 8,
                "batch_contrastive": {"rows": 4, "temperature": 0.05},
                **training,
            },
        }
    )


def contents(*texts):
    """Return records of one text (a string) or two (a tuple)."""
    rows = [
        {"text": item}
        if isinstance(item, str)
        else dict(zip(("prompt", "completion"), item, strict=True))
        for item in texts
    ]
    return [ENCODER.read(row) for row in rows]


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokens")
    train_tokenizer(TEXTS * 5, ENCODER.tokenizer, vocab_size=320).save_pretrained(folder)
    return folder


@pytest.fixture
def encode(tokens):
    rows = ENCODER.row_encoder(Fitted(tokens, (), frozenset(), tokens))
    return lambda *texts: [record.rows[0].values for record in rows.encode(contents(*texts))]


@pytest.fixture
def data(tmp_path, tokens, encode):
    rows = [{key: item.tolist() for key, item in row.items()} for row in encode(TEXTS[0])]
    found = write_data(tmp_path, [], rows, task="text_embedding", schema=ENCODER.schema)
    load_tokenizer(tokens).save_pretrained(tmp_path / "tokenizer")
    return found.model_copy(update={"sequence_length": 32})


@pytest.fixture
def task(data):
    return TextEmbedding(configure(), data)


def test_a_record_is_a_pair_if_it_has_a_prompt_or_a_completion():
    assert json.loads(contents(("a", "b"))[0].text) == ["a", "b"]
    assert json.loads(contents("a")[0].text) == ["a"]
    with pytest.raises(Defect, match="completion is absent"):
        ENCODER.read({"prompt": "a", "text": "b"})


def test_a_row_holds_both_texts_with_the_ends_of_each(tokens):
    rows = TextPairEncoder(DataConfig(source=["x"], task="text_embedding", sequence_length=12))
    encode = rows.row_encoder(Fitted(tokens, (), frozenset(), tokens)).encode
    tokenizer = load_tokenizer(tokens)
    (found,) = encode(contents((TEXTS[0], TEXTS[2])))
    values = found.rows[0].values
    first, second = np.split(values["input_ids"], values["lengths"][:1])
    assert tokenizer.decode(first[1:-1]) == TEXTS[0]
    assert second.tolist() == tokenizer(TEXTS[2], truncation=True, max_length=12)["input_ids"]
    assert found.truncated
    assert found.tokens == sum(len(tokenizer(text)["input_ids"]) for text in (TEXTS[0], TEXTS[2]))
    (single,) = encode(contents(TEXTS[0]))
    assert single.rows[0].tokens == 2 * len(first)
    assert not single.truncated


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ([0, 5, 6, 7, 1], ([0, 5, 6, 1], [0, 7, 1])),
        ([0, 5, 1], ([0, 5, 1], [0, 1])),
        ([5, 6, 7, 8], ([5, 6], [7, 8])),
        ([0, 1], ([0, 1], [0, 1])),
    ],
)
def test_halves_keep_the_ends_of_a_text(ids, expected):
    found = halves(ids, (0, 1))
    assert tuple(half.tolist() for half in found) == expected


def test_a_single_text_is_its_own_counterpart_and_in_validation_its_half(task, encode):
    (row,) = encode(TEXTS[1])
    ids = row["input_ids"].tolist()
    trained = task.draw(row, 3, training=True)
    assert trained["input_ids"].tolist() == [*ids, *ids]
    validated = task.draw(row, 3, training=False)
    first, second = np.split(validated["input_ids"], validated["lengths"][:1])
    assert [*first[1:-1], *second[1:-1]] == ids[1:-1]
    (pair,) = encode((TEXTS[0], TEXTS[1]))
    assert task.draw(pair, 3, training=True) is pair


def test_padding_and_neighbors_do_not_change_an_embedding(task, encode):
    """Rows of unequal lengths have the similarities that they have alone."""
    torch.manual_seed(0)
    model = task.build_model().eval()
    rows = encode(("import", "json"), ("class", "return"), ("first", TEXTS[2]))
    sums = task.validate(model, task.collate(rows))
    states = [
        model(input_ids=torch.tensor(text[None])).last_hidden_state.mean(1)
        for row in rows
        for text in map(np.int64, np.split(row["input_ids"], row["lengths"][:1]))
    ]
    texts, own = torch.cat(states[0::2]), torch.cat(states[1::2])
    scores = torch.cosine_similarity(texts[:, None], own[None], dim=2).double() / 0.05
    expected = torch.nn.functional.cross_entropy(scores, torch.arange(3), reduction="sum")
    assert sums["loss"] == pytest.approx(expected.item(), rel=1e-4)
    assert (
        task.validation_metrics(sums)["recall_at_1"]
        == (scores.argmax(1) == torch.arange(3)).float().mean().item()
    )


@pytest.mark.parametrize("fields", [BERT, LLAMA], ids=["encoder", "decoder"])
def test_every_weight_learns_in_half_precision(data, encode, fields):
    task = TextEmbedding(configure(fields), data)
    model = task.build_model()
    with torch.autocast("cpu", torch.bfloat16):
        loss = task.compute_loss(
            model, task.collate(encode((TEXTS[0], "b"), ("c", TEXTS[1])))
        ).total
    loss.backward()
    assert loss.dtype == torch.float32
    assert all(item.grad.isfinite().all() for item in model.parameters())


def test_single_texts_need_dropout(data, encode, tmp_path):
    still = {**BERT, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    task = TextEmbedding(configure(still), data)
    model = task.build_model()
    for texts in ((TEXTS[0], TEXTS[1]), TEXTS[0]):
        rows = [{key: item.tolist() for key, item in row.items()} for row in encode(texts)]
        write_shard(tmp_path / "train-0.arrow", rows, ENCODER.schema)
        if texts == TEXTS[0]:
            with pytest.raises(BadInput, match=r"data\.columns\.text = 'text': .* has none"):
                task.ready(model)
        else:
            task.ready(model)


def test_an_exported_model_loads_in_transformers_and_sentence_transformers(task, encode, tmp_path):
    library = pytest.importorskip("sentence_transformers")
    torch.manual_seed(0)
    model = task.build_model().eval()
    packager = TextEmbeddingPackager(task.config, task.data)
    packager.export(model, tmp_path / "model")
    batch = task.collate(encode(("import", TEXTS[1])))
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    expected = model(**inputs).last_hidden_state
    found = AutoModel.from_pretrained(tmp_path / "model").eval()(**inputs).last_hidden_state
    torch.testing.assert_close(found, expected)
    again = packager.load_exported(tmp_path / "model")["model"]
    assert again.state_dict().keys() == model.state_dict().keys()
    theirs = library.SentenceTransformer(str(tmp_path / "model"), device="cpu").encode("import")
    np.testing.assert_allclose(
        theirs, expected[0, : inputs["attention_mask"][0].sum()].mean(0).detach(), atol=1e-5
    )


@pytest.fixture
def judged(task, tmp_path):
    """Return scorer, components and records of the test side."""
    pairs = [(f"import {word}", f"{word} = first") for word in "abcdef"] + [TEXTS[1], TEXTS[2]]
    content = pa.table({"content": pa.array([item.text for item in contents(*pairs)])})
    ids = pa.array([str(index) for index in range(len(pairs))])
    records = pa.table({"id": ids, **ENCODER.test_columns(content)})
    write_shard(tmp_path / "test.arrow", records.to_pylist(), records.schema)
    torch.manual_seed(0)
    components = {"model": task.build_model(), "tokenizer": task.tokenizer}
    data = task.data.model_copy(update={"test_records": "test.arrow"})
    return RetrievalScorer(task.config, data), components, records


def test_scores_depend_on_the_record_alone(judged):
    scorer, components, records = judged
    whole = scorer.score(components, records)
    part = scorer.score(components, records.take([6, 2]))
    for name in ("loss", "reciprocal_rank"):
        values = whole[name].to_pylist()
        assert part[name].to_pylist() == pytest.approx([values[6], values[2]], rel=1e-4)


def test_metrics_are_those_of_the_ranks(judged):
    scorer, components, records = judged
    table = scorer.score(components, records)
    assert_declared("text_embedding", table)
    scores, reciprocal = Scores.of(table), table["reciprocal_rank"].to_numpy()
    assert RECALL_AT_1.value(scores) == (reciprocal == 1).mean()
    assert MEAN_RECIPROCAL_RANK.value(scores) == reciprocal.mean()
    found = point_values(Scores.of(scorer.score_baseline(records)))
    assert found["recall_at_1"] == pytest.approx(1 / 8)
    assert found["loss"] == pytest.approx(np.log(8))
    assert found["mean_reciprocal_rank"] == pytest.approx(np.mean([1 / n for n in range(1, 9)]))


def test_the_baseline_is_the_model_before_training(judged, tmp_path, task):
    scorer, components, records = judged
    torch.manual_seed(1)
    base = AutoModel.from_config(AutoConfig.for_model(**BERT, vocab_size=len(task.tokenizer)))
    base.save_pretrained(tmp_path / "base")
    scorer.config = scorer.config.model_copy(
        update={"model": scorer.config.model.model_copy(update={"base": str(tmp_path / "base")})}
    )
    table = scorer.score({**components, "model": base}, records)
    expected = table["loss"].to_numpy().mean()
    assert scorer.score_baseline(records)["loss"].to_numpy().mean() == pytest.approx(
        expected, rel=1e-5
    )


@pytest.mark.parametrize(
    ("training", "error"),
    [
        ({"batch_contrastive": {}}, r"rows = None: all that data\.task text_embedding learns"),
        ({"batch_contrastive": {"rows": 4, "weight": 1.0}}, r"weight = 1\.0: .* no other part"),
        ({"curriculum": {"by": "length"}}, r"curriculum\.by = length: .* a random sample"),
    ],
)
def test_settings_that_it_cannot_use_are_errors(training, error):
    check_task(configure())
    with pytest.raises(ConfigError, match=error):
        check_task(configure(**training))


def test_the_plan_counts_two_sequences_and_no_head():
    config = configure()
    shape = shape_of({**BERT, "vocab_size": 30_000}, labels=1)
    job = Workload(config, "tiny", shape, Machine(known_gpu("T4")))
    found = at(job, options(job)[0], 4)
    assert (found.batch.micro_batch_size, found.setting.micro_batch) == (4, 8)
    assert not found.setting.returns_states
    assert found.memory.logits == 0
