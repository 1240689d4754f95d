"""Evaluations in a process of their own whose memory is limited while one part runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import transformers

from steadytrain.components.evaluate import landscape, step
from steadytrain.components.evaluate.extras import measure_robustness
from steadytrain.components.report import step as report
from steadytrain.components.shared.config import from_mapping
from steadytrain.components.shared.digest import weights_digest
from steadytrain.components.shared.records import DataRecord, Record, TrainRecord
from steadytrain.components.shared.workspace import Workspace
from steadytrain.components.tasks.fitting import splitting
from steadytrain.components.tasks.scoring.classification import ClassificationScorer

from support.limits import address_space, limited, return_freed_memory
from support.lm_tasks import judged_run
from support.tiny import TEXTS, make_tokenizer

LABELS = ["code", "prose"]
LANDSCAPE = {"points": 3, "records": 4}


class Measured(Record):
    """Robustness with and without the limit, and what was reported under it."""

    plenty: dict[str, float]
    short: dict[str, float]
    told: list[tuple[str, int, int]]


def attack(folder: Path, spare: int) -> None:
    """Measure robustness twice, the second time with `spare` bytes. Write a `Measured`."""
    return_freed_memory()
    tokenizer = make_tokenizer(100)
    config = from_mapping(
        {
            "name": "tiny",
            "data": {"source": ["unused"], "task": "sequence_classification"},
            "model": {"config": {"model_type": "bert"}},
            "evaluation": {"bootstrap_samples": 100, "attack": {"kind": "pgd", "epsilon": 3.0}},
            "compute": {"device": "cpu"},
        }
    )
    model = transformers.BertForSequenceClassification(
        transformers.BertConfig(
            vocab_size=len(tokenizer),
            hidden_size=32,
            intermediate_size=32_768,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=64,
            num_labels=2,
        )
    ).eval()
    records = pa.table(
        {
            "id": [f"r{index}" for index in range(8)],
            "text": [TEXTS[1] * 4] * 8,
            "label": [LABELS[index % 2] for index in range(8)],
        }
    )
    data = DataRecord.model_construct(labels=LABELS, sequence_length=64)
    task: Any = SimpleNamespace(
        scorer=ClassificationScorer(config, data),
        packager=SimpleNamespace(load_exported=lambda _: {"model": model, "tokenizer": tokenizer}),
    )

    def measured() -> dict[str, float]:
        found = measure_robustness(config, task, folder, records, lambda _: None)
        return {name: item.value for name, item in found["attack"].items()}

    plenty, told = measured(), list[tuple[str, int, int]]()
    with splitting("", lambda *said: told.append(said)), limited(address_space() + spare):
        short = measured()
    Measured(plenty=plenty, short=short, told=told).save(folder / "measured.json")


def widest_run(output: Path, run: str) -> Any:
    """Write a trained run with matrices larger than what the C library has set aside."""
    config = judged_run(output, run, evaluation={"bootstrap_samples": 100, "landscape": LANDSCAPE})
    workspace = Workspace.of(config)
    transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=len(transformers.AutoTokenizer.from_pretrained(workspace.model)),
            hidden_size=128,
            intermediate_size=163_840,
            num_hidden_layers=1,
            num_attention_heads=2,
            max_position_embeddings=128,
        )
    ).save_pretrained(workspace.model)
    record = TrainRecord.load(workspace.record("train"))
    digest = weights_digest(workspace.model)
    record.model_copy(update={"weights_digest": digest}).save(workspace.record("train"))
    return config


def evaluate(output: Path, run: str) -> None:
    """Run the evaluate step twice; in the first, no memory is left to copy the weights."""
    return_freed_memory()
    config = widest_run(output, run)
    weights_of = landscape.weights_of

    def starved(model: Any) -> Iterator[landscape.Weight]:
        with limited(address_space()):
            yield from weights_of(model)

    landscape.weights_of = starved
    step.run(config)
    report.run(config)
    workspace = Workspace.of(config)
    written = (workspace.record("evaluate"), workspace.evaluation / step.PAGE, workspace.report)
    for path in written:
        path.rename(output / f"short-{path.name}")
    landscape.weights_of = weights_of
    step.run(config)
