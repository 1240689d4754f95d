"""Models with Python code beside them, which leaves a file behind wherever it runs."""

from __future__ import annotations

import json
from pathlib import Path

from support.tiny import make_language_model, make_tokenizer

_CODE = """
from pathlib import Path
Path({canary!r}).touch()
from transformers import LlamaConfig, LlamaForCausalLM

class CanaryConfig(LlamaConfig):
    model_type = "with-canary"

class CanaryForCausalLM(LlamaForCausalLM):
    config_class = CanaryConfig
"""


def make_canary(folder: Path, canary: Path, *, model_type: str = "with-canary") -> Path:
    """A language model that needs its own code; with `model_type` "llama" it can do without."""
    tokenizer = make_tokenizer(100)
    make_language_model("llama", len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    infect(folder, canary, model_type=model_type)
    return folder


def infect(folder: Path, canary: Path, *, model_type: str = "with-canary") -> None:
    """Adds the code to a saved model."""
    (folder / "modeling_canary.py").write_text(_CODE.format(canary=str(canary)))
    change(
        folder / "config.json",
        model_type=model_type,
        architectures=["CanaryForCausalLM"],
        auto_map={
            "AutoConfig": "modeling_canary.CanaryConfig",
            "AutoModelForCausalLM": "modeling_canary.CanaryForCausalLM",
        },
    )


def change(path: Path, **fields: object) -> None:
    """Changes fields of a JSON file."""
    content = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps(content | fields))
