"""A small language model on the same texts, trained by our loop, Transformers' Trainer or TRL."""

from __future__ import annotations

import ast
import statistics
import sysconfig
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from steadytrain.components.preprocess.shards import best_fit
from steadytrain.components.shared.batch import BatchSettings
from steadytrain.components.shared.events.types import TrainingStep

from support.timed import Found, in_processes, measured
from support.training import Bench, events_of, write_data

if TYPE_CHECKING:
    from steadytrain.components.train.loop.training import Training

LENGTH = 512
DOCUMENTS, ROWS = 16, 4
"""Size of a micro-batch: single documents for Trainer, packed rows for our loop and TRL.

Both have about the same number of tokens.
"""
RECIPE = {
    "learning_rate": 1e-3,
    "lr_scheduler_type": "linear",
    "warmup_steps": 0,
    "weight_decay": 0.1,
    "seed": 3,
}
Texts = list[list[int]]


def functions(
    count: int, vocabulary: int, longest: int = LENGTH, files: Iterable[Path] = ()
) -> Texts:
    """Return functions as byte-pair token ids, with this vocabulary size.

    Args:
        longest: tokens of the longest.
        files: Python sources; the standard library's without any.
    """
    from tokenizers import Tokenizer
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel
    from tokenizers.trainers import BpeTrainer

    texts = sorted(set(sources(files or Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))))
    lot = np.random.default_rng(0)
    texts = [texts[index] for index in lot.permutation(len(texts))[: max(4000, count)]]
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.train_from_iterator(texts, BpeTrainer(vocab_size=vocabulary, show_progress=False))
    ids = (tokenizer.encode(text).ids for text in texts)
    return [item for item in ids if 8 <= len(item) <= longest][:count]


def sources(files: Iterable[Path]) -> Iterator[str]:
    for path in sorted(files):
        text = path.read_text(errors="replace")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef) and (found := ast.get_source_segment(text, node)):
                yield found


def run(
    kind: str,
    folder: Path,
    model: Mapping[str, Any],
    texts: Sequence[Any],
    *,
    half: bool,
    ranks: int = 1,
    accumulate: int = 1,
    threads: int = 1,
) -> Found:
    """Train one epoch on the texts, except the held-out ones.

    Args:
        kind: "ours"; "random" or "group_by_length", Trainer's orders; "trl", which packs.
    """
    train = {"ours": _ours, "trl": _trl}.get(kind, _trainer)
    held_out, texts = list(texts[: 2 * DOCUMENTS]), list(texts[2 * DOCUMENTS :])
    given = (kind, dict(model), texts, held_out, half, ranks, accumulate)
    return in_processes(folder, train, *given, ranks=ranks, threads=threads)


def _ours(
    folder: Path,
    _: str,
    model: dict[str, Any],
    texts: Texts,
    held_out: Texts,
    half: bool,
    ranks: int,
    accumulate: int,
) -> Found:
    rows = [packed_row(sequence) for sequence in best_fit(texts, LENGTH)]
    data = write_data(folder / "data", rows, [], sequence_length=LENGTH)
    batch = ROWS * ranks * accumulate
    steps = len(texts) // (DOCUMENTS * ranks * accumulate)
    bench = Bench.make(
        folder / "run",
        data,
        model={"config": model},
        training={
            **RECIPE,
            "global_batch_size": batch,
            "max_steps": steps,
            "logging_steps": steps,
            "bf16": half,
        },
        compute={"device": "cpu", "nproc_per_node": ranks},
    )
    return train_ours(bench, ROWS, lambda module: _loss(module, held_out))


def train_ours(bench: Bench, micro_batch: int, loss: Any) -> Found:
    """Run all steps of a run, without checkpoints."""
    trained, tokens = set_up_ours(bench, micro_batch)
    parts = trained.parts
    assert not parts.remarks, parts.remarks
    found = measured(trained.run, tokens, lambda: loss(parts.module))
    if parts.rank:
        return found
    steps = events_of(bench.workspace, TrainingStep)
    found = replace(found, data_wait=statistics.mean(step.data_wait for step in steps))
    if bench.config.compute.nproc_per_node == 1:
        return found
    met = statistics.mean(step.communication_wait or 0.0 for step in steps)
    return replace(found, communication_wait=met)


def set_up_ours(bench: Bench, micro_batch: int) -> tuple[Training, int]:
    """Return the training of a run, which saves no checkpoints, and the tokens of all its steps."""
    from steadytrain.components.train.checkpoint.store import CheckpointStore
    from steadytrain.components.train.loop.control import StopRequests
    from steadytrain.components.train.loop.reporter import Reporter
    from steadytrain.components.train.loop.setup import set_up
    from steadytrain.components.train.loop.training import Training

    class Unsaved(Training):
        """Saves no checkpoints, like the peers."""

        def save(self) -> None:
            pass

    bench.workspace.create()
    training = bench.config.training
    parts = set_up(bench.config, bench.data, BatchSettings(micro_batch))
    store = CheckpointStore(bench.workspace.checkpoints, keep=1)
    stream = bench.workspace.stream("train") if parts.rank == 0 else None
    trained = Unsaved(parts, store, Reporter(stream, 1), StopRequests(None))
    rows = parts.order.take(0, training.max_steps * training.global_batch_size)
    return trained, sum(parts.task.cost(parts.train[index]) for index in rows)


def packed_row(sequence: Sequence[list[int]]) -> dict[str, Any]:
    return {
        "input_ids": [token for document in sequence for token in document],
        "targets": [int(place > 0) for document in sequence for place in range(len(document))],
        "lengths": [len(document) for document in sequence],
    }


def _trainer(
    folder: Path,
    order: str,
    model: dict[str, Any],
    texts: Texts,
    held_out: Texts,
    half: bool,
    ranks: int,
    accumulate: int,
) -> Found:
    from transformers import Trainer, TrainingArguments

    from support.agreement import padded

    module = _module(model)
    arguments = trainer_arguments(folder, half, len(texts) // (DOCUMENTS * ranks * accumulate))
    trainer = Trainer(
        model=module,
        train_dataset=[packed_row([text]) for text in texts],
        data_collator=padded,
        args=TrainingArguments(
            **arguments,
            per_device_train_batch_size=DOCUMENTS,
            gradient_accumulation_steps=accumulate,
            train_sampling_strategy=order,
        ),
    )
    return measured(trainer.train, sum(map(len, texts)), lambda: _loss(module, held_out))


def _trl(
    folder: Path,
    _: str,
    model: dict[str, Any],
    texts: Texts,
    held_out: Texts,
    half: bool,
    ranks: int,
    accumulate: int,
) -> Found:
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    from support.training import write_tokenizer

    write_tokenizer(folder / "tokenizer")
    module = _module(model)
    arguments = trainer_arguments(folder, half, len(texts) // (DOCUMENTS * ranks * accumulate))
    trainer = SFTTrainer(
        model=module,
        processing_class=AutoTokenizer.from_pretrained(folder / "tokenizer"),
        train_dataset=Dataset.from_dict({"input_ids": texts}),
        args=SFTConfig(
            **arguments,
            per_device_train_batch_size=ROWS,
            gradient_accumulation_steps=accumulate,
            packing=True,
            max_length=LENGTH,
            # TRL's default computes the forward pass twice, which is slower.
            gradient_checkpointing=False,
        ),
    )
    return measured(trainer.train, sum(map(len, texts)), lambda: _loss(module, held_out))


def trainer_arguments(folder: Path, half: bool, steps: int) -> dict[str, Any]:
    """Return the arguments that all Trainer runs share."""
    return {
        "output_dir": str(folder / "trainer"),
        **RECIPE,
        "num_train_epochs": 1,
        "remove_unused_columns": False,
        "bf16": half,
        "use_cpu": True,
        "logging_steps": steps,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }


def _module(model: dict[str, Any]) -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, set_seed

    set_seed(int(RECIPE["seed"]))
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**model), dtype=torch.float32)


def _loss(module: Any, held_out: Texts) -> float:
    import torch

    module.eval()
    with torch.no_grad():
        losses = [
            float(module(input_ids=ids, labels=ids, use_cache=False).loss) * (ids.shape[1] - 1)
            for ids in (torch.tensor(text)[None] for text in held_out)
        ]
    return sum(losses) / sum(len(text) - 1 for text in held_out)
