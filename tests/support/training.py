"""Small prepared data and complete attempts: the input that the train step gives its ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import pyarrow as pa
import torch
from safetensors.torch import load_file

from steadytrain.components.shared.arrow_files import TEXT
from steadytrain.components.shared.batch import REPLICATED, BatchSettings
from steadytrain.components.shared.class_names import part_of
from steadytrain.components.shared.config import RunConfig, from_mapping
from steadytrain.components.shared.config.data_sections import (
    MULTI_TASK,
    MULTIMODAL,
    SERIES,
    TABLES,
)
from steadytrain.components.shared.digest import file_digest
from steadytrain.components.shared.events import Event, read_events
from steadytrain.components.shared.events.types import TrainingStep
from steadytrain.components.shared.records import DataRecord, SideRecord
from steadytrain.components.shared.workspace import Workspace
from steadytrain.components.sizing.batch import plan_batch
from steadytrain.components.techniques.order import RowOrder
from steadytrain.components.train.attempt import AttemptFolder, AttemptResult, AttemptSpec
from steadytrain.components.train.loop.main import Rank

if TYPE_CHECKING:
    from steadytrain.components.train.loop.training import Training

E = TypeVar("E", bound=Event)
VOCABULARY = 64
LLAMA = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
GPT2 = {
    "model_type": "gpt2",
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
}
PART_LABELS = ("mood/bad", "mood/good", "topic/art", "topic/law")
"""The classes of `write_parts`."""
TWENTY_STEPS = (
    "training.global_batch_size=16",
    "training.max_steps=20",
    "training.learning_rate=3e-3",
    "training.lr_scheduler_type=constant",
    "training.warmup_steps=0",
    "training.weight_decay=0",
    "training.logging_steps=1",
    "training.eval_steps=10",
    "training.save_steps=10",
    "training.seed=5",
)
TEST_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}


def write_tokenizer(folder: Path, size: int = VOCABULARY) -> None:
    """Write a tokenizer of `size` words: <end>, <pad>, w2, w3 ..."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    words = {"<end>": 0, "<pad>": 1, **{f"w{index}": index for index in range(2, size)}}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<end>"))
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<end>", pad_token="<pad>"
    ).save_pretrained(folder)


def write_shard(path: Path, rows: Sequence[Mapping[str, Any]], schema: pa.Schema) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
        for start in range(0, len(rows), 7):
            writer.write_batch(pa.RecordBatch.from_pylist(list(rows[start : start + 7]), schema))
    return path.name


PACKED = pa.schema(
    [
        ("input_ids", pa.list_(pa.int32())),
        ("targets", pa.list_(pa.int8())),
        ("lengths", pa.list_(pa.int32())),
    ]
)
CLASSES = pa.schema([("input_ids", pa.list_(pa.int32())), ("label", pa.int64())])
TEXTS = pa.schema([*CLASSES, (TEXT, pa.string())])


def packed_row(lengths: Sequence[int], generator: np.random.Generator) -> dict[str, Any]:
    """Return a row of documents with predictable next tokens: each document counts upward."""
    ids, targets = [], []
    for length in lengths:
        start = int(generator.integers(2, VOCABULARY))
        ids += [2 + (start + index) % (VOCABULARY - 2) for index in range(length)]
        targets += [0] + [1] * (length - 1)
    return {"input_ids": ids, "targets": targets, "lengths": list(lengths)}


def language_rows(count: int, *, seed: int = 0, longest: int = 48) -> list[dict[str, Any]]:
    """Return rows of one to four documents, with very different lengths."""
    generator = np.random.default_rng(seed)
    return [
        packed_row(
            [int(generator.integers(2, longest // 4 + 1)) for _ in range(generator.integers(1, 5))],
            generator,
        )
        for _ in range(count)
    ]


def contradict(rows: Sequence[dict[str, Any]], batch: int, *, size: int) -> None:
    """Make one global batch of `size` rows contradict what the model has learned by then."""
    for index in RowOrder(len(rows), seed=42).take(batch * size, size):
        length = len(rows[index]["input_ids"])
        rows[index]["input_ids"] = [2 + (-31 * place) % (VOCABULARY - 2) for place in range(length)]


def class_rows(count: int, *, classes: int = 3, seed: int = 0) -> list[dict[str, Any]]:
    """Return rows whose class is the most frequent of their first tokens."""
    generator = np.random.default_rng(seed)
    rows = []
    for _ in range(count):
        label = int(generator.integers(classes))
        ids = generator.integers(10, VOCABULARY, size=generator.integers(3, 12))
        ids[: len(ids) // 2 + 1] = 2 + label
        rows.append({"input_ids": ids.tolist(), "label": label})
    return rows


def with_texts(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return rows of classes with the texts that `write_tokenizer`'s tokenizer reads so."""
    return [{**row, TEXT: " ".join(f"w{token}" for token in row["input_ids"])} for row in rows]


def write_data(
    folder: Path,
    train: Sequence[Mapping[str, Any]],
    validation: Sequence[Mapping[str, Any]],
    *,
    task: str = "causal_lm",
    schema: pa.Schema = PACKED,
    labels: Sequence[str] = (),
    sequence_length: int = 48,
    tokenizer: bool = True,
) -> DataRecord:
    """Write prepared data, with the training split in two shards."""
    middle = len(train) // 2
    if tokenizer:
        write_tokenizer(folder / "tokenizer")
    shards = {
        "train": [
            write_shard(folder / "train-0.arrow", train[:middle], schema),
            write_shard(folder / "train-1.arrow", train[middle:], schema),
        ],
        "validation": [write_shard(folder / "validation-0.arrow", validation, schema)],
        "test": [],
    }
    counts = {"train": len(train), "validation": len(validation), "test": 0}
    return DataRecord(
        folder=str(folder),
        fingerprint="0" * 64,
        task=task,
        sides={
            side: SideRecord(shards=shards[side], rows=counts[side], documents=counts[side])
            for side in shards
        },
        test_records="",
        split_digest="0" * 64,
        sequence_length=sequence_length,
        tokenizer="tokenizer" if tokenizer else "",
        labels=list(labels),
    )


def write_parts(folder: Path) -> DataRecord:
    """Write the prepared data of two parts with two classes each."""
    return write_data(
        folder,
        with_texts(class_rows(60, classes=4)),
        with_texts(class_rows(8, classes=4, seed=1)),
        task=MULTI_TASK,
        schema=TEXTS,
        labels=PART_LABELS,
    )


@dataclass(frozen=True)
class Ended:
    """An attempt that has ended."""

    code: int
    output: str
    folder: AttemptFolder
    workspace: Workspace

    @property
    def result(self) -> AttemptResult:
        return AttemptResult.load(self.folder.result)


def data_sections(
    task: str, labels: Sequence[str] = (), mixed: Sequence[str] = ()
) -> dict[str, Any]:
    """Return what a configuration says of prepared data.

    Args:
        labels: those of several parts, which the data names.
        mixed: the data sets of a mixture.
    """
    if mixed:
        return {"data": {"parts": {name: {"source": ["unused"]} for name in mixed}, "task": task}}
    if task in TABLES:
        model = {"framework": "lightgbm", "config": {"model_type": "lightgbm"}}
        return {"data": {"source": ["unused"], "task": task, "target": "y"}, "model": model}
    if task in SERIES:
        model = {"framework": "statsforecast", "config": {"model_type": "auto_ets"}}
        series = {"source": ["unused"], "task": task, "target": "y", "series": {"horizon": 3}}
        return {"data": series, "model": model}
    if task in MULTIMODAL:
        return {"data": {"source": ["unused"], "task": task, "target": "y"}}
    if task != MULTI_TASK:
        return {"data": {"source": ["unused"], "task": task}}
    parts = {part_of(label): {"source": ["unused"]} for label in labels}
    return {
        "data": {"parts": parts, "task": task},
        "gate": {"max_slice_regression": 0.02},
    }


@dataclass
class Bench:
    """A run's folder, data and configuration, for starting attempts."""

    root: Path
    data: DataRecord
    config: RunConfig

    @classmethod
    def make(cls, root: Path, data: DataRecord, **sections: Any) -> Bench:
        content = {
            "name": "tiny",
            "run": "tiny",
            "output": str(root),
            **data_sections(
                data.task, data.labels, [one.name for one in data.sides["train"].sources]
            ),
            **sections,
        }
        content.setdefault("model", {"config": LLAMA})
        return cls(root, data, from_mapping(content))

    @property
    def workspace(self) -> Workspace:
        return Workspace.of(self.config)

    def attempt(self, number: int = 1, *, ranks: int = 1, resume_from: Path | None = None) -> Path:
        """Write an attempt's folder and return it."""
        self.workspace.create()
        self.workspace.config.write_text(self.config.to_yaml())
        self.data.save(self.root / "data.json")
        training = self.config.training
        plan = plan_batch(training.global_batch_size, ranks, training.micro_batch)
        folder = self.workspace.folder / "attempts" / str(number)
        AttemptSpec(
            attempt=number,
            run_id=self.config.run_id,
            config=str(self.workspace.config),
            data=str(self.root / "data.json"),
            batch=BatchSettings(
                plan.micro_batch_size,
                gradient_checkpointing=training.gradient_checkpointing,
                strategy=_strategy(self.config),
                offload=self.config.compute.offload,
            ),
            gradient_accumulation_steps=plan.gradient_accumulation_steps,
            resume_from=str(resume_from or ""),
        ).save(folder / "spec.json")
        return folder

    def train_here(self, number: int = 1, *, resume_from: Path | None = None) -> Training:
        """Run one attempt in this process, on one rank."""
        from accelerate.state import AcceleratorState, GradientState

        for state in (AcceleratorState, GradientState):
            state._reset_state()
        rank = Rank(AttemptFolder(self.attempt(number, resume_from=resume_from)))
        rank.run()
        assert rank.training is not None
        return rank.training

    def start(self, folder: Path, *, ranks: int = 1, **environment: str) -> subprocess.Popen[str]:
        """Start the ranks of an attempt, as the launcher does."""
        return subprocess.Popen(
            rank_command(ranks, "-m", "steadytrain.components.train.loop.main", str(folder)),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **TEST_ENVIRONMENT, **environment},
        )

    def finish(self, process: subprocess.Popen[str], folder: Path) -> Ended:
        output, _ = process.communicate(timeout=600)
        return Ended(process.returncode, output, AttemptFolder(folder), self.workspace)

    def run(
        self,
        number: int = 1,
        *,
        ranks: int = 1,
        resume_from: Path | None = None,
        **environment: str,
    ) -> Ended:
        """Run one attempt from start to end."""
        folder = self.attempt(number, ranks=ranks, resume_from=resume_from)
        return self.finish(self.start(folder, ranks=ranks, **environment), folder)


def _strategy(config: RunConfig) -> str:
    strategy = config.compute.strategy
    return REPLICATED if strategy in ("auto", "single") else strategy


def rank_command(ranks: int, *arguments: str) -> list[str]:
    """Return a Python command for one rank, or a torchrun command for several."""
    if ranks == 1:
        return [sys.executable, *arguments]
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return [sys.executable, *torchrun, *arguments]


def events_of(workspace: Workspace, kind: type[E]) -> list[E]:
    return [event for event in read_events(workspace.events) if isinstance(event, kind)]


def losses_of(workspace: Workspace) -> dict[int, float]:
    """Return the loss by step; if a step was reported twice, the later report counts."""
    return {event.step: event.loss for event in events_of(workspace, TrainingStep)}


def weights_digest(workspace: Workspace) -> str:
    (weights,) = workspace.model.glob("*model.safetensors")
    return file_digest(weights)


def result_of(bench: Bench, number: int = 1) -> AttemptResult:
    """Return rank 0's result of a training run in this process."""
    return AttemptResult.load(AttemptFolder(bench.workspace.attempts / str(number)).result)


def exported(bench: Bench) -> dict[str, torch.Tensor]:
    """Return the weights of the run's exported model, by name."""
    return load_file(bench.workspace.model / "model.safetensors")
