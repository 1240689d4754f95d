"""Small runs with real steps: what a step costs, and what the plan expects of it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import torch
from transformers import AutoTokenizer

from steadytrain.components.memory.model import any_model_shape
from steadytrain.components.memory.peak import Memory
from steadytrain.components.shared.batch import BatchSettings
from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.records import DataRecord
from steadytrain.components.sizing.fit import at
from steadytrain.components.sizing.hardware import Gpu
from steadytrain.components.sizing.machine import Machine, Workload
from steadytrain.components.sizing.strategy import TrainingOption
from steadytrain.components.sizing.time_cost import flops_per_token, update_flops
from steadytrain.components.tasks.encoding.plain_text import SENTINELS
from steadytrain.components.train.loop.batches import take_share
from steadytrain.components.train.loop.setup import TrainingSetup, set_up
from steadytrain.components.train.loop.steps import take_step

from support.training import CLASSES, PACKED, Bench, write_data, write_tokenizer

LENGTH, ROWS, WORDS = 128, 8, 8192
BERT: Final = {
    "model_type": "bert",
    "vocab_size": WORDS,
    "hidden_size": 192,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
}
LLAMA: Final = {
    "model_type": "llama",
    "vocab_size": WORDS,
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "max_position_embeddings": LENGTH,
}
LARGER: Final = {
    **LLAMA,
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 6,
}
PARTS: Final = ("mood/bad", "mood/good", "topic/art", "topic/law")
_IDS: Final = pa.schema([("input_ids", pa.list_(pa.int32()))])
_PAIRS: Final = pa.schema([("input_ids", pa.list_(pa.int32())), ("lengths", pa.list_(pa.int32()))])
_SCHEMAS: Final = {
    "causal_lm": PACKED,
    "masked_lm": _IDS,
    "denoising": _IDS,
    "text_embedding": _PAIRS,
}
_CPU: Final = Gpu(
    name="CPU", memory_gb=1e3, speed=1, half_tflops=1, fp32_tflops=1, bf16=False, cuda=False
)


@dataclass(frozen=True)
class CostedRun:
    """A run that repeats the step of its first global batch."""

    bench: Bench
    parts: TrainingSetup

    @classmethod
    def make(
        cls,
        folder: Path,
        task: str,
        architecture: Mapping[str, Any],
        *,
        rows: int = ROWS,
        ranks: int = 1,
        batches: int = 4,
        dropout: Mapping[str, float] | None = None,
        **training: Any,
    ) -> CostedRun:
        """Set up a run on this rank. Its global batch is one micro-batch of each rank.

        Args:
            rows: of the micro-batch; twice as many sequences for `text_embedding`.
            batches: micro-batches in the data.
            dropout: `model.dropout`.
        """
        model = {"config": dict(architecture), "dropout": dict(dropout or {})}
        bench = bench_of(folder, task, model, rows=rows, ranks=ranks, batches=batches, **training)
        return cls(bench, set_up(bench.config, bench.data, BatchSettings(rows)))

    @cached_property
    def _share(self) -> Any:
        return take_share(self.parts, 0)

    def step(self) -> None:
        """Take a step: forward, backward, clipping, and the update."""
        own = self._share
        take_step(
            self.parts,
            0,
            own.batches,
            own.weight,
            limit=math.inf,
            after_backward=lambda _: None,
            before_update=lambda _: None,
        )

    def held(self) -> Iterator[torch.Tensor]:
        """Yield what outlives a step: weights, buffers, and the optimizer's state."""
        module, optimizer = self.parts.module, self.parts.strategy.optimizer
        yield from module.parameters()
        yield from module.buffers()
        for state in optimizer.state.values():
            yield from (item for item in state.values() if isinstance(item, torch.Tensor))

    @property
    def planned(self) -> Planned:
        return planned(self.parts.config, self.parts.batch.micro_batch_size)


@dataclass(frozen=True)
class Planned:
    """What the plan expects of a step on a CPU.

    work: FLOPs of its passes and of its update.
    """

    memory: Memory
    work: float

    @property
    def passing(self) -> int:
        """Bytes at the peak that do not outlive the step."""
        return self.memory.total - self.memory.weights - self.memory.optimizer


def planned(config: RunConfig, rows: int) -> Planned:
    """Return what the plan expects of a step with one micro-batch of `rows`."""
    ranks = config.compute.nproc_per_node
    job = Workload(config, "bench", any_model_shape(config), Machine(_CPU, per_node=ranks))
    strategy = "single" if ranks == 1 else "ddp"
    option = TrainingOption("none", strategy, False, config.training.optim)
    choice = at(job, option, rows, length=LENGTH)
    setting = choice.setting
    each = flops_per_token(job.shape, setting) + update_flops(job, choice)
    return Planned(choice.memory, each * setting.micro_batch * setting.length)


def bench_of(
    folder: Path,
    task: str,
    model: Mapping[str, Any],
    *,
    rows: int = ROWS,
    ranks: int = 1,
    batches: int = 4,
    **training: Any,
) -> Bench:
    """Return a run on random tokens, in rows of LENGTH; a text embedding's rows are pairs.

    Args:
        model: the section of the configuration.
        rows: of a global batch, for each rank.
        batches: the data have as many times that.
    """
    recipe = {"max_steps": 100, "learning_rate": 1e-4, "bf16": False, **training}
    if task == "multi_task":
        recipe.setdefault("multi_task", {})
    return Bench.make(
        folder,
        data_of(folder / "data", task, batches * rows),
        model=model,
        training={"global_batch_size": rows * ranks, **recipe},
        compute={"nproc_per_node": ranks, "device": "cpu"},
    )


def data_of(folder: Path, task: str, count: int) -> DataRecord:
    """Write prepared rows of random tokens, and a tokenizer with a mask token and sentinels."""
    generator = np.random.default_rng(0)
    labels = {"multi_task": PARTS, "sequence_classification": ("a", "b", "c")}.get(task, ())
    sequences = 2 if task == "text_embedding" else 1
    rows = []
    for index in range(count):
        ids = generator.integers(3, WORDS - len(SENTINELS), size=LENGTH * sequences).tolist()
        row = {"input_ids": ids, "lengths": [LENGTH] * sequences}
        row |= {"targets": [0] + [1] * (LENGTH - 1), "label": index % max(len(labels), 1)}
        names = _SCHEMAS.get(task, CLASSES).names
        rows.append({name: row[name] for name in names})
    data = write_data(
        folder,
        rows,
        [],
        task=task,
        schema=_SCHEMAS.get(task, CLASSES),
        labels=labels,
        sequence_length=LENGTH,
        tokenizer=False,
    )
    write_tokenizer(folder / "tokenizer", WORDS - len(SENTINELS))
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    tokenizer.add_special_tokens({"mask_token": "w2", "additional_special_tokens": SENTINELS})
    tokenizer.save_pretrained(folder / "tokenizer")
    return data.model_copy(update={"tokenizer": "tokenizer"})
