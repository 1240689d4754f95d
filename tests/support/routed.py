"""Gradients of a mixture of experts with its router loss, by our loop and by Transformers' loss."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState, GradientState
from transformers import AutoConfig, AutoModelForCausalLM

from steadytrain.components.shared.batch import BatchSettings
from steadytrain.components.train.loop.batches import take_share
from steadytrain.components.train.loop.setup import set_up
from steadytrain.components.train.loop.steps import agree, take_step

from support.agreement import padded, rows
from support.training import VOCABULARY, Bench, write_data

SIZE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "num_experts_per_tok": 2,
    "pad_token_id": 1,
    "output_router_logits": True,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {**SIZE, "num_local_experts": 4, "router_aux_loss_coef": 5.0},
    "qwen2_moe": {
        **SIZE,
        "num_experts": 4,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
        "router_aux_loss_coef": 5.0,
    },
    "olmoe": {**SIZE, "num_experts": 4, "router_aux_loss_coef": 5.0},
    "granitemoe": {**SIZE, "num_local_experts": 4, "router_aux_loss_coef": 5.0},
    "jetmoe": {
        **SIZE,
        "num_local_experts": 4,
        "kv_channels": 8,
        "num_key_value_heads": 1,
        "aux_loss_coef": 5.0,
    },
}
GLOBAL_BATCH = 8
Found = tuple[float, dict[str, torch.Tensor]]


def by_us(
    folder: Path, model: dict[str, Any], micro_batch: int, strategy: str = "ddp", **training: Any
) -> Found | None:
    """Return the mean loss of the first global batch and its gradients; None but on rank 0.

    Writes the weights and the rows of each micro-batch to FOLDER/given.pt.
    """
    rank, world = (int(os.environ.get(*pair)) for pair in (("RANK", "0"), ("WORLD_SIZE", "1")))
    data = write_data(folder / f"data-{rank}", rows(), rows()[:3])
    bench = Bench.make(
        folder,
        data,
        model={"config": model},
        training={
            "global_batch_size": GLOBAL_BATCH,
            "max_steps": 4,
            "max_grad_norm": 0,
            **training,
        },
        compute={"nproc_per_node": world, "device": "cpu"},
    )
    for state in (AcceleratorState, GradientState):
        state._reset_state()
    parts = set_up(bench.config, data, BatchSettings(micro_batch, strategy=strategy))
    if rank == 0:
        taken = parts.order.take(0, GLOBAL_BATCH)
        micro = [
            [dict(parts.train[index]) for index in taken[start : start + micro_batch]]
            for start in range(0, GLOBAL_BATCH, micro_batch)
        ]
        weights = {name: item.detach().clone() for name, item in parts.module.named_parameters()}
        torch.save((weights, micro), folder / "given.pt")
    own = take_share(parts, 0)
    weight = agree(parts, own, [0, 0, 0]).weight
    found: dict[str, torch.Tensor] = {}

    def keep(_: object) -> None:
        for name, item in parts.module.named_parameters():
            if item.grad is not None:
                found[name] = item.grad.clone()

    result = take_step(
        parts,
        0,
        own.batches,
        weight,
        limit=math.inf,
        after_backward=lambda _: None,
        before_update=keep,
    )
    return (result.loss / weight, found) if rank == 0 else None


def by_transformers(folder: Path, model: dict[str, Any]) -> Found:
    """Return the same, from the losses of Transformers' model for each of these micro-batches."""
    weights, micro = torch.load(folder / "given.pt", weights_only=False)
    module = AutoModelForCausalLM.from_config(AutoConfig.for_model(**model), dtype=torch.float32)
    module.load_state_dict(weights, strict=False)
    counts = [sum(sum(row["targets"]) for row in part) for part in micro]
    loss = torch.zeros(())
    for part, count in zip(micro, counts, strict=True):
        loss = loss + module(**padded(part)).loss * count / sum(counts)
    loss.backward()
    gradients = {
        name: item.grad for name, item in module.named_parameters() if item.grad is not None
    }
    return loss.item(), gradients


def on_rank(folder: Path, model: dict[str, Any], micro_batch: int) -> None:
    """Write what `by_us` found on the ranks of a world to FOLDER/found.pt."""
    found = by_us(folder, model, micro_batch)
    if found is not None:
        torch.save(found, folder / "found.pt")
