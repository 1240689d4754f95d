"""Objectives and a curriculum in full runs: killed and resumed, and on two ranks."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from steadytrain.components.shared.events.types import CheckpointSaved, Validated, WorkProgress

from support import selected
from support.forked import ForkedLauncher, train
from support.strategies import RECIPE, Case, on_two_ranks
from support.strategies import train as train_alone
from support.training import (
    CLASSES,
    LLAMA,
    VOCABULARY,
    Bench,
    class_rows,
    events_of,
    losses_of,
    packed_row,
    weights_digest,
    write_data,
    write_parts,
    write_whole_texts,
)
from support.weight_digests import BERT
from support.weight_digests import RECIPE as SMALL


def write_teacher(folder):
    torch.manual_seed(1)
    fields = {**LLAMA, "hidden_size": 48, "vocab_size": VOCABULARY}
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def objectives(tmp_path_factory):
    """Return the fields of `training`, by objective."""
    teacher = str(write_teacher(tmp_path_factory.mktemp("teacher")))
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


class KillsOnce:
    """Kills rank 0 at the run's first checkpoint."""

    def __init__(self, launcher):
        self.launcher, self.done = launcher, False

    def emit(self, event):
        if isinstance(event, CheckpointSaved) and not self.done:
            self.done = True
            self.launcher.kill(0)

    def close(self):
        pass


def run(folder, data, sections, *, killed=False, ranks=1, strategy="auto"):
    """Train to the end under the supervisor; return the run's workspace.

    Args:
        killed: whether to kill the run once, or the sink that does it.
    """
    bench = Bench.make(
        folder,
        data,
        **sections,
        compute={
            "device": "cpu",
            "nproc_per_node": ranks,
            "threads_per_rank": 1,
            "strategy": strategy,
        },
        recovery={"backoff_seconds": 0},
    )
    launcher = ForkedLauncher(ranks)
    kills = KillsOnce if killed is True else killed
    outcome = train(bench, launcher=launcher, sinks=[kills(launcher)] if kills else [])
    assert (outcome.outcome, outcome.attempts) == ("finished", 1 + bool(kills)), outcome
    return bench.workspace


@selected.each("name", ["distillation", "stored", "hidden", "contrastive"], few=["hidden"])
def test_killed_run_ends_with_the_same_weights(tmp_path, data, objectives, name):
    sections = {"training": {**SMALL, **objectives[name]}}
    whole = run(tmp_path / "whole", data, sections)
    killed = run(tmp_path / "killed", data, sections, killed=True)
    assert weights_digest(killed) == weights_digest(whole)


@selected.each("shards", ["ddp", "fsdp", "zero3"], few=["ddp"])
def test_two_ranks_learn_from_the_same_answers(tmp_path, data, objectives, shards):
    sections = {"training": {**SMALL, **objectives["stored"]}}
    one = run(tmp_path / "one", data, sections)
    two = run(tmp_path / "two", data, sections, ranks=2, strategy=shards)
    assert losses_of(two) == pytest.approx(losses_of(one), rel=1e-4)


# Without dropout, which differs between ranks.
STILL = {**BERT, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
LABELS = ["a", "b", "c"]


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Return the data of a classifier."""
    return write_data(
        tmp_path_factory.mktemp("texts"),
        class_rows(60),
        class_rows(8, seed=1),
        task="sequence_classification",
        schema=CLASSES,
        labels=LABELS,
    )


@pytest.fixture(scope="module")
def classified(texts, tmp_path_factory):
    """Return the sections of a run that has both objectives of classifiers, and the run."""
    root = tmp_path_factory.mktemp("classified")
    torch.manual_seed(1)
    fields = {**STILL, "vocab_size": VOCABULARY, "id2label": dict(enumerate(LABELS))}
    teacher = AutoModelForSequenceClassification.from_config(AutoConfig.for_model(**fields))
    teacher.save_pretrained(root / "teacher")
    objectives = {
        "distillation": {"teacher": str(root / "teacher"), "hidden": {"weight": 0.5}},
        "batch_contrastive": {"rows": 4},
    }
    recipe = {**SMALL, "global_batch_size": 8, "micro_batch_size": None, **objectives}
    sections = {"training": recipe, "model": {"config": STILL}}
    return sections, run(root / "whole", texts, sections)


@pytest.mark.long
def test_killed_run_of_a_classifier_ends_with_the_same_weights(tmp_path, texts, classified):
    sections, whole = classified
    killed = run(tmp_path, texts, sections, killed=True)
    assert weights_digest(killed) == weights_digest(whole)


@pytest.mark.long
@pytest.mark.parametrize("shards", ["ddp", "fsdp", "zero3"])
def test_two_ranks_compare_the_same_texts(tmp_path, texts, classified, shards):
    sections, whole = classified
    shared = run(tmp_path, texts, sections, ranks=2, strategy=shards)
    assert losses_of(shared) == pytest.approx(losses_of(whole), rel=1e-4)


def pairs(count, seed=0):
    """Return pairs of answers that go on counting and that do not."""
    generator = np.random.default_rng(seed)
    rows = []
    for _ in range(count):
        row = packed_row([int(generator.integers(4, 12)), 9], generator)
        first = row["lengths"][0]
        row["targets"] = [0, 0] + [1] * (first - 2) + [0, 0] + [1] * 7
        row["input_ids"][first + 2 :] = row["input_ids"][-1 : first + 1 : -1]
        rows.append(row)
    return rows


@pytest.fixture(scope="module")
def preferred(tmp_path_factory):
    """Return pairs, the sections of their runs by adapter, and the runs on one rank."""
    root = tmp_path_factory.mktemp("preferred")
    data = write_data(root / "data", pairs(60), pairs(8, seed=1), task="preference")
    base = str(write_teacher(root / "base"))
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
def test_killed_run_with_a_reference_ends_with_the_same_weights(tmp_path, preferred):
    data, sections, whole = preferred
    killed = run(tmp_path, data, sections["none"], killed=True)
    assert weights_digest(killed) == weights_digest(whole["none"])
    validated = events_of(killed, Validated)
    assert validated[-1].metrics["preference_accuracy"] > 0.8
    assert validated[-1].metrics["loss"] < np.log(2)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["none", "lora"])
@pytest.mark.parametrize("shards", ["ddp", "fsdp", "zero3"])
def test_two_ranks_prefer_the_same_answers(tmp_path, preferred, shards, kind):
    data, sections, whole = preferred
    shared = run(tmp_path, data, sections[kind], ranks=2, strategy=shards)
    assert losses_of(shared) == pytest.approx(losses_of(whole[kind]), rel=1e-4)


@pytest.fixture(scope="module")
def masked(tmp_path_factory):
    """Return texts, the sections of a run that predicts their masked tokens, and the run."""
    root = tmp_path_factory.mktemp("masked")
    data = write_whole_texts(root / "data", "masked_lm")
    sections = {"training": {**SMALL, "max_steps": 24}, "model": {"config": STILL}}
    return data, sections, run(root / "whole", data, sections)


@pytest.mark.long
def test_killed_run_of_an_encoder_ends_with_the_same_weights(tmp_path, masked):
    data, sections, whole = masked
    killed = run(tmp_path, data, sections, killed=True)
    assert weights_digest(killed) == weights_digest(whole)
    first, *_, last = [event.metrics["loss"] for event in events_of(killed, Validated)]
    assert last < first


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
    data = write_whole_texts(root / "data", "denoising")
    sections = {"training": {**SMALL, "max_steps": 24}}
    return data, sections, run(root / "whole", data, sections)


@pytest.mark.long
def test_killed_run_of_a_denoiser_ends_with_the_same_weights(tmp_path, denoised):
    data, sections, whole = denoised
    killed = run(tmp_path, data, sections, killed=True)
    assert weights_digest(killed) == weights_digest(whole)
    first, *_, last = [event.metrics["loss"] for event in events_of(killed, Validated)]
    assert last < first


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
    texts = [row["input_ids"] for row in class_rows(68, classes=8)]
    rows = [
        {
            "input_ids": [*text, *(2 + 5 * token % (VOCABULARY - 2) for token in text)],
            "lengths": 2 * [len(text)],
        }
        for text in texts
    ]
    schema = pa.schema({name: pa.list_(pa.int32()) for name in ("input_ids", "lengths")})
    data = write_data(root / "data", rows[:60], rows[60:], task="text_embedding", schema=schema)
    recipe = {**SMALL, "global_batch_size": 8, "micro_batch_size": None}
    recipe["batch_contrastive"] = {"rows": 4, "temperature": 0.05}
    sections = {"training": recipe, "model": {"config": STILL}}
    return data, sections, run(root / "whole", data, sections)


@pytest.mark.long
def test_killed_run_of_an_embedder_ends_with_the_same_weights(tmp_path, paired):
    data, sections, whole = paired
    killed = run(tmp_path, data, sections, killed=True)
    assert weights_digest(killed) == weights_digest(whole)
    first, *_, last = [event.metrics["loss"] for event in events_of(killed, Validated)]
    assert last < first


@pytest.mark.long
@pytest.mark.parametrize("shards", ["ddp", "fsdp", "zero3"])
def test_two_ranks_compare_and_validate_the_same_pairs(tmp_path, paired, shards):
    data, sections, whole = paired
    shared = run(tmp_path, data, sections, ranks=2, strategy=shards)
    assert losses_of(shared) == pytest.approx(losses_of(whole), rel=1e-4)
    for ours, theirs in zip(events_of(shared, Validated), events_of(whole, Validated), strict=True):
        assert ours.metrics == pytest.approx(theirs.metrics, rel=1e-4)


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


@pytest.fixture(scope="module")
def easy_first(texts, tmp_path_factory):
    """Return the sections of a run with a curriculum, and the run."""
    recipe = {**SMALL, "global_batch_size": 8, "micro_batch_size": 4}
    recipe["curriculum"] = {"by": "length", "start": 0.2, "over": 0.7}
    sections = {"training": recipe, "model": {"config": STILL}}
    return sections, run(tmp_path_factory.mktemp("easy"), texts, sections)


def test_killed_run_with_a_curriculum_ends_with_the_same_weights(tmp_path, texts, easy_first):
    sections, whole = easy_first
    killed = run(tmp_path, texts, sections, killed=True)
    assert weights_digest(killed) == weights_digest(whole)
    plain = {"training": {**sections["training"], "curriculum": {}}, "model": sections["model"]}
    assert losses_of(run(tmp_path / "plain", texts, plain)) != losses_of(whole)


@pytest.mark.long
@pytest.mark.parametrize("shards", ["ddp", "fsdp", "zero3"])
def test_two_ranks_follow_the_same_curriculum(tmp_path, texts, easy_first, shards):
    sections, whole = easy_first
    shared = run(tmp_path, texts, sections, ranks=2, strategy=shards)
    assert losses_of(shared) == pytest.approx(losses_of(whole), rel=1e-4)


@pytest.mark.long
def test_smaller_micro_batches_follow_the_same_curriculum(tmp_path, texts, easy_first):
    sections, whole = easy_first
    halved = {**sections, "training": {**sections["training"], "micro_batch_size": 2}}
    assert losses_of(run(tmp_path, texts, halved)) == pytest.approx(losses_of(whole), rel=1e-5)


class KillsWhileScoring(KillsOnce):
    """Kills rank 0 when it begins to score the rows."""

    def emit(self, event):
        if isinstance(event, WorkProgress) and not self.done:
            self.done = True
            self.launcher.kill(0)


@pytest.fixture(scope="module")
def learned_first(texts, classified, tmp_path_factory):
    """Return the sections of a run with a curriculum by a model's loss, and the run."""
    teacher = classified[0]["training"]["distillation"]["teacher"]
    recipe = {**SMALL, "global_batch_size": 8, "micro_batch_size": 4}
    recipe["curriculum"] = {"by": "loss", "model": teacher, "start": 0.2, "over": 0.7}
    sections = {"training": recipe, "model": {"config": STILL}}
    return sections, run(tmp_path_factory.mktemp("learned"), texts, sections)


@pytest.mark.parametrize("sink", [KillsWhileScoring, KillsOnce])
def test_killed_run_scores_the_rows_once(tmp_path, texts, learned_first, sink):
    sections, whole = learned_first
    killed = run(tmp_path, texts, sections, killed=sink)
    assert weights_digest(killed) == weights_digest(whole)
    done = [event.done for event in events_of(killed, WorkProgress)]
    assert done == ([0, 60] if sink is KillsOnce else [0, 0, 60])


@selected.each("shards", ["ddp", "fsdp", "zero3"], few=["ddp"])
def test_two_ranks_score_the_rows_like_one(tmp_path, texts, learned_first, shards):
    sections, whole = learned_first
    shared = run(tmp_path, texts, sections, ranks=2, strategy=shards)
    (ours,), (theirs,) = (list(each.losses.iterdir()) for each in (shared, whole))
    assert (ours.name, ours.read_bytes()) == (theirs.name, theirs.read_bytes())
    assert losses_of(shared) == pytest.approx(losses_of(whole), rel=1e-4)


@pytest.mark.long
def test_smaller_micro_batches_follow_the_losses(tmp_path, texts, learned_first):
    sections, whole = learned_first
    halved = {**sections, "training": {**sections["training"], "micro_batch_size": 2}}
    assert losses_of(run(tmp_path, texts, halved)) == pytest.approx(losses_of(whole), rel=1e-5)


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


WEIGHTS = {"mood": 1.0, "topic": 3.0}
MIXED = {
    "fixed": {"sampling": "weights", "sampling_weights": WEIGHTS, "loss_weights": WEIGHTS},
    "uncertainty": {"sampling": "temperature", "loss_weighting": "uncertainty"},
}


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """Return the data of two parts, the sections of runs by loss weighting, and the runs."""
    root = tmp_path_factory.mktemp("mixed")
    data = write_parts(root / "data")
    recipe = {**SMALL, "global_batch_size": 8, "micro_batch_size": 4}
    sections = {
        kind: {"training": {**recipe, "multi_task": MIXED[kind]}, "model": {"config": STILL}}
        for kind in MIXED
    }
    return data, sections, {kind: run(root / kind, data, sections[kind]) for kind in MIXED}


@pytest.mark.parametrize("kind", MIXED)
def test_killed_mixture_ends_with_the_same_weights(tmp_path, mixed, kind):
    data, sections, whole = mixed
    killed = run(tmp_path, data, sections[kind], killed=True)
    assert weights_digest(killed) == weights_digest(whole[kind])
    assert events_of(killed, Validated)[-1].metrics == events_of(whole[kind], Validated)[-1].metrics


def test_loss_weights_are_learned_and_not_exported(mixed):
    _, _, whole = mixed
    first, *_, last = [event.metrics for event in events_of(whole["uncertainty"], Validated)]
    for part in WEIGHTS:
        assert first[f"{part}_loss_weight"] != last[f"{part}_loss_weight"]
    model = whole["uncertainty"].model / "model.safetensors"
    assert not any("uncertainty" in name for name in load_file(model))


@selected.each("shards", ["ddp", "fsdp", "zero2", "zero3"], few=["fsdp"])
@pytest.mark.parametrize("kind", MIXED)
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


@pytest.mark.parametrize("kind", MIXED)
def test_smaller_micro_batches_learn_the_same_parts(tmp_path, mixed, kind):
    data, sections, whole = mixed
    halved = {**sections[kind], "training": {**sections[kind]["training"], "micro_batch_size": 2}}
    assert losses_of(run(tmp_path, data, halved)) == pytest.approx(losses_of(whole[kind]), rel=1e-5)
