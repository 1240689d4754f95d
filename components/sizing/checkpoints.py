"""When a checkpoint is saved if nobody says it: what a plan and a run tell, and what a run does."""

from __future__ import annotations

from typing import Final

from steadytrain.components.shared.config.fields import Decision

_EXAMPLES: Final = 100_000
"""Examples from which on checkpoints are saved by time alone."""
_SECONDS: Final = 5.0
"""Less training than this is not worth a checkpoint: a restart takes longer."""
_TIMES: Final = 20
"""The end of an epoch may cost a twentieth of the time since the last checkpoint."""


def by_default(examples: float, counted: str) -> Decision:
    """Return when checkpoints are saved, and why.

    Args:
        examples: of the training side.
        counted: the examples in words.
    """
    if examples < _EXAMPLES:
        return Decision(
            "training.save_strategy",
            None,
            f"{counted} are fewer than {_EXAMPLES:,} (rule: checkpoints): after an epoch, if it is "
            f"at least {_SECONDS:g} s and {_TIMES} times a checkpoint's cost since the last one, "
            "and at Young's interval",
        )
    return Decision("training.save_steps", None, "Young's interval")


def is_worth(examples: float, seconds: float, cost: float) -> bool:
    """Return whether the end of an epoch is worth a checkpoint.

    Args:
        examples: of the training side.
        seconds: since the last checkpoint; an epoch, for a plan.
        cost: seconds that training stops for a checkpoint.
    """
    return examples < _EXAMPLES and seconds >= max(_SECONDS, _TIMES * cost)
