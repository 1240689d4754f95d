"""Reading a checkpoint takes a few megabytes beside the memory that it is read into."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from steadytrain.components.train.checkpoint.snapshot import Region
from steadytrain.components.train.checkpoint.state import (
    model_tensors,
    optimizer_settings,
    optimizer_tensors,
    restore_model,
    restore_optimizer,
)
from steadytrain.components.train.optimizers import ADAMW

from support.checkpoints import stored

SIDE = 3072
WEIGHT_BYTES = 4 * SIDE**2
BUFFER_BYTES = 48 << 20
"""Less than the weight and its two moments together, and more than reading takes."""


def resident(what):
    return int(re.search(rf"{what}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) << 10


def growth(action):
    """Return the bytes by which this process grew at most during an action."""
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = resident("VmRSS")
    action()
    return resident("VmHWM") - before


def made(steps):
    torch.manual_seed(1)
    model = torch.nn.Linear(SIDE, SIDE, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(steps):
        model.weight.grad = torch.full_like(model.weight, 0.5)
        optimizer.step()
    return model, optimizer


@pytest.fixture(scope="module")
def begun():
    return made(1)


@pytest.fixture(scope="module")
def checkpoint(begun, tmp_path_factory):
    model, optimizer = begun
    state = optimizer_tensors(model, optimizer, ADAMW)
    parts = {"model": model_tensors(model), "optimizer": state}
    return stored(tmp_path_factory.mktemp("checkpoints"), parts)


@pytest.mark.slow
def test_model_and_optimizer_are_read_into_their_place(begun, checkpoint):
    model, optimizer = made(0)
    settings = optimizer_settings(begun[1])
    torch.nn.init.zeros_(model.weight)

    assert growth(lambda: restore_model(model, checkpoint)) < BUFFER_BYTES
    moments = 2 * WEIGHT_BYTES
    resumed = growth(lambda: restore_optimizer(model, optimizer, ADAMW, checkpoint, settings))

    assert moments / 2 < resumed < moments + BUFFER_BYTES
    assert model.weight.equal(begun[0].weight)
    for key, tensor in optimizer_tensors(model, optimizer, ADAMW).items():
        assert tensor.equal(optimizer_tensors(*begun, ADAMW)[key]), key


@pytest.mark.parametrize("ranks", [2, 8])
def test_shard_of_a_checkpoint_from_one_rank_is_read_into_its_place(begun, checkpoint, ranks):
    name, (_, optimizer) = "weight/exp_avg", begun
    size = SIDE**2 // ranks
    shard = torch.ones(size)

    read = growth(lambda: checkpoint.copy_into("optimizer", {name: Region(shard, size, SIDE**2)}))

    assert read < BUFFER_BYTES
    (state,) = optimizer.state.values()
    assert shard.equal(state["exp_avg"].view(-1)[size : 2 * size])
