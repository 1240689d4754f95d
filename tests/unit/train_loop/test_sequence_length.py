"""Progressive sequence length: the lengths, the cuts, and the loss of what was cut."""

from __future__ import annotations

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
from steadytrain.components.techniques.curriculum import CurriculumConfig
from steadytrain.components.techniques.curriculum.order import LENGTHS, SequenceLength
from steadytrain.components.train.loop.batches import take_share
from steadytrain.components.train.loop.setup import set_up

from support.scoring import fresh
from support.training import GPT2, LLAMA, VOCABULARY, Bench, packed_row, write_data

FULL, BATCH, STEPS = 64, 4, 10


def cutter(pacing="linear", start=0.25, full=FULL, steps=STEPS):
    config = CurriculumConfig(by="sequence_length", pacing=pacing, start=start)
    return SequenceLength(config, full, batch=BATCH, steps=steps)


def row_of(lengths, seed=0):
    return packed_row(lengths, np.random.default_rng(seed))


def test_length_grows_by_sixteenths_to_the_full_one():
    assert [cutter().at(number) for number in range(11)] == [
        *(16, 24, 28, 32, 36, 40, 48, 52, 56, 60),
        64,
    ]
    assert [cutter("step").at(number) for number in (0, 9, 10, 99)] == [16, 16, 64, 64]
    assert cutter(full=10, start=0.01).at(0) == 2


@given(
    full=st.integers(2, 5000),
    start=st.floats(0.001, 0.999),
    pacing=st.sampled_from(["linear", "root", "step"]),
    steps=st.integers(1, 300),
)
def test_lengths_never_fall_and_are_few(full, start, pacing, steps):
    found = [cutter(pacing, start, full, steps).at(number) for number in range(steps + 2)]
    assert found == sorted(found)
    assert len(set(found)) <= LENGTHS
    assert found[0] >= min(start * full, full)
    assert found[-1] == max(2, full)


@given(lengths=st.lists(st.integers(1, FULL), min_size=1, max_size=5), place=st.integers(0, 60))
def test_cut_keeps_every_token_and_no_document_is_too_long(lengths, place):
    row = row_of(lengths)
    found = cutter().cut(row, place)
    longest = cutter().at(place // BATCH)
    assert max(found["lengths"]) <= longest
    assert {**found, "lengths": 0} == {**row, "lengths": 0}
    # A boundary of documents stays one, and there is no cut that is not needed.
    ends, kept = (set(np.cumsum(each).tolist()) for each in (found["lengths"], lengths))
    assert kept <= ends
    assert len(found["lengths"]) == sum(-(-length // longest) for length in lengths)
    assert place < STEPS * BATCH or found["lengths"] == lengths


def parts_of(folder, fields, **training):
    rows = [row_of([40, 8], seed) for seed in range(12)] + [row_of([48], 99)]
    data = write_data(folder / "data", rows, rows[:2])
    recipe = {"global_batch_size": BATCH, "max_steps": 20, **training}
    bench = Bench.make(folder, data, model={"config": fields}, training=recipe)
    fresh()
    return set_up(bench.config, data, BatchSettings(2))


CURRICULUM = {"by": "sequence_length", "pacing": "linear", "over": STEPS}
KINDS = {
    "document attention": LLAMA,
    "packed rows": {**LLAMA, "attn_implementation": "eager"},
    "documents apart": {**GPT2, "attn_implementation": "eager"},
}


@pytest.mark.parametrize("kind", KINDS)
def test_loss_is_that_of_the_parts_alone(tmp_path, kind):
    fields = {**KINDS[kind], "vocab_size": VOCABULARY}
    parts = parts_of(tmp_path, fields, curriculum=CURRICULUM)
    wanted = {**fields, "attn_implementation": "sdpa"}
    plain = AutoModelForCausalLM.from_config(AutoConfig.for_model(**wanted)).double().eval()
    plain.load_state_dict(parts.module.state_dict(), strict=False)
    parts.module.eval()
    for step in (0, 4, STEPS):
        longest = parts.sequences.at(step)
        assert longest == {0: 12, 4: 27, STEPS: 48}[step]
        own = take_share(parts, step)
        losses = [
            parts.task.compute_loss(parts.module, batch).total.item() for batch in own.batches
        ]
        total, count = 0.0, 0
        for index in parts.order.take(step * BATCH, BATCH):
            row = parts.train[index]
            start = 0
            for length in row["lengths"]:
                document = torch.tensor(row["input_ids"][start : start + length]).long()
                start += length
                for ids in document.split(longest):
                    logs = plain(ids[None]).logits[0, :-1].log_softmax(1)
                    total -= logs.gather(1, ids[1:, None]).sum().item()
                    count += len(ids) - 1
        assert own.weight == count
        assert sum(losses) == pytest.approx(total, rel=1e-5)
        assert own.tokens == BATCH * 48


def test_without_it_nothing_is_cut(tmp_path):
    assert parts_of(tmp_path, LLAMA).sequences is None


@pytest.mark.parametrize("preset", ["chat", "sequence-classification", "denoising", "masked-lm"])
def test_tasks_that_do_not_learn_from_parts_are_rejected(preset):
    with pytest.raises(ConfigError, match="does not learn from parts of its documents"):
        check_task(load(preset, ["training.curriculum.by=sequence_length"]))
    check_task(load("causal-lm", ["training.curriculum.by=sequence_length"]))
