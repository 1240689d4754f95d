"""Check `training.param_groups` against the model without its weights: `python -m`, in a process.

It reads a configuration and a data record as JSON, and writes the message and the fix of an error.
The process that supervises a run starts it, so that it needs no torch itself.
"""

from __future__ import annotations

import json
import sys
from typing import Any, Final

import torch

from steadytrain.components.memory.groups import treatments
from steadytrain.components.shared.config import from_mapping
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.shared.records import DataRecord
from steadytrain.components.tasks.base import OpenTask
from steadytrain.components.train.loop.setup import build_module

_FIELDS: Final = ("training.param_groups", "training.layer_decay")


def check(content: dict[str, Any]) -> dict[str, str]:
    """Return what is wrong; nothing if the groups fit, or only a rank can build the model."""
    config = from_mapping(content["config"])
    task = OpenTask(config, DataRecord.model_validate(content["data"])).training
    try:
        with torch.device("meta"):
            module = build_module(config, task)
        treatments(module, config.training)
    except BadInput as error:
        if error.message.startswith(_FIELDS):
            return {"message": error.message, "remedy": error.remedy}
    # Anything else is about the model, and ranks report it.
    return {}


if __name__ == "__main__":
    json.dump(check(json.load(sys.stdin)), sys.stdout)
