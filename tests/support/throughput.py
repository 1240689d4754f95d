"""One training, ours or by Transformers' Trainer, on the same texts: how long it takes.

Each in a process of its own, forked from one that has imported all of it; what it found is JSON.
"""

from __future__ import annotations

import ast
import json
import multiprocessing
import re
import sysconfig
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from steadytrain.components.preprocess.pack import best_fit

from support.training import Bench, write_data

LENGTH = 512
DOCUMENTS, ROWS = 16, 4
"""Of a step: single documents for Trainer, packed rows for ours; about as many tokens."""
RECIPE = {
    "learning_rate": 1e-3,
    "lr_scheduler_type": "linear",
    "warmup_steps": 0,
    "weight_decay": 0.1,
    "seed": 3,
}
_PRELOAD = ["support.throughput", "steadytrain.components.train.loop.training", "transformers"]


@dataclass(frozen=True)
class Found:
    """Of one training.

    tokens: real ones. seconds, cpu_seconds: of the training alone.
    memory: bytes that it took more than there were before, at the most.
    loss: mean over texts that were held out, in float32.
    """

    tokens: int
    seconds: float
    cpu_seconds: float
    memory: int
    loss: float

    @property
    def speed(self) -> float:
        return self.tokens / self.seconds

    @property
    def cpu_speed(self) -> float:
        """As it would be on a machine that nobody shares."""
        return self.tokens / self.cpu_seconds


def functions(count: int, vocabulary: int) -> list[list[int]]:
    """Functions of the standard library as token ids, by byte pairs of that many words."""
    from tokenizers import Tokenizer
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel
    from tokenizers.trainers import BpeTrainer

    texts = sorted(set(_sources()))
    lot = np.random.default_rng(0)
    texts = [texts[index] for index in lot.permutation(len(texts))[:4000]]
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.train_from_iterator(texts, BpeTrainer(vocab_size=vocabulary, show_progress=False))
    ids = (tokenizer.encode(text).ids for text in texts)
    return [item for item in ids if 8 <= len(item) <= LENGTH][:count]


def _sources() -> Iterator[str]:
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text = path.read_text(errors="replace")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef) and (found := ast.get_source_segment(text, node)):
                yield found


def run(kind: str, folder: Path, model: Mapping[str, Any], texts: Sequence[Any], *, half: bool):
    """One training by "ours", or by Trainer in the order "random" or "group_by_length"."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    folder.mkdir(parents=True)
    process = context.Process(target=_run, args=(kind, folder, dict(model), list(texts), half))
    process.start()
    process.join()
    assert process.exitcode == 0, kind
    return Found(**json.loads((folder / "found.json").read_text()))


def _run(
    kind: str, folder: Path, model: dict[str, Any], texts: list[list[int]], half: bool
) -> None:
    import torch

    torch.set_num_threads(1)
    held_out, texts = texts[: 2 * DOCUMENTS], texts[2 * DOCUMENTS :]
    if kind == "ours":
        found = _ours(folder, model, texts, held_out, half)
    else:
        found = _trainer(kind, folder, model, texts, held_out, half)
    (folder / "found.json").write_text(json.dumps(asdict(found)))


def _ours(
    folder: Path,
    model: dict[str, Any],
    texts: list[list[int]],
    held_out: list[list[int]],
    half: bool,
) -> Found:
    from steadytrain.components.train.checkpoint.store import CheckpointStore
    from steadytrain.components.train.loop.control import StopRequests
    from steadytrain.components.train.loop.reporter import Reporter
    from steadytrain.components.train.loop.setup import set_up
    from steadytrain.components.train.loop.training import Training

    class Unsaved(Training):
        """As Trainer is told to save nothing."""

        def save(self) -> None:
            pass

    rows = [_row(sequence) for sequence in best_fit(texts, LENGTH)]
    data = write_data(folder / "data", rows, [], sequence_length=LENGTH)
    steps = len(texts) // DOCUMENTS
    bench = Bench.make(
        folder / "run",
        data,
        model={"config": model},
        training={
            **RECIPE,
            "global_batch_size": ROWS,
            "max_steps": steps,
            "logging_steps": steps,
            "bf16": half,
        },
        compute={"device": "cpu"},
    )
    bench.workspace.create()
    parts = set_up(bench.config, data, ROWS)
    assert not parts.remarks, parts.remarks
    store = CheckpointStore(bench.workspace.checkpoints, keep=1)
    reporter = Reporter(bench.workspace.stream("train"), 1)
    training = Unsaved(parts, store, reporter, StopRequests(None))
    tokens = sum(parts.task.cost(parts.train[index]) for index in parts.order.take(0, steps * ROWS))
    return _measured(training.run, parts.module, tokens, held_out)


def _row(sequence: Sequence[list[int]]) -> dict[str, Any]:
    return {
        "input_ids": [token for document in sequence for token in document],
        "targets": [int(place > 0) for document in sequence for place in range(len(document))],
        "lengths": [len(document) for document in sequence],
    }


def _trainer(
    order: str,
    folder: Path,
    model: dict[str, Any],
    texts: list[list[int]],
    held_out: list[list[int]],
    half: bool,
) -> Found:
    import torch
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        Trainer,
        TrainingArguments,
        set_seed,
    )

    from support.agreement import padded

    set_seed(int(RECIPE["seed"]))
    module = AutoModelForCausalLM.from_config(AutoConfig.for_model(**model), dtype=torch.float32)
    trainer = Trainer(
        model=module,
        train_dataset=[_row([text]) for text in texts],
        data_collator=padded,
        args=TrainingArguments(
            str(folder / "trainer"),
            **RECIPE,
            per_device_train_batch_size=DOCUMENTS,
            num_train_epochs=1,
            train_sampling_strategy=order,
            remove_unused_columns=False,
            bf16=half,
            use_cpu=True,
            logging_steps=len(texts) // DOCUMENTS,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
    )
    return _measured(trainer.train, module, sum(map(len, texts)), held_out)


def _measured(train: Any, module: Any, tokens: int, held_out: list[list[int]]) -> Found:
    Path("/proc/self/clear_refs").write_text("5")  # The peak begins anew.
    before, began, cpu = _memory("VmRSS"), time.perf_counter(), time.process_time()
    train()
    seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu
    memory = _memory("VmHWM") - before
    return Found(tokens, seconds, cpu_seconds, memory, _loss(module, held_out))


def _memory(name: str) -> int:
    told = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert told
    return int(told[1]) * 1024


def _loss(module: Any, held_out: list[list[int]]) -> float:
    import torch

    module.eval()
    with torch.no_grad():
        losses = [
            float(module(input_ids=ids, labels=ids, use_cache=False).loss) * (ids.shape[1] - 1)
            for ids in (torch.tensor(text)[None] for text in held_out)
        ]
    return sum(losses) / sum(len(text) - 1 for text in held_out)
