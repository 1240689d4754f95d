"""Digests of the weights of a few tiny runs, to compare before and after a refactoring.

    python tests/support/weight_digests.py > before.txt

Each line has a run's name and the SHA-256 of its exported weights, on CPU.
"""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from steadytrain.components.preprocess import step as preprocess
from steadytrain.components.shared.config import from_mapping
from steadytrain.components.shared.records import DataRecord

from support.data import sentence, write_jsonl
from support.tiny import make_language_model, make_tokenizer
from support.training import (
    CLASSES,
    class_rows,
    language_rows,
    write_data,
)
from support.whole_runs import RECIPE, run

BERT = {
    "model_type": "bert",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}
CHATML = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def digest(folder: Path, data: DataRecord, *, name: str, **options: Any) -> str:
    """Run to completion and return the digest of the weights; fail if the run doesn't finish."""
    sections = {"run": name, "training": RECIPE, **options.pop("sections", {})}
    workspace = run(folder, data, sections, **options)
    found = hashlib.sha256()
    for path in sorted(workspace.model.rglob("*.safetensors")):
        found.update(path.name.encode() + path.read_bytes())
    return found.hexdigest()


def chat(root: Path) -> tuple[DataRecord, dict[str, Any]]:
    """Return conversations prepared by the preprocess step, and the model section to train with."""
    base = root / "base"
    tokenizer = make_tokenizer(60)
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(base)
    make_language_model("llama", len(tokenizer), 256).save_pretrained(base)
    source = write_jsonl(
        root / "chat.jsonl",
        (
            {"prompt": sentence(seed, 6), "completion": sentence(1000 + seed, 6)}
            for seed in range(80)
        ),
    )
    data = {
        "source": [str(source)],
        "task": "supervised_finetuning",
        "sequence_length": 256,
        "validation_share": 0.1,
        "test_share": 0.1,
    }
    model = {"base": str(base), "adapter": {"kind": "lora", "rank": 4}}
    content = {"name": "tiny", "run": "chat-data", "output": str(root / "output"), "data": data}
    return preprocess.run(from_mapping({**content, "model": model})), model


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        rows = write_data(root / "data", language_rows(60), language_rows(8, seed=1))
        classes = write_data(
            root / "classes",
            class_rows(60),
            class_rows(8, seed=1),
            task="sequence_classification",
            schema=CLASSES,
            labels=["a", "b", "c"],
        )
        conversations, adapted = chat(root)
        runs: dict[str, tuple[DataRecord, dict[str, Any]]] = {
            "causal-lm": (rows, {}),
            "classification": (classes, {"sections": {"model": {"config": BERT}}}),
            "chat-lora": (conversations, {"sections": {"model": adapted}}),
            "ddp": (rows, {"ranks": 2, "strategy": "ddp"}),
            "fsdp": (rows, {"ranks": 2, "strategy": "fsdp"}),
            "killed-and-resumed": (rows, {"killed": True}),
        }
        for name, (data, options) in runs.items():
            print(f"{name:20}{digest(root / 'output', data, name=name, **options)}", flush=True)


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
