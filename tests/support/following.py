"""Follow the pods of a job until both run, and to its end."""

from __future__ import annotations

import time

from steadytrain.components.train.failures import classify


def event(message, *, name="tiny-a3-node-0", reason="FailedCreate"):
    return {
        "metadata": {"name": f"{name}.{abs(hash(message))}"},
        "involvedObject": {"name": name},
        "type": "Warning",
        "reason": reason,
        "message": message,
        "lastTimestamp": "2026-01-01T00:00:00Z",
    }


def failure(folder):
    return classify(folder.errors(), {}, {})


def followed(api, made, pod):
    """Start to follow running pods, and return when both have been seen."""
    api[0].put("pods", pod(0))
    api[0].put("pods", pod(1))
    made.start()
    while made.started != {0, 1}:
        time.sleep(0.01)


def ended(made):
    made.ending.set()
    made.join()
