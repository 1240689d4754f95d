"""Run lm-eval's tasks from their first documents to their metrics, with made-up answers.

Some needs of a task only show when it runs: more examples than exist, filters, metrics, Python
code. Without a model, this takes a moment and wastes no training.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from steadytrain.components.shared.foreign import foreign

_DOCUMENTS: Final = 50
"""Documents per task. The others are read when the model answers."""


def rehearse(loaded: Mapping[str, Any]) -> None:
    """Run opened tasks without a model. Do not reuse them: they contain answers afterwards.

    Args:
        loaded: the tasks, as lm-eval's `evaluate` accepts them.

    Raises:
        BadInput: if a task cannot run.
    """
    from lm_eval.api.model import LM
    from lm_eval.evaluator import evaluate

    class Mute(LM):  # type: ignore[misc]
        """Treats everything as equally likely and writes nothing."""

        def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
            return [(-1.0, False)] * len(requests)

        def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
            return [-1.0] * len(requests)

        def generate_until(self, requests: Sequence[Any]) -> list[str]:
            return [""] * len(requests)

    for name, task in loaded["tasks"].items():
        with running(name):
            evaluate(
                lm=Mute(),
                task_dict={"tasks": {name: task}, "groups": {}},
                limit=_DOCUMENTS,
                bootstrap_iters=0,
            )


def running(names: object) -> Any:
    """Turn errors that lm-eval raises while it runs tasks into BadInput."""
    return foreign(
        f"evaluation.tasks: {names} cannot be run by lm-eval",
        "fix the field or the document that the message names, or leave the task out",
    )
