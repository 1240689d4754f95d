"""Shorter sequences, the last answer to memory that ran out: the cuts, the loss, and the ranks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

from steadytrain.components.shared.batch import BatchSettings
from steadytrain.components.shared.config import load
from steadytrain.components.shared.errors import ConfigError
from steadytrain.components.tasks.checks import check_task
from steadytrain.components.train.loop.batches import take_share
from steadytrain.components.train.loop.setup import set_up
from steadytrain.components.train.loop.shortening import cut_places, shortened

from support.scoring import fresh
from support.training import LLAMA, VOCABULARY, Bench, packed_row, write_data

BATCH, LONGEST = 4, 20


def row_of(lengths, seed=0):
    row = packed_row(lengths, np.random.default_rng(seed))
    return {name: np.array(value) for name, value in row.items()}


@given(
    lengths=st.lists(st.integers(0, 64), min_size=1, max_size=6),
    longest=st.integers(2, 70),
    cuttable=st.booleans(),
)
def test_sequences_have_what_may_stay_and_no_more(lengths, longest, cuttable):
    row = row_of(lengths)
    found = list(shortened(row, longest, cuttable=cuttable))
    assert len(found) == len(cut_places(lengths, longest, cuttable=cuttable))
    assert all(sum(one["lengths"]) == len(one["input_ids"]) <= longest for one in found)
    ends = np.cumsum(lengths)
    kept = [
        part
        for end, length in zip(ends, lengths, strict=True)
        for part in range(end - length, end if cuttable else end - length + min(length, longest))
    ]
    for name in ("input_ids", "targets"):
        assert np.concatenate([one[name] for one in found]).tolist() == row[name][kept].tolist()
    wanted = [size for length in lengths for size in sizes(length, longest, cuttable) if size]
    assert [size for one in found for size in one["lengths"]] == wanted


def sizes(length, longest, cuttable):
    whole, rest = divmod(length, longest)
    return [*[longest] * whole, rest] if cuttable else [min(length, longest)]


def parts_of(folder, task="causal_lm", **batch):
    rows = [packed_row([40, 8], np.random.default_rng(seed)) for seed in range(12)]
    data = write_data(folder / "data", rows, rows[:2], task=task)
    fields = {**LLAMA, "vocab_size": VOCABULARY}
    bench = Bench.make(
        folder,
        data,
        model={"config": fields},
        training={"global_batch_size": BATCH, "max_steps": 20},
    )
    fresh()
    return set_up(bench.config, data, BatchSettings(2, **batch))


@pytest.mark.parametrize("task", ["causal_lm", "supervised_finetuning"])
def test_loss_is_that_of_the_short_documents_alone(tmp_path, task):
    parts = parts_of(tmp_path, task, sequence_length=LONGEST)
    plain = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**{**LLAMA, "vocab_size": VOCABULARY, "attn_implementation": "sdpa"})
    )
    plain = plain.double().eval()
    plain.load_state_dict(parts.module.state_dict(), strict=False)
    parts.module.eval()
    own = take_share(parts, 0)
    losses = [parts.task.compute_loss(parts.module, batch).total.item() for batch in own.batches]
    total, count = 0.0, 0
    for index in parts.order.take(0, BATCH):
        ids = torch.tensor(np.array(parts.train[index]["input_ids"])).long()
        first, second = ids.split([40, 8])
        short = [*first.split(LONGEST), second] if task == "causal_lm" else [first[:20], second]
        for document in short:
            logs = plain(document[None]).logits[0, :-1].log_softmax(1)
            total -= logs.gather(1, document[1:, None]).sum().item()
            count += len(document) - 1
    assert own.weight == count
    assert sum(losses) == pytest.approx(total, rel=1e-5)
    cut = {"causal_lm": "each part is learned", "supervised_finetuning": "240 of 576 tokens are"}
    (told,) = [line for line in parts.remarks if "recovery.min_sequence_length" in line]
    assert "at most 20 tokens instead of 48" in told
    assert f"12 of 24 documents are cut, and {cut[task]}" in told


def test_ranks_take_the_same_number_of_passes(tmp_path):
    """With sharded weights, a pass of one rank would wait for the others forever."""

    class Ranks:
        def __init__(self, parts, rank):
            self.parts, self.rank, self.world_size = parts, rank, 2

        def __getattr__(self, name):
            return getattr(self.parts, name)

    rows = [packed_row([size] * (48 // size), np.random.default_rng(size)) for size in (16, 9, 2)]
    parts = parts_of(tmp_path)
    parts.batch = replace(parts.batch, micro_batch_size=1, sequence_length=16)
    parts.train = [{name: np.array(it) for name, it in row.items()} for row in rows]
    parts.order = type("Fixed", (), {"take": lambda *_: [0, 1, 2, 2]})()
    shares = [take_share(Ranks(parts, rank), 0) for rank in (0, 1)]
    alone = take_share(parts, 0)
    own = [sum(map(bool, map(parts.task.weight, one.batches))) for one in shares]
    assert own == [8, 6], "what is learned from"
    assert [len(one.batches) for one in shares] == [8, 8]
    assert sum(one.weight for one in shares) == alone.weight > 0


@pytest.mark.parametrize(
    ("preset", "least", "why"),
    [
        ("causal-lm", 1024, "so no sequence could get shorter"),
        ("sequence-classification", 64, "has no packed sequences to shorten"),
    ],
)
def test_what_cannot_be_shortened_is_refused(preset, least, why):
    with pytest.raises(ConfigError, match=why):
        check_task(load(preset, [f"recovery.min_sequence_length={least}"]))
    check_task(load("causal-lm", ["recovery.min_sequence_length=64"]))
