"""Check `training.param_groups` against the model before ranks start."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys

from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.shared.records import DataRecord

_PROGRAM = (sys.executable, "-m", "steadytrain.components.train.loop.outline")


def check_groups(config: RunConfig, data: DataRecord) -> None:
    """Reject groups that do not fit the model's structure, which another process builds.

    If it cannot, as for a model with code of its own, ranks check them.

    Raises:
        BadInput: an entry selects nothing, or all parameters are frozen.
    """
    training = config.training
    configured = training.param_groups or training.layer_decay is not None
    if not configured or importlib.util.find_spec("torch") is None:
        return
    content = {"config": config.model_dump(mode="json"), "data": data.model_dump(mode="json")}
    done = subprocess.run(_PROGRAM, input=json.dumps(content), capture_output=True, text=True)
    if done.returncode:
        return
    # Libraries may print before it.
    found = json.loads(done.stdout.splitlines()[-1])
    if found:
        raise BadInput(found["message"], remedy=found["remedy"])
