"""Models with Python code next to them; the code writes a file wherever it runs."""

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
    """Save a language model with its own code.

    Loading it requires the code, except with `model_type` "llama".
    """
    tokenizer = make_tokenizer(100)
    make_language_model("llama", len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    infect(folder, canary, model_type=model_type)
    return folder


def infect(folder: Path, canary: Path, *, model_type: str = "with-canary") -> None:
    """Add the code to a saved model."""
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
    """Change fields of a JSON file."""
    content = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps(content | fields))
