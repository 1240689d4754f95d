"""Objectives: what is read, what is rejected, and what identifies a run."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from steadytrain.components.memory.peak import peak_memory
from steadytrain.components.memory.setting import Setting
from steadytrain.components.memory.shape import shape_of
from steadytrain.components.memory.techniques import frozen_model_of, run_frozen_model
from steadytrain.components.shared.config import from_mapping
from steadytrain.components.shared.errors import BadInput, ConfigError
from steadytrain.components.sizing.batch import plan_batch
from steadytrain.components.sizing.fit import at
from steadytrain.components.sizing.hardware import known_gpu
from steadytrain.components.sizing.machine import Machine, Workload
from steadytrain.components.sizing.strategy import options
from steadytrain.components.sizing.time_cost import flops_per_token
from steadytrain.components.tasks import base, checks
from steadytrain.components.tasks.checks import check_task
from steadytrain.components.techniques.distillation.teacher import (
    FIELD,
    check_labels,
    check_vocabulary,
)
from steadytrain.components.train.failures import FailureClass
from steadytrain.components.train.fallbacks import fallbacks_for, next_fallback
from steadytrain.components.train.recovery.takeover import inputs_digest, refused, settings

from support.training import LLAMA, VOCABULARY, write_data

MODEL = {"config": LLAMA}


def configure(task="causal_lm", **training):
    return from_mapping(
        {
            "name": "tiny",
            "data": {"source": ["unused"], "task": task},
            "model": MODEL,
            "training": training,
        }
    )


def test_unused_objectives_leave_a_runs_identity_alone():
    assert configure(distillation={}).run_id == configure().run_id
    taught = configure(distillation={"teacher": "x"})
    assert taught.run_id != configure().run_id
    assert configure(distillation={"teacher": "x", "hidden": {}}).run_id == taught.run_id
    hidden = configure(distillation={"teacher": "x", "hidden": {"weight": 1.0}})
    assert hidden.run_id != taught.run_id
    assert configure(distillation={"teacher": "x", "top_k": None}).run_id == taught.run_id
    assert configure(distillation={"teacher": "x", "top_k": 8}).run_id != taught.run_id


def test_a_field_that_nothing_reads_is_an_error():
    with pytest.raises(ConfigError, match=r"training\.distillation\.weight.*nothing reads it"):
        configure(distillation={"weight": 0.2})
    with pytest.raises(ConfigError, match=r"training\.distillation\.top_k.*nothing reads it"):
        configure(distillation={"top_k": 8})
    with pytest.raises(ConfigError, match=r"distillation\.hidden\.loss.*nothing reads it"):
        configure(distillation={"teacher": "x", "hidden": {"loss": "mse"}})
    with pytest.raises(ConfigError, match=r"distillation\.hidden\.layers.*names no layer"):
        configure(distillation={"teacher": "x", "hidden": {"weight": 1.0, "layers": []}})
    with pytest.raises(ConfigError) as caught:
        configure(distillation={"teacher": "x", "hidden": {"weight": 1.0, "layers": [[-1, 0]]}})
    fields = {problem.field for problem in caught.value.problems}
    assert fields <= {f"training.distillation.hidden.layers{part}" for part in ("", ".0.0")}
    with pytest.raises(ConfigError, match=r"training\.distillation\.hidden.*nothing reads it"):
        configure(distillation={"hidden": {"weight": 1.0}})


def test_the_micro_batch_of_compared_texts_is_set_once():
    with pytest.raises(
        ConfigError, match=r"micro_batch_size.*batch_contrastive\.rows sets it to 4"
    ):
        configure("sequence_classification", batch_contrastive={"rows": 4}, micro_batch_size=2)
    with pytest.raises(ConfigError, match=r"batch_contrastive\.rows.*does not divide"):
        configure("sequence_classification", batch_contrastive={"rows": 5})
    config = configure("sequence_classification", batch_contrastive={"rows": 4})
    assert config.training.micro_batch == 4


def test_out_of_memory_keeps_the_texts_that_are_compared():
    """The smaller micro-batch is left out with the reason, and the next fallback is used."""
    config = configure("sequence_classification", batch_contrastive={"rows": 8})
    found = fallbacks_for(FailureClass.GPU_OOM, "T4", [], conflict_with=config.conflict_with)
    (missing,) = (item.missing for item in found if item.name == "smaller micro-batch")
    assert missing == ("not with training.batch_contrastive: it compares the rows of a micro-batch")
    plan = plan_batch(32, 1, config.training.micro_batch)
    fallback, lowered = next_fallback(plan, found)
    assert fallback.name == "activation checkpointing"
    assert lowered.micro_batch_size == 8


def test_a_task_without_the_objective_rejects_it(monkeypatch):
    plain = replace(base.load_task("causal_lm"), objectives=frozenset())
    monkeypatch.setattr(checks, "load_task", lambda name: plain)
    with pytest.raises(ConfigError, match=r"training\.distillation.*does not include it"):
        check_task(configure(distillation={"teacher": "x"}))


@pytest.mark.parametrize(
    ("field", "section"),
    [
        ("distillation.teacher", lambda model: {"distillation": {"teacher": model}}),
        ("curriculum.model", lambda model: {"curriculum": {"by": "loss", "model": model}}),
    ],
)
def test_a_run_is_not_continued_with_another_model_at_the_same_address(tmp_path, field, section):
    model = tmp_path / "model"
    fields = {**LLAMA, "vocab_size": VOCABULARY}
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields)).save_pretrained(model)
    data = write_data(tmp_path / "data", [], [], tokenizer=False)
    config = configure(**section(str(model)))
    before, digest = settings(config, data), inputs_digest(config, data)
    content = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**content, "rms_norm_eps": 1e-3}))
    assert inputs_digest(config, data) != digest
    (change,) = refused(before, settings(config, data))
    assert f"files of training.{field} have changed" in change


def model_of(size):
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**{**LLAMA, "vocab_size": size}))


def test_a_teacher_with_other_tokens_is_rejected():
    with pytest.raises(BadInput, match="it has 70 tokens, and the student 64"):
        check_vocabulary(model_of(70), model_of(64), "there")


def test_a_teacher_with_other_labels_is_rejected():
    fields = {**LLAMA, "vocab_size": 64, "id2label": {0: "b", 1: "a"}}
    teacher = AutoModelForSequenceClassification.from_config(AutoConfig.for_model(**fields))
    with pytest.raises(BadInput, match="its labels are b, a, and the data's are a, b"):
        check_labels(teacher, ["a", "b"], "there", FIELD)
    check_labels(teacher, ["b", "a"], "there", FIELD)


@pytest.mark.parametrize("half", [False, True])
def test_the_plan_counts_the_weights_of_the_teacher(half):
    """They are those of the model itself, complete on each rank."""
    fields = {**LLAMA, "vocab_size": VOCABULARY, "hidden_size": 48}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields))
    shape = shape_of(fields)
    frozen_model = frozen_model_of(shape, half=half, length=64)
    assert frozen_model.weights == sum(p.numel() for p in model.parameters()) * (2 if half else 4)
    alone = Setting(length=64, strategy="fsdp", ranks=4)
    taught = replace(alone, frozen_model=frozen_model)
    assert peak_memory(shape, taught).frozen_model >= frozen_model.weights
    assert peak_memory(shape, taught).total > peak_memory(shape, alone).total
    assert flops_per_token(shape, taught) == pytest.approx(4 / 3 * flops_per_token(shape, alone))


@pytest.mark.parametrize("kind", ["none", "lora"])
@pytest.mark.parametrize(
    ("task", "sequences", "passes"), [("preference", 2, 1), ("unpaired_preference", 1, 3)]
)
def test_the_plan_counts_the_reference_of_a_preference(tmp_path, kind, task, sequences, passes):
    """Its weights, its forward passes, and the sequences in a row. Adapters need no second model.

    Without pairs, both models also run on the answers of other prompts.
    """
    fields = {**LLAMA, "vocab_size": VOCABULARY}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields))
    model.save_pretrained(tmp_path)
    config = from_mapping(
        {
            "name": "tiny",
            "data": {"source": ["unused"], "task": task},
            "model": {"base": str(tmp_path), "adapter": {"kind": kind}},
        }
    )
    shape = shape_of(fields)
    frozen_model = run_frozen_model(config, shape, half=True, length=64)
    size = sum(p.numel() for p in model.parameters())
    assert frozen_model.weights == (2 * size if kind == "none" else 0)
    assert frozen_model.flops == passes * frozen_model_of(shape, half=True, length=64).flops
    job = Workload(config, "tiny", shape, Machine(known_gpu("T4")))
    (option, *_) = options(job)
    found = at(job, option, 4)
    assert (found.batch.micro_batch_size, found.setting.micro_batch) == (4, 4 * sequences)
    assert found.memory.frozen_model >= frozen_model.weights


def test_the_plan_of_other_tasks_has_no_reference():
    assert run_frozen_model(configure(), shape_of(LLAMA), half=True, length=64) is None
