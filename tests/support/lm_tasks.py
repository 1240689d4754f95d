"""lm-eval tasks over local data, and runs with a language model that only need evaluation."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch

from steadytrain.components.shared.config import RunConfig, from_mapping
from steadytrain.components.shared.digest import weights_digest
from steadytrain.components.shared.records import DataRecord, SideRecord, TrainRecord
from steadytrain.components.shared.workspace import Workspace

from support.tiny import TEXTS, make_language_model, make_tokenizer

DOCUMENTS = [
    {
        "question": f"def function_{index}(first, second):\n    return",
        "choices": [f"first + {index}", f"second * {index} + first", "self.items", "None"],
        "answer": index % 4,
        "text": f"def push_{index}(self, item):\n    self.items.append(item)\n" * (1 + index % 3),
    }
    for index in range(12)
]
_MEAN = {"aggregation": "mean", "higher_is_better": True}
TASKS: Mapping[str, Mapping[str, Any]] = {
    "choosing": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "choices",
        "doc_to_target": "answer",
        "metric_list": [{"metric": "acc", **_MEAN}, {"metric": "acc_norm", **_MEAN}],
    },
    "reading": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [
            {"metric": "word_perplexity", "aggregation": "weighted_perplexity",
             "higher_is_better": False},
            {"metric": "bits_per_byte", "aggregation": "bits_per_byte", "higher_is_better": False},
        ],
    },
    "answering": {
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": " {{choices[answer]}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 8},
        "metric_list": [{"metric": "exact_match", **_MEAN}],
    },
}  # fmt: skip


def write_tasks(folder: Path, **changes: Mapping[str, Any]) -> dict[str, str]:
    """Write task files that include one shared file; return their paths by task name."""
    folder.mkdir(parents=True, exist_ok=True)
    data = folder / "documents.jsonl"
    data.write_text("\n".join(map(json.dumps, DOCUMENTS)))
    shared = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
    }
    # YAML parsers read JSON.
    (folder / "shared.inc").write_text(json.dumps(shared))
    found = {}
    for name, content in TASKS.items():
        path = folder / f"{name}.yaml"
        whole = {"include": "shared.inc", "task": name, **content, **changes.get(name, {})}
        path.write_text(json.dumps(whole))
        found[name] = str(path)
    return found


def judged_run(
    output: Path, run: str, *, kind: str = "llama", lessons: int = 0, **sections: Any
) -> RunConfig:
    """Write a run with a tiny language model, ready for evaluation.

    Args:
        lessons: how often the model has seen some of the tasks' texts. With 0, it guesses.
    """
    tokenizer = make_tokenizer(100)
    config = from_mapping(
        {
            "name": "tiny",
            "run": run,
            "output": str(output),
            "data": {"source": ["lines"], "task": "causal_lm", "sequence_length": 64},
            "model": {"config": {"model_type": kind}},
            "compute": {"device": "cpu"},
            "evaluation": {"bootstrap_samples": 200},
        }
        | sections
    )
    workspace = Workspace.of(config)
    folder = workspace.prepared / "data"
    tokenizer.save_pretrained(folder / "tokenizer")
    ids = [tokenizer(text)["input_ids"] for text in TEXTS]
    _write(
        folder / "train.arrow",
        {
            "input_ids": pa.array(ids, pa.list_(pa.int32())),
            "targets": pa.array([[1] * len(row) for row in ids], pa.list_(pa.int8())),
        },
    )
    texts = [str(item["text"]) for item in DOCUMENTS]
    _write(folder / "test.arrow", {"id": list(map(str, range(len(texts)))), "text": texts})
    side = SideRecord(shards=["train.arrow"], rows=len(ids), documents=len(ids))
    DataRecord(
        folder=str(folder), fingerprint="data", task="causal_lm", sides={"train": side},
        test_records="test.arrow", split_digest="split", sequence_length=64, tokenizer="tokenizer",
    ).save(workspace.record("preprocess"))  # fmt: skip
    model = make_language_model(kind, len(tokenizer))
    _teach(model, tokenizer, lessons)
    model.save_pretrained(workspace.model)
    tokenizer.save_pretrained(workspace.model)
    TrainRecord(
        outcome="finished", model=str(workspace.model),
        weights_digest=weights_digest(workspace.model), metric="loss", best_score=1.0, best_step=5,
        steps=10, attempts=1, parameters=1, seconds=1.0,
    ).save(workspace.record("train"))  # fmt: skip
    return config


def _teach(model: Any, tokenizer: Any, lessons: int) -> None:
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    texts = [torch.tensor([tokenizer(item["text"])["input_ids"]]) for item in DOCUMENTS[:3]]
    for _ in range(lessons):
        for ids in texts:
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()


def _write(path: Path, columns: Mapping[str, Any]) -> None:
    table = pa.table(columns)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as out:
        out.write_table(table)
