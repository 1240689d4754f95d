"""How long the exported model takes for one sequence, measured before training.

The time depends on the architecture and the device, not on the weights.
"""

from __future__ import annotations

import statistics
import time
from typing import Final

import torch

from steadytrain.components.memory.model import architecture_of, label_count
from steadytrain.components.memory.random_model import plain_model
from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.events import read_events
from steadytrain.components.shared.events.types import LatencyMeasured
from steadytrain.components.shared.workspace import Workspace

_WARM_UP: Final = 3
_PASSES: Final = 11


def latency_is_known(workspace: Workspace) -> bool:
    """Return whether an earlier attempt of the run has measured it."""
    return any(isinstance(event, LatencyMeasured) for event in read_events(workspace.events))


def measure_latency(config: RunConfig, device: torch.device) -> float:
    """Return the median milliseconds of a forward pass of one sequence, in float32.

    The process's random numbers go on as if nothing had been measured.

    Raises:
        BadInput: the architecture is unknown.
    """
    with torch.random.fork_rng(), device:
        model = plain_model(architecture_of(config.model), label_count(config)).eval()
        tokens = torch.zeros(1, config.data.sequence_length, dtype=torch.long)
    seconds = [_pass(model, tokens) for _ in range(_WARM_UP + _PASSES)][_WARM_UP:]
    return 1e3 * statistics.median(seconds)


@torch.inference_mode()
def _pass(model: torch.nn.Module, tokens: torch.Tensor) -> float:
    began = time.perf_counter()
    model(input_ids=tokens)
    if tokens.is_cuda:
        torch.cuda.synchronize(tokens.device)
    return time.perf_counter() - began
