"""What needs a GPU: offload to the host, 4-bit weights, paged moments, and 16 bits."""

from __future__ import annotations

import json
import os

import pytest

from support.forked import on_ranks
from support.strategies import MIDDLE, RECIPE, STEPS, middle, train
from support.training import LLAMA

pytestmark = pytest.mark.gpu

CASES = {
    "bf16": ("ddp", "none", {"bf16": True}, {}),
    "fp16": ("ddp", "none", {"fp16": True}, {}),
    "fsdp-offload": ("fsdp", "all", {"bf16": True}, {}),
    "zero2-offload": ("zero2", "optimizer", {"bf16": True}, {}),
    "zero3-offload": ("zero3", "all", {"bf16": True}, {}),
    "8-bit": ("ddp", "none", {"optim": "adamw_bnb_8bit"}, {}),
    "qlora": (
        "ddp",
        "none",
        {"bf16": True, "optim": "paged_adamw_8bit"},
        {"kind": "qlora", "rank": 4, "dropout": 0.0},
    ),
}
CASES["small-card"] = (
    *CASES["qlora"][:3],
    {**CASES["qlora"][3], "frozen_embeddings": "host", "frozen_head": "4bit"},
)
# In 4 bits, 64 values share a scale.
MODEL = {"config": {**LLAMA, "hidden_size": 64, "intermediate_size": 128}}


def on_one_rank(folder, device, strategy, offload, resume, sections):
    """Train on this rank, as the train step starts it; write the losses to `losses.json`."""
    import torch

    if device == "cuda":
        # Ranks of tests see no GPU by default.
        os.environ["CUDA_VISIBLE_DEVICES"] = "0"
    found = train(folder, strategy, offload, device=device, resume=resume, **sections)
    assert (torch.cuda.max_memory_allocated() > 0) == (device == "cuda")
    (folder / "losses.json").write_text(json.dumps(found))


def losses(folder, device, strategy="ddp", offload="none", resume=None, **sections):
    on_ranks(1, on_one_rank, folder, device, strategy, offload, resume, sections)
    found = json.loads((folder / "losses.json").read_text())
    return {int(step): loss for step, loss in found.items()}


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    """Train a float32 model on a CPU, and return its folder and its losses."""
    folder = tmp_path_factory.mktemp("single")
    return folder, losses(folder, "cpu", model=MODEL)


@pytest.mark.parametrize("name", CASES)
def test_gpu_training_learns_the_same_and_resumes(tmp_path, single, name):
    folder, expected = single
    strategy, offload, training, adapter = CASES[name]
    sections = {"training": {**RECIPE, **training}, "model": MODEL}
    if adapter:
        sections["model"] = {"base": str(folder / "runs/tiny/model"), "adapter": adapter}
    whole = losses(tmp_path / "whole", "cuda", strategy, offload, **sections)
    start = middle(tmp_path / "whole")
    rest = losses(tmp_path / "rest", "cuda", strategy, offload, start, **sections)
    assert rest == pytest.approx({n: whole[n] for n in range(MIDDLE + 1, STEPS + 1)}, rel=1e-3)
    if not adapter:
        assert whole == pytest.approx(expected, rel=0.03)
