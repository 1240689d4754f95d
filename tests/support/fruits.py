"""Texts about fruits, and the configuration of the scikit-learn classifier of tests/plugins."""

from __future__ import annotations

import random
from typing import Any

from support.data import WORDS

FRUITS = {"a": "apple", "b": "banana", "c": "cherry"}
SCIKIT_LEARN: dict[str, Any] = {
    "name": "fruits",
    "data": {
        "task": "token_counts",
        "validation_share": 0.15,
        "test_share": 0.25,
        "near_duplicate_threshold": None,
        "sequence_length": 64,
        "source": ["unused"],
    },
    "model": {
        "framework": "token_counts",
        "vocab_size": 400,
        "config": {"model_type": "token_counts"},
    },
    "training": {
        "num_train_epochs": 60,
        "global_batch_size": 16,
        "learning_rate": 1.0,
        "eval_steps": 15,
        "save_steps": 15,  # each pass
        "logging_steps": 5,
    },
    # Each run trains by itself.
    "recovery": {"backoff_seconds": 0.1, "reuse_ttl_seconds": 0},
    "evaluation": {"bootstrap_samples": 200},
}


def fruity(index: int) -> dict[str, str]:
    """Return a text about one of the fruits, most of the time."""
    generator = random.Random(index)
    label = generator.choice(sorted(FRUITS))
    words = generator.choices(WORDS, k=20) + [FRUITS[label]] * generator.choice([0, 1, 2])
    generator.shuffle(words)
    return {"text": f"{index} {' '.join(words)}", "label": label}
