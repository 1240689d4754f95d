"""Tiny real models with their tokenizers."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.tiny import make_classifier, make_language_model, make_tokenizer


@pytest.fixture(scope="session")
def tokenizer():
    return make_tokenizer(100)


@pytest.fixture(scope="session")
def bytes_tokenizer():
    return make_tokenizer(0)


@pytest.fixture
def language_folder(tmp_path: Path, tokenizer) -> Path:
    folder = tmp_path / "language"
    make_language_model("llama", len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def classifier_folder(tmp_path: Path, tokenizer) -> Path:
    folder = tmp_path / "classifier"
    make_classifier(tokenizer, ["code", "prose"]).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
