"""How long a checkpoint blocks training: steadytrain, Trainer's save, and dcp.async_save.

All three save the same model and optimizer state, one after another in each round. Each write
finishes before the next one starts. Run with
`pytest -m bench tests/bench/test_checkpoint_blocking.py -s`. Set the size with
STEADYTRAIN_BENCH_PARAMETERS (float32 weights; the optimizer holds twice as many values).
"""

from __future__ import annotations

import os
import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from steadytrain.components.train.checkpoint import CheckpointStore
from steadytrain.components.train.checkpoint.saver import Saved, Saver, State
from steadytrain.components.train.checkpoint.snapshot import cut
from steadytrain.components.train.checkpoint.state import model_tensors, optimizer_tensors
from steadytrain.components.train.loop.setup import random_state
from steadytrain.components.train.optimizers import ADAMW

PARAMETERS = int(os.environ.get("STEADYTRAIN_BENCH_PARAMETERS", "50_000_000"))
ROUNDS = 5
WIDTH, LAYER = 512, 12 * 512 * 512
TARGET = 5.0

Save = Callable[[int], Callable[[], object]]
"""Starts saving a step and returns a function that waits for the write to finish."""


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def trained(device: torch.device) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Return a model and its optimizer, with the optimizer state of one step."""
    config = LlamaConfig(
        vocab_size=8192,
        hidden_size=WIDTH,
        intermediate_size=3 * WIDTH,
        num_hidden_layers=max(1, (PARAMETERS - 2 * 8192 * WIDTH) // LAYER),
        num_attention_heads=8,
    )
    model = LlamaForCausalLM(config).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1e-4)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def ours(
    folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, told: list[Saved]
) -> Save:
    saver = Saver(
        CheckpointStore(folder / "ours", keep=1),
        rank=0,
        world_size=1,
        gather=list,
        on_saved=told.append,
    )

    def state() -> State:
        parts = {
            "model": cut(model_tensors(model), 0, 1),
            "optimizer": cut(optimizer_tensors(model, optimizer, ADAMW), 0, 1),
        }
        return State(parts, shared={}, own=random_state())

    def save(step: int) -> Callable[[], object]:
        saver.save(step, 0, state)
        return saver.settle

    return save


def trainers(folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Save:
    arguments = TrainingArguments(
        output_dir=str(folder / "trainer"), report_to=[], save_total_limit=1
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    trainer = Trainer(model=model, args=arguments, optimizers=(optimizer, schedule))

    def save(step: int) -> Callable[[], object]:
        trainer.state.global_step = step
        trainer._save_checkpoint(model, trial=None)
        return lambda: None

    return save


def dcps(folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Save:
    """Save with dcp.async_save; on a GPU, reuse pinned memory between saves, its fastest option."""
    stager = (
        BlockingAsyncStager(cache_staged_state_dict=True) if torch.cuda.is_available() else None
    )

    def save(step: int) -> Callable[[], object]:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        place = folder / "dcp"
        shutil.rmtree(place, ignore_errors=True)
        future = dcp.async_save(
            state, checkpoint_id=place / str(step), async_stager=stager, no_dist=True
        )
        return future.result

    return save


def blocking(save: Save, step: int, device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    wait = save(step)
    seconds = time.perf_counter() - began
    wait()
    return seconds


def rounds(contenders: dict[str, Save], device: torch.device) -> Iterator[dict[str, float]]:
    # Skip the first round: it allocates the memory that later rounds reuse.
    for step in range(1, ROUNDS + 2):
        found = {name: blocking(save, step, device) for name, save in contenders.items()}
        if step > 1:
            yield found


@pytest.mark.bench
@pytest.mark.timeout(1800)
def test_training_waits_for_a_fifth_of_trainers_save(
    tmp_path: Path, trained: tuple[torch.nn.Module, torch.optim.Optimizer], device: torch.device
) -> None:
    told: list[Saved] = []
    contenders = {
        "ours": ours(tmp_path, *trained, told),
        "Trainer's save": trainers(tmp_path, *trained),
        "dcp.async_save": dcps(tmp_path, *trained),
    }

    measured = list(rounds(contenders, device))

    medians = {name: statistics.median(one[name] for one in measured) for name in contenders}
    writing = statistics.median(saved.writing_seconds for saved in told)
    print(f"\n{told[-1].bytes / 1e9:.2f} GB on {device}, median of {ROUNDS} rounds:")
    for name, seconds in medians.items():
        ratio = seconds / medians["ours"]
        print(f"  {name}: {seconds * 1e3:.0f} ms blocking, {ratio:.1f} x ours")
    print(f"  ours in the background: {writing:.2f} s from snapshot to commit")
    assert medians["Trainer's save"] >= TARGET * medians["ours"]
    assert medians["dcp.async_save"] > medians["ours"]
