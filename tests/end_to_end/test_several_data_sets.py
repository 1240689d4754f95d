"""Several data sets in full runs: killed and resumed, on two ranks, in smaller micro-batches."""

from __future__ import annotations

import pytest
from safetensors.torch import load_file

from steadytrain.components.preprocess.step import run as prepare
from steadytrain.components.report.facts import gather
from steadytrain.components.report.report_page import content
from steadytrain.components.shared.config import from_mapping
from steadytrain.components.shared.events.types import Validated, Warned
from steadytrain.components.shared.quantities import percent

from support import selected
from support.data import texts, write_jsonl
from support.task_data import STILL, data_of
from support.training import LLAMA, events_of, losses_of, weights_digest
from support.whole_runs import RECIPE, run

WEIGHTS = {"mood": 1.0, "topic": 3.0}
MIXED = {
    "fixed": {"sampling": "weights", "sampling_weights": WEIGHTS, "loss_weights": WEIGHTS},
    "uncertainty": {"sampling": "temperature", "loss_weighting": "uncertainty"},
}


@pytest.fixture(scope="module")
def mixed(request, tmp_path_factory):
    """Return the data of two parts, the sections of runs by loss weighting, and the runs."""
    root = tmp_path_factory.mktemp("mixed")
    data = data_of("multi_task", root / "data")
    recipe = {**RECIPE, "global_batch_size": 8, "micro_batch_size": 4}
    sections = {
        kind: {"training": {**recipe, "multi_task": MIXED[kind]}, "model": {"config": STILL}}
        for kind in MIXED
    }
    # Only the loss weights of one of them are learned, which a test looks at.
    kinds = {"uncertainty"} | selected.selected(request, "kind")
    return data, sections, {kind: run(root / kind, data, sections[kind]) for kind in sorted(kinds)}


def test_loss_weights_are_learned_and_not_exported(mixed):
    _, _, whole = mixed
    first, *_, last = [event.metrics for event in events_of(whole["uncertainty"], Validated)]
    for part in WEIGHTS:
        assert first[f"{part}_loss_weight"] != last[f"{part}_loss_weight"]
    model = whole["uncertainty"].model / "model.safetensors"
    assert not any("uncertainty" in name for name in load_file(model))


@selected.each("shards", ["ddp", "fsdp", "zero2", "zero3"], few=["fsdp"])
@selected.each("kind", list(MIXED), few=["uncertainty"])
def test_two_ranks_learn_the_same_parts_and_resume_exactly(tmp_path, mixed, kind, shards):
    data, sections, whole = mixed
    on_two = {"ranks": 2, "strategy": shards}
    shared = run(tmp_path / "whole", data, sections[kind], **on_two)
    killed = run(tmp_path / "killed", data, sections[kind], **on_two, killed=True)
    assert weights_digest(killed) == weights_digest(shared)
    assert losses_of(shared) == pytest.approx(losses_of(whole[kind]), rel=1e-4)
    for ours, theirs in zip(
        events_of(shared, Validated), events_of(whole[kind], Validated), strict=True
    ):
        assert ours.metrics == pytest.approx(theirs.metrics, rel=1e-4)


@selected.each("kind", list(MIXED), few=["uncertainty"])
def test_smaller_micro_batches_learn_the_same_parts(tmp_path, mixed, kind):
    data, sections, whole = mixed
    halved = {**sections[kind], "training": {**sections[kind]["training"], "micro_batch_size": 2}}
    assert losses_of(run(tmp_path, data, halved)) == pytest.approx(losses_of(whole[kind]), rel=1e-5)


@pytest.fixture(scope="module")
def languages(tmp_path_factory):
    """Return prepared data of two texts, the sections of a run on their mixture, and that run."""
    root = tmp_path_factory.mktemp("languages")
    sizes = {"few": 60, "many": 300}
    parts = {
        name: {"source": [str(write_jsonl(root / f"{name}.jsonl", texts(count, 1000 * place)))]}
        for place, (name, count) in enumerate(sizes.items())
    }
    mixture = {"by": "weight", "weights": {"few": 2, "many": 1}}
    sections = {
        "model": {"config": LLAMA, "vocab_size": 400},
        "training": {**RECIPE, "global_batch_size": 8, "micro_batch_size": 4, "mixture": mixture},
    }
    read = {"parts": parts, "sequence_length": 64}
    whole = {"name": "tiny", "output": str(root / "output"), "data": read, **sections}
    data = prepare(from_mapping(whole))
    return data, sections, run(root / "whole", data, sections)


def test_mixture_of_texts_is_the_same_after_a_kill_and_on_two_ranks(tmp_path, languages):
    data, sections, whole = languages
    killed = run(tmp_path / "killed", data, sections, killed=True)
    assert weights_digest(killed) == weights_digest(whole)
    shared = run(tmp_path / "shared", data, sections, ranks=2, killed=True)
    assert losses_of(shared) == pytest.approx(losses_of(whole), rel=1e-4)


def test_report_has_the_planned_and_realized_share_of_each_text(languages):
    data, _, whole = languages
    data.save(whole.record("preprocess"))
    (repeats,) = {each.message for each in events_of(whole, Warned) if "used up" in each.message}
    assert "the part 'few'" in repeats
    page = content(gather(whole))["data"]
    cells = {
        name: dict(zip(page["mixture_columns"], row, strict=True)) for name, row in page["mixture"]
    }
    assert cells["few"]["Planned share"] == percent(2 / 3)
    rows = {name: int(row["Rows learned"]) for name, row in cells.items()}
    assert sum(rows.values()) == RECIPE["max_steps"] * 8
    means = {one.name: one.tokens / one.rows for one in data.sides["train"].sources}
    tokens = {name: rows[name] * means[name] for name in rows}
    assert cells["few"]["Realized share"] == percent(tokens["few"] / sum(tokens.values()))
    assert tokens["few"] / sum(tokens.values()) == pytest.approx(2 / 3, abs=0.01)
