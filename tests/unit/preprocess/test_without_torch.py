"""Preprocessing runs in an image without torch, for every built-in task."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.data import sentence, write_jsonl

pytestmark = pytest.mark.slow

RUN = """
import sys
from steadytrain.components.preprocess.step import run
from steadytrain.components.shared.config import load
record = run(load(sys.argv[1]))
print(record.sides["train"].rows > 0, "torch" in sys.modules)
"""
TEXTS = [sentence(seed, 8) for seed in range(60)]
RECORDS: dict[str, list[dict[str, Any]]] = {
    "causal_lm": [{"text": text} for text in TEXTS],
    "supervised_finetuning": [{"prompt": text, "completion": "Yes."} for text in TEXTS],
    "sequence_classification": [{"text": text, "label": "ab"[len(text) % 2]} for text in TEXTS],
}


@pytest.mark.parametrize("task", RECORDS)
def test_preprocessing_imports_no_torch(task: str, tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "rows.jsonl", RECORDS[task])
    config = tmp_path / "run.yaml"
    config.write_text(
        f"name: light\noutput: {tmp_path / 'output'}\n"
        f"data: {{task: {task}, source: ['{source}'], test_share: 0.2, validation_share: 0.2}}\n"
        "model: {config: {model_type: gpt2}, vocab_size: 400}\n"
    )
    line = [sys.executable, "-c", RUN, str(config)]
    done = subprocess.run(line, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1:] == ["True False"], done.stderr
