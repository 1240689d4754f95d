"""The recipe means the same as in Transformers."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments
from transformers.optimization import get_wsd_schedule

from steadytrain.components.shared.config import TrainingConfig, schedules
from steadytrain.components.shared.config.optimizers import optimizer_spec
from steadytrain.components.shared.config.schedules import (
    ScheduleSettings,
    ScheduleSpec,
    rate_factor,
    schedule_settings,
)
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.sizing.length import total_steps
from steadytrain.components.train.checkpoint.state import (
    model_tensors,
    optimizer_settings,
    optimizer_tensors,
    restore_model,
    restore_optimizer,
)
from steadytrain.components.train.launch.process import RANK_IMPORTS
from steadytrain.components.train.loop.optim import (
    OptimizerBuilder,
    build_scheduler,
)

from support.checkpoints import stored
from support.training import GPT2, LLAMA, VOCABULARY

OURS_ALONE = {
    "global_batch_size",
    "base_global_batch_size",
    "lr_scaling",
    "micro_batch_size",
    "early_stopping_patience",
    "early_stopping_threshold",
    "save_keep_every",
    "order",
    "order_options",
    "components",
    "averaging",
    "param_groups",
    "gradient_compression",
    "layer_decay",
    "curriculum",
    "distillation",
    "contrastive",
    "batch_contrastive",
    "r_drop",
    "focal_loss",
    "class_weights",
    "adversarial",
    "mixup",
    "label_thresholds",
    "augmentation",
    "image_augmentation",
    "dpo",
    "kto",
    "masking",
    "multi_task",
    "prefetch_batches",
    "loader_workers",
    "attention",
    "goal",
    "mixture",
    "denoising",
    "monitor",
    "profile",
}
"""The user sets the global batch size, and whether the rate follows it. In Transformers, early
stopping belongs to a callback, no checkpoint is kept because of its step, and a sampler, callback,
loss or optimizer with groups is an argument of the Trainer. It has no thresholds of labels."""
STEPS = 20


def trainer_of(tmp_path, model, **arguments):
    return Trainer(
        model=model,
        args=TrainingArguments(
            str(tmp_path), use_cpu=True, report_to="none", optim="adamw_torch", **arguments
        ),
    )


def test_fields_have_transformers_names():
    unknown = set(TrainingConfig.model_fields) - set(TrainingArguments.__dataclass_fields__)

    assert unknown == OURS_ALONE


@pytest.mark.parametrize("config", [LLAMA, GPT2], ids=lambda item: item["model_type"])
def test_weight_decay_excludes_what_trainer_excludes(tmp_path, config):
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config, vocab_size=VOCABULARY))
    trainer = trainer_of(tmp_path, model, weight_decay=0.1, learning_rate=1e-3)

    ours = OptimizerBuilder(TrainingConfig(weight_decay=0.1, learning_rate=1e-3))(model)
    theirs = trainer.create_optimizer()

    assert decays(model, ours) == decays(model, theirs)
    assert {True, False} <= {decay > 0 for decay in decays(model, ours).values()}


def decays(model, optimizer):
    names = {item: name for name, item in model.named_parameters()}
    return {
        names[item]: group["weight_decay"]
        for group in optimizer.param_groups
        for item in group["params"]
    }


@pytest.mark.parametrize("warmup", [0, 0.12, 1, 4])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("linear", {}),
        ("cosine", {}),
        ("polynomial", {}),
        ("constant", {}),
        ("constant_with_warmup", {}),
        ("cosine_with_restarts", {}),
        ("cosine_with_restarts", {"num_cycles": 3}),
        ("inverse_sqrt", {}),
        ("inverse_sqrt", {"timescale": 7}),
        ("warmup_stable_decay", {"num_decay_steps": 6}),
        ("warmup_stable_decay", {"num_decay_steps": 9, "decay_type": "1-sqrt"}),
        ("warmup_stable_decay", {"num_decay_steps": 4, "decay_type": "linear"}),
    ],
)
def test_schedules_match_trainer(tmp_path, kind, options, warmup):
    model = torch.nn.Linear(2, 2)
    settings = {
        "lr_scheduler_type": kind,
        "lr_scheduler_kwargs": options,
        "warmup_steps": warmup,
        "learning_rate": 1e-3,
    }
    training = TrainingConfig(**settings)
    trainer = trainer_of(tmp_path, model, **settings)
    trainer.create_optimizer_and_scheduler(STEPS)
    optimizer = OptimizerBuilder(training)(model)

    ours = rates(optimizer, build_scheduler(optimizer, training, STEPS))

    assert ours == rates(trainer.optimizer, trainer.lr_scheduler)


@pytest.mark.parametrize("kind", ["linear", "cosine", "1-sqrt"])
def test_last_rate_of_warmup_stable_decay_matches_transformers(kind):
    options = {"num_decay_steps": 6, "decay_type": kind, "min_lr_ratio": 0.1}
    training = TrainingConfig(
        lr_scheduler_type="warmup_stable_decay", lr_scheduler_kwargs=options, warmup_steps=3
    )
    settings = schedule_settings(training, STEPS, peak=1.0)
    theirs = get_wsd_schedule(
        torch.optim.SGD([torch.zeros(1)], 1.0), 3, num_training_steps=STEPS, **options
    ).lr_lambdas[0]
    # Their warm-up starts at the last rate, and ours at 0.
    for step in range(3, STEPS + 2):
        assert rate_factor(step, kind="warmup_stable_decay", settings=settings) == theirs(step)


def test_step_decay_matches_torch():
    settings = {"lr_scheduler_kwargs": {"step_size": 3, "gamma": 0.5}, "warmup_steps": 0}
    training = TrainingConfig(lr_scheduler_type="step_decay", learning_rate=1e-3, **settings)
    optimizers = [OptimizerBuilder(training)(torch.nn.Linear(2, 2)) for _ in range(2)]
    theirs = torch.optim.lr_scheduler.StepLR(optimizers[1], step_size=3, gamma=0.5)
    ours = rates(optimizers[0], build_scheduler(optimizers[0], training, STEPS))
    assert ours == pytest.approx(rates(optimizers[1], theirs), rel=1e-12)


@pytest.mark.parametrize(
    ("kind", "share", "steps"),
    [
        ("warmup_stable_decay", {"num_decay_steps": 0.3}, {"num_decay_steps": 6}),
        ("step_decay", {"step_size": 0.25}, {"step_size": 5}),
    ],
)
def test_steps_below_1_are_a_share_of_all_steps(kind, share, steps):
    found = [
        schedule_settings(
            TrainingConfig(lr_scheduler_type=kind, lr_scheduler_kwargs=options), STEPS, peak=1.0
        )
        for options in (share, steps)
    ]
    factors = [
        [rate_factor(step, kind=kind, settings=settings) for step in range(STEPS)]
        for settings in found
    ]
    assert factors[0] == factors[1]
    assert len(set(factors[0])) > 3


def test_decay_longer_than_the_steps_after_warmup_begins_at_the_peak():
    training = TrainingConfig(
        lr_scheduler_type="warmup_stable_decay",
        lr_scheduler_kwargs={"num_decay_steps": 50},
        warmup_steps=4,
    )
    settings = schedule_settings(training, STEPS, peak=1.0)
    factors = [
        rate_factor(at, kind="warmup_stable_decay", settings=settings) for at in range(STEPS)
    ]
    assert max(factors) == factors[4] == 1.0


@pytest.mark.parametrize(
    ("kind", "options", "problem"),
    [
        ("cosine_with_restarts", {"num_cycles": 0}, "num_cycles is 0: give a whole number"),
        ("inverse_sqrt", {"timescale": 0}, "timescale is 0: give a number of at least 1"),
        ("step_decay", {"gamma": 1}, "gamma is 1: give a number above 0 and below 1"),
        ("step_decay", {"step_size": 0}, "step_size is 0: give a number above 0"),
        ("warmup_stable_decay", {"num_decay_steps": 0}, "num_decay_steps is 0: give a number"),
        ("warmup_stable_decay", {"decay_type": "exp"}, "'exp': use one of linear, cosine, 1-sqrt"),
        ("warmup_stable_decay", {"min_lr_ratio": 1}, "min_lr_ratio is 1: give a share below 1"),
    ],
)
def test_schedule_options_out_of_range_are_rejected(kind, options, problem):
    with pytest.raises(BadInput, match=re.escape(problem)):
        schedule_settings(
            TrainingConfig(lr_scheduler_type=kind, lr_scheduler_kwargs=options), 9, peak=1.0
        )


def test_peak_below_the_end_of_a_polynomial_schedule_is_rejected():
    training = TrainingConfig(lr_scheduler_type="polynomial", learning_rate=1e-7)
    optimizer = OptimizerBuilder(training)(torch.nn.Linear(2, 2))
    with pytest.raises(BadInput, match=r"1e-07: .* polynomial ends with 1e-07"):
        build_scheduler(optimizer, training, STEPS)


@pytest.mark.slow
def test_rank_template_imports_no_rarely_used_packages():
    rare = ["peft", "bitsandbytes", "deepspeed", "mlflow", "datasets", "sklearn", "kfp"]
    code = (
        f"import sys, {', '.join(RANK_IMPORTS)}\n"
        f"print([name for name in {rare} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def rates(optimizer, scheduler):
    found = []
    for _ in range(STEPS):
        found.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    return found


@pytest.mark.parametrize(
    ("settings", "rows", "expected"),
    [
        ({"max_steps": 7}, 1000, 7),
        ({"num_train_epochs": 1, "global_batch_size": 8}, 16, 2),
        ({"num_train_epochs": 1, "global_batch_size": 8}, 17, 3),
        ({"num_train_epochs": 0.5, "global_batch_size": 8}, 32, 2),
        ({"num_train_epochs": 3, "global_batch_size": 32}, 5, 1),
    ],
)
def test_total_steps_are_computed(settings, rows, expected):
    assert total_steps(TrainingConfig(**settings), rows) == expected


@pytest.mark.parametrize("kind", ["adamw_torch", "adamw_bnb_8bit", "paged_adamw_8bit"])
def test_optimizer_continues_from_its_saved_state_bit_for_bit(tmp_path, kind):
    """Use one weight that is large enough for 8 bits, and one that is not."""
    training = TrainingConfig(optim=kind, learning_rate=1e-2, weight_decay=0.1)

    def made():
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Linear(128, 2))
        return model, OptimizerBuilder(training)(model)

    def steps(model, optimizer, numbers):
        for number in numbers:
            inputs = torch.randn(4, 64, generator=torch.Generator().manual_seed(number))
            model(inputs).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    whole, begun, resumed = made(), made(), made()
    steps(*whole, range(6))
    steps(*begun, range(3))
    spec = optimizer_spec(kind)
    state = optimizer_tensors(*begun, spec)
    saved = stored(tmp_path, {"model": model_tensors(begun[0]), "optimizer": state})
    restore_model(resumed[0], saved)
    restore_optimizer(*resumed, spec, saved, optimizer_settings(begun[1]))
    steps(*resumed, range(3, 6))
    weights = (model_tensors(model) for model, _ in (whole, resumed))
    assert all(one.equal(other) for one, other in zip(*map(dict.values, weights), strict=True))
    eight_bits = any(tensor.dtype == torch.uint8 for tensor in state.values())
    assert eight_bits == (kind != "adamw_torch")


@pytest.mark.parametrize("factor", [-5.0, float("nan"), float("inf")])
def test_factor_that_cannot_be_a_learning_rate_names_the_schedule(factor, monkeypatch):
    spec, settings = (
        ScheduleSpec(lambda step, settings: factor),
        ScheduleSettings(steps=10, warmup=2, peak=1.0),
    )
    monkeypatch.setattr(schedules, "schedule_spec", lambda name: spec)
    assert rate_factor(1, kind="mine", settings=settings) == 0.5
    with pytest.raises(BadInput, match=f"'mine': its factor at step 3 is {factor}"):
        rate_factor(3, kind="mine", settings=settings)
