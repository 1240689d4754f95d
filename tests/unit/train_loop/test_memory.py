"""The least memory that a training run says it needs, computed from its model."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from steadytrain.components.memory.peak import peak_memory
from steadytrain.components.memory.setting import Setting
from steadytrain.components.memory.shape import shape_of
from steadytrain.components.train.loop.halving import least_memory

from support.training import GPT2, LLAMA, VOCABULARY


@pytest.mark.parametrize("config", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_memory_follows_the_models_own_shape(make_bench, config):
    parts = make_bench(model={"config": config}, training={"max_steps": 1}).train_here().parts
    setting = Setting(length=48, recompute=True, accumulates=True, cuda=False)
    shape = shape_of({**config, "vocab_size": VOCABULARY})
    assert shape.parameters == parts.parameters
    assert least_memory(parts) == peak_memory(shape, setting).total


def test_memory_counts_both_passes_of_r_drop(make_bench):
    config = {**GPT2, "resid_pdrop": 0.1}
    training = {"max_steps": 1, "r_drop": {"weight": 1.0}}
    parts = make_bench(model={"config": config}, training=training).train_here().parts
    setting = Setting(length=48, recompute=True, accumulates=True, cuda=False)
    shape = shape_of({**config, "vocab_size": VOCABULARY})
    twice = replace(setting, copies=2, differentiates=True)
    assert least_memory(parts) == peak_memory(shape, twice).total
    assert least_memory(parts) > peak_memory(shape, setting).total


def test_model_without_a_configuration_is_unknown(make_bench):
    parts = make_bench(training={"max_steps": 1}).train_here().parts
    parts.strategy.module = torch.nn.Linear(2, 2)
    assert least_memory(parts) == 0
