"""Objectives in full runs on two ranks. test_combinations.py kills runs with each of them."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from steadytrain.components.shared.events.types import Validated

from support import selected
from support.strategies import RECIPE, Case, on_two_ranks
from support.strategies import train as train_alone
from support.task_data import STILL, data_of, write_reference
from support.training import class_rows, events_of, losses_of, weights_digest, write_data
from support.weight_digests import BERT
from support.whole_runs import RECIPE as SMALL
from support.whole_runs import run


@pytest.fixture(scope="module")
def objectives(tmp_path_factory):
    """Return the fields of `training`, by objective."""
    teacher = write_reference("causal_lm", tmp_path_factory.mktemp("teacher"), hidden_size=48)
    hidden = {"weight": 0.5, "loss": "mse", "layers": "all"}
    return {
        "distillation": {"distillation": {"teacher": teacher, "weight": 0.7}},
        "stored": {"distillation": {"teacher": teacher, "weight": 0.7, "top_k": 8}},
        # The teacher is wider, so a projection is trained too.
        "hidden": {"distillation": {"teacher": teacher, "hidden": hidden}},
        "contrastive": {"contrastive": {"weight": 0.5}},
        "sequence length": {
            "curriculum": {"by": "sequence_length", "start": 0.1, "over": 0.8, "pacing": "linear"}
        },
        "difficulty": {"curriculum": {"by": "loss", "model": teacher, "over": 0.8}},
    }


@selected.each("shards", ["ddp", "fsdp", "zero3"], few=["ddp"])
def test_two_ranks_learn_from_the_same_answers(tmp_path, data, objectives, shards):
    sections = {"training": {**SMALL, **objectives["stored"]}}
    one = run(tmp_path / "one", data, sections)
    two = run(tmp_path / "two", data, sections, ranks=2, strategy=shards)
    assert losses_of(two) == pytest.approx(losses_of(one), rel=1e-4)


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Return the data of a classifier."""
    return data_of("sequence_classification", tmp_path_factory.mktemp("texts"))


@pytest.fixture(scope="module")
def classified(texts, tmp_path_factory):
    """Return the sections of a run that has both objectives of classifiers, and the run."""
    root = tmp_path_factory.mktemp("classified")
    teacher = write_reference("sequence_classification", root / "teacher", **STILL)
    objectives = {
        "distillation": {"teacher": teacher, "hidden": {"weight": 0.5}},
        "batch_contrastive": {"rows": 4},
    }
    recipe = {**SMALL, "global_batch_size": 8, "micro_batch_size": None, **objectives}
    sections = {"training": recipe, "model": {"config": STILL}}
    return sections, run(root / "whole", texts, sections)


@pytest.mark.long
@pytest.mark.parametrize("shards", ["ddp", "fsdp", "zero3"])
def test_two_ranks_compare_the_same_texts(tmp_path, texts, classified, shards):
    sections, whole = classified
    shared = run(tmp_path, texts, sections, ranks=2, strategy=shards)
    assert losses_of(shared) == pytest.approx(losses_of(whole), rel=1e-4)


@pytest.fixture(scope="module")
def preferred(tmp_path_factory):
    """Return pairs, the sections of their runs by adapter, and the runs on one rank."""
    root = tmp_path_factory.mktemp("preferred")
    data = data_of("preference", root / "data")
    base = write_reference("preference", root / "base", hidden_size=48)
    recipe = {**SMALL, "dpo": {"beta": 0.5}}
    sections = {
        kind: {
            "training": recipe,
            # Dropout differs between ranks.
            "model": {"base": base, "adapter": {"kind": kind, "rank": 4, "dropout": 0.0}},
        }
        for kind in ("none", "lora")
    }
    whole = {kind: run(root / kind, data, sections[kind]) for kind in sections}
    return data, sections, whole


@pytest.mark.long
def test_preferred_answers_are_learned(preferred):
    validated = events_of(preferred[-1]["none"], Validated)
    assert validated[-1].metrics["preference_accuracy"] > 0.8
    assert validated[-1].metrics["loss"] < np.log(2)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["none", "lora"])
@pytest.mark.parametrize("shards", ["ddp", "fsdp", "zero3"])
def test_two_ranks_prefer_the_same_answers(tmp_path, preferred, shards, kind):
    data, sections, whole = preferred
    shared = run(tmp_path, data, sections[kind], ranks=2, strategy=shards)
    assert losses_of(shared) == pytest.approx(losses_of(whole[kind]), rel=1e-4)


@pytest.fixture(scope="module", params=["none", "lora"])
def marked(request, tmp_path_factory):
    """Return good and bad answers, the sections of a run that learns from them, and the run."""
    root = tmp_path_factory.mktemp("marked")
    data = data_of("unpaired_preference", root / "data")
    base = write_reference("unpaired_preference", root / "base", hidden_size=48)
    adapter = {"kind": request.param, "rank": 4, "dropout": 0.0}
    recipe = {**SMALL, "kto": {"beta": 0.5}}
    sections = {"training": recipe, "model": {"base": base, "adapter": adapter}}
    return data, sections, run(root / "whole", data, sections)


@pytest.mark.long
def test_marked_answers_are_learned(marked):
    validated = events_of(marked[-1], Validated)
    assert validated[-1].metrics["preference_accuracy"] > 0.8
    assert validated[-1].metrics["loss"] < 0.5


@pytest.mark.long
@pytest.mark.parametrize("shards", ["ddp", "fsdp", "zero3"])
def test_two_ranks_share_one_reference_point(tmp_path, marked, shards):
    data, sections, whole = marked
    shared = run(tmp_path, data, sections, ranks=2, strategy=shards)
    assert losses_of(shared) == pytest.approx(losses_of(whole), rel=1e-4)


@pytest.mark.long
def test_smaller_micro_batches_have_the_same_reference_point(tmp_path, marked):
    data, sections, whole = marked
    halved = {**sections, "training": {**sections["training"], "micro_batch_size": 1}}
    assert losses_of(run(tmp_path, data, halved)) == pytest.approx(losses_of(whole), rel=1e-5)


@pytest.fixture(scope="module")
def masked(tmp_path_factory):
    """Return texts, the sections of a run that predicts their masked tokens, and the run."""
    root = tmp_path_factory.mktemp("masked")
    data = data_of("masked_lm", root / "data")
    sections = {"training": {**SMALL, "max_steps": 24}, "model": {"config": STILL}}
    return data, sections, run(root / "whole", data, sections)


@pytest.mark.long
@pytest.mark.parametrize("shards", ["ddp", "fsdp", "zero3"])
def test_two_ranks_mask_the_same_tokens(tmp_path, masked, shards):
    data, sections, whole = masked
    shared = run(tmp_path, data, sections, ranks=2, strategy=shards)
    assert losses_of(shared) == pytest.approx(losses_of(whole), rel=1e-4)


@pytest.fixture(scope="module")
def denoised(tmp_path_factory):
    """Return texts, the sections of a run that writes their hidden spans, and the run."""
    root = tmp_path_factory.mktemp("denoised")
    data = data_of("denoising", root / "data")
    sections = {"training": {**SMALL, "max_steps": 24}}
    return data, sections, run(root / "whole", data, sections)


@pytest.mark.long
@pytest.mark.parametrize("shards", ["ddp", "fsdp", "zero3"])
def test_two_ranks_hide_the_same_spans(tmp_path, denoised, shards):
    data, sections, whole = denoised
    shared = run(tmp_path, data, sections, ranks=2, strategy=shards)
    assert losses_of(shared) == pytest.approx(losses_of(whole), rel=1e-4)


@pytest.mark.long
def test_smaller_micro_batches_hide_the_same_spans(tmp_path, denoised):
    data, sections, whole = denoised
    halved = {"training": {**sections["training"], "micro_batch_size": 1}}
    assert losses_of(run(tmp_path, data, halved)) == pytest.approx(losses_of(whole), rel=1e-5)


@pytest.fixture(scope="module")
def paired(tmp_path_factory):
    """Return pairs of texts, the sections of a run that embeds them, and the run."""
    root = tmp_path_factory.mktemp("paired")
    data = data_of("text_embedding", root / "data")
    recipe = {**SMALL, "global_batch_size": 8, "micro_batch_size": None}
    recipe["batch_contrastive"] = {"rows": 4, "temperature": 0.05}
    sections = {"training": recipe, "model": {"config": STILL}}
    return data, sections, run(root / "whole", data, sections)


@pytest.mark.long
@pytest.mark.parametrize("shards", ["ddp", "fsdp", "zero3"])
def test_two_ranks_compare_and_validate_the_same_pairs(tmp_path, paired, shards):
    data, sections, whole = paired
    shared = run(tmp_path, data, sections, ranks=2, strategy=shards)
    assert losses_of(shared) == pytest.approx(losses_of(whole), rel=1e-4)
    for ours, theirs in zip(events_of(shared, Validated), events_of(whole, Validated), strict=True):
        assert ours.metrics == pytest.approx(theirs.metrics, rel=1e-4)


@pytest.mark.long
@pytest.mark.parametrize("task", ["masked", "denoised", "paired"])
def test_loss_of_held_out_texts_falls(request, task):
    *_, whole = request.getfixturevalue(task)
    first, *_, last = [event.metrics["loss"] for event in events_of(whole, Validated)]
    assert last < first


@pytest.mark.long
def test_killed_run_on_single_texts_ends_with_the_same_weights(tmp_path):
    """Both passes of a text differ by dropout alone, so its draws must be restored too."""
    rows = [
        {"input_ids": row["input_ids"], "lengths": [len(row["input_ids"])]}
        for row in class_rows(68, classes=8)
    ]
    schema = pa.schema({name: pa.list_(pa.int32()) for name in ("input_ids", "lengths")})
    data = write_data(tmp_path / "data", rows[:60], rows[60:], task="text_embedding", schema=schema)
    recipe = {**SMALL, "global_batch_size": 8, "micro_batch_size": None}
    recipe["batch_contrastive"] = {"rows": 4, "temperature": 0.05}
    sections = {"training": recipe, "model": {"config": BERT}}
    whole = run(tmp_path / "whole", data, sections)
    killed = run(tmp_path / "killed", data, sections, killed=True)
    assert weights_digest(killed) == weights_digest(whole)
    other = {**sections, "training": {**recipe, "seed": 7}}
    assert weights_digest(run(tmp_path / "other", data, other)) != weights_digest(whole)


STRATEGIES = ("ddp", "fsdp", "zero1", "zero3")


@pytest.fixture(scope="module")
def losses(request, objectives, tmp_path_factory):
    """Return the losses by objective and strategy: on one rank ("single") and on two."""
    folder = tmp_path_factory.mktemp("ranks")
    wanted = sorted(selected.selected(request, "strategy"))
    # Each rank has data of its own here, and stored answers lie beside data that ranks share:
    # see test_two_ranks_learn_from_the_same_answers.
    names = [name for name in objectives if name != "stored"]
    sections = {name: {"training": {**RECIPE, **objectives[name]}} for name in names}
    found = {(name, "single"): train_alone(folder / name, **sections[name]) for name in sections}
    cases = [
        Case(f"{name}-{strategy}", strategy, name, sections=sections[name])
        for name in sections
        for strategy in wanted
    ]
    on_ranks = on_two_ranks(folder, cases, "")
    for case in cases:
        found[case.single, case.strategy] = on_ranks[case.name]
    return found


@selected.each("strategy", STRATEGIES, few=["fsdp"])
def test_two_ranks_match_one_and_resume_exactly(losses, strategy):
    for name in {name for name, _ in losses}:
        single, own = losses[name, "single"], losses[name, strategy]
        for step, loss in own["whole"].items():
            assert loss == pytest.approx(single[int(step)], rel=1e-4), (name, step)
        for step, loss in own["resumed"].items():
            assert loss == own["whole"][step], (name, step)
        for step, loss in own["from_single"].items():
            assert loss == pytest.approx(single[int(step)], rel=1e-4), (name, step)


@pytest.mark.parametrize("name", ["sequence length", "difficulty"])
def test_smaller_micro_batches_learn_the_same_from_packed_rows(tmp_path, losses, objectives, name):
    sections = {"training": {**RECIPE, **objectives[name]}}
    halved = train_alone(tmp_path / "halved", **sections, micro_batch=1)
    whole = losses[name, "single"]
    assert halved == pytest.approx(whole, rel=1e-5)
    plain = train_alone(tmp_path / "plain", training=RECIPE)
    assert plain != pytest.approx(whole, rel=1e-3)
