"""A language model of 0.9 billion weights on one GPU, trained by our loop and by Trainer.

All runs have the same texts, bf16 products, float32 weights, the fused AdamW, and no activation
checkpointing; Trainer has Liger's kernels. Each run warms up first, so that compiling kernels does
not count.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments, set_seed

from steadytrain.components.preprocess.shards import best_fit

from support.agreement import padded
from support.throughput import Texts, packed_row, set_up_ours
from support.training import Bench, write_data

LENGTH, ROWS, DOCUMENTS = 2048, 8, 128
"""Tokens of a row, rows of a packed micro-batch, and documents of one that is not packed."""
WARM_UP = 3
VOCABULARY = 32_768
MODEL: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": LENGTH,
}
RECIPE: dict[str, Any] = {
    "learning_rate": 1e-4,
    "lr_scheduler_type": "constant",
    "warmup_steps": 0,
    "weight_decay": 0.1,
    "max_grad_norm": 1.0,
    "seed": 3,
    "bf16": True,
}


@dataclass(frozen=True)
class Run:
    """What one training run measured.

    tokens: real ones, without padding.
    seconds: by the clock, until the GPU has finished.
    memory: bytes that PyTorch allocated at most.
    """

    tokens: int
    seconds: float
    memory: int

    @property
    def speed(self) -> float:
        return self.tokens / self.seconds


Ready = tuple[Callable[[], object], Callable[[], int]]
"""The training, and its tokens afterward."""


def measured(ready: Callable[[Path, int], Ready], folder: Path, steps: int) -> Run:
    """Train a few steps to warm up, then all of them."""
    train, _ = ready(folder / "warm-up", WARM_UP)
    train()
    del train
    _release()
    train, tokens = ready(folder / "timed", steps)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    train()
    torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    found = Run(tokens(), seconds, torch.cuda.max_memory_allocated())
    del train
    _release()
    return found


def _release() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def our_run(texts: Texts, folder: Path, steps: int) -> Ready:
    """Pack whole documents into rows; tokens attend within their document."""
    rows = [packed_row(documents) for documents in best_fit(texts, LENGTH)]
    data = write_data(folder / "data", rows[: steps * ROWS], [], sequence_length=LENGTH)
    bench = Bench.make(
        folder / "run",
        data,
        model={"config": MODEL},
        training={
            **RECIPE,
            "global_batch_size": ROWS,
            "max_steps": steps,
            "logging_steps": steps,
        },
        compute={"device": "cuda"},
    )
    trained, tokens = set_up_ours(bench, ROWS)
    print(*trained.parts.remarks, sep="\n")
    return trained.run, lambda: tokens


def trainer_run(kind: str, texts: Texts, folder: Path, steps: int) -> Ready:
    """Trainer, with single documents in order of length, or with packed rows.

    Args:
        kind: "group_by_length"; "packed", where tokens also attend to other documents of their
            row, as TRL packs without FlashAttention; "packed by document", which computes what
            ours does.
    """
    single = kind == "group_by_length"
    rows = [packed_row([text]) for text in texts] if single else _full_rows(texts)
    counts: list[int] = []

    def collate(batch: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        counts.append(sum(len(row["input_ids"]) for row in batch))
        if single:
            return padded(batch)
        ids = torch.tensor([row["input_ids"] for row in batch])
        found = {"input_ids": ids, "labels": ids}
        if kind == "packed by document":
            found["position_ids"] = torch.tensor([row["places"] for row in batch])
        return found

    set_seed(RECIPE["seed"])
    module = AutoModelForCausalLM.from_config(AutoConfig.for_model(**MODEL), dtype=torch.float32)
    made = Trainer(
        model=module,
        train_dataset=rows,
        data_collator=collate,
        args=TrainingArguments(
            output_dir=str(folder),
            **RECIPE,
            per_device_train_batch_size=DOCUMENTS if single else ROWS,
            train_sampling_strategy="group_by_length" if single else "random",
            max_steps=steps,
            optim="adamw_torch_fused",
            use_liger_kernel=True,
            remove_unused_columns=False,
            logging_steps=steps,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
    )
    # The loader is one micro-batch ahead.
    return made.train, lambda: sum(counts[:steps])


def _full_rows(texts: Texts) -> list[dict[str, Any]]:
    """Return rows of exactly LENGTH tokens: documents one after another, cut where a row ends.

    `places` is the place of each token in its document, or in what the row has of it.
    """
    ids = [token for text in texts for token in text]
    places = [place for text in texts for place in range(len(text))]
    rows = []
    for start in range(0, len(ids) - LENGTH + 1, LENGTH):
        own = places[start : start + LENGTH]
        begins = next((index for index, place in enumerate(own) if not place), LENGTH)
        own[:begins] = range(begins)
        rows.append({"input_ids": ids[start : start + LENGTH], "places": own})
    return rows
