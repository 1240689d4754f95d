"""The preprocess step in its own process, which has already imported everything."""

from __future__ import annotations

import multiprocessing
from multiprocessing.context import ForkServerProcess
from multiprocessing.synchronize import Event

import yaml

from steadytrain.components.preprocess.step import run
from steadytrain.components.shared.config import RunConfig, from_mapping

_PRELOAD = ["rensa", "tokenizers", "transformers", "support.preparing"]


def start(config: RunConfig) -> ForkServerProcess:
    """Start the step; return once it is running."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    work, ready = context.Event(), context.Event()
    step = context.Process(target=_step, args=(config.to_yaml(), work, ready))
    step.start()
    assert ready.wait(600)
    work.set()
    return step


def _step(text: str, work: Event, ready: Event) -> None:
    config = from_mapping(yaml.safe_load(text))
    ready.set()
    work.wait()
    run(config)
