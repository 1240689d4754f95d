"""Take over a run: hold it, check that it can continue, and end what was left undone."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, Final

from steadytrain.components.shared import plugins
from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.config.fields import effect_of, is_section, leaves
from steadytrain.components.shared.config.strategies import AUTO
from steadytrain.components.shared.digest import users_code_digest, value_digest
from steadytrain.components.shared.effects import Use
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.shared.events import Cursor
from steadytrain.components.shared.events.types import AttemptEnded, Warned
from steadytrain.components.shared.lease import Lease, hold
from steadytrain.components.shared.model_source import base_content, other_contents
from steadytrain.components.shared.records import DataRecord
from steadytrain.components.shared.retry import REJECTED_SECONDS
from steadytrain.components.shared.stage import start_run
from steadytrain.components.shared.storage import LocalStorage
from steadytrain.components.shared.workspace import Workspace
from steadytrain.components.tasks.base import task_code
from steadytrain.components.train.agent.fork_server import ForkServer
from steadytrain.components.train.agent.processes import end_processes
from steadytrain.components.train.failures import FailureClass
from steadytrain.components.train.recovery.history import History, is_of_rank
from steadytrain.components.train.recovery.ledger import Ledger
from steadytrain.components.train.recovery.times import last_sign_of_life, pods_waited, unrecorded

_SECTIONS = ("model", "training", "compute", "recovery")
"""The sections of the configuration that a supervisor uses."""
_MEANING = {
    "data.fingerprint": " (the data differ, or another version of steadytrain prepared them)",
    "base.content": " (the files of model.base have changed)",
    "teacher.content": " (the files of training.distillation.teacher have changed)",
    "grader.content": " (the files of training.curriculum.model have changed)",
}


def may_differ() -> str:
    """Return the fields that a run may continue with another value of."""
    free, sections = [], []
    for name in _SECTIONS:
        fields = [field.name for field in leaves(RunConfig) if field.name.startswith(f"{name}.")]
        differing = [field for field in fields if _may_differ(field)]
        sections += [name] if differing == fields else []
        free += [] if differing == fields else differing
    return f"{', '.join(free)}, and all of {' and '.join(sections)}"


def inputs_digest(config: RunConfig, data: DataRecord) -> str:
    """Return a digest of everything that determines the final weights.

    For the base model, the teacher, a curriculum's model and the encoder of images, the content
    counts, not the address.

    Raises:
        BadInput, StorageError: the content of one of them cannot be determined.
    """
    learned = config.counted(Use.RESUME)
    training, model = learned["training"], learned["model"]
    if config.model.base:
        model["base"] = base_content(config)
    others = other_contents(config)
    if "teacher" in others:
        training["distillation"]["teacher"] = others["teacher"]
    if "grader" in others:
        training["curriculum"]["model"] = others["grader"]
    if "image_encoder" in others:
        model["fusion"]["image_base"] = others["image_encoder"]
    code = plugin_code(config)
    return value_digest([data.fingerprint, model, training, *([code] if code else [])])


def plugin_code(config: RunConfig) -> dict[str, str]:
    """Return the version and the code of other packages that determine the weights, by field."""
    training = config.training
    described = _described(
        ("model.framework", plugins.TRAINERS, config.model.framework),
        ("training.order", plugins.ORDERS, training.order),
        ("training.optim", plugins.OPTIMIZERS, training.optim),
        ("training.lr_scheduler_type", plugins.SCHEDULES, training.lr_scheduler_type),
        *(
            (f"training.components.{name}", plugins.COMPONENTS, name)
            for name in training.components
        ),
    )
    task = task_code(config.data.task)
    return described | ({"data.task": f"{config.data.task}, code {task[:12]}"} if task else {})


def strategy_code(config: RunConfig) -> dict[str, str]:
    """Return the version and the code of another package's strategy.

    The field includes the name: a run may continue with another strategy, but not with other code
    of the same one.
    """
    name = config.compute.strategy
    return {} if name == AUTO else _described((f"strategy {name}", plugins.STRATEGIES, name))


def _described(*used: tuple[str, str, str]) -> dict[str, str]:
    """Return the version and the code of each plugin of another package, by field.

    Args:
        used: the field, the group and the name of each plugin.
    """
    codes = {}
    for field, group, name in used:
        if not plugins.is_ours(group, name):
            point = plugins.find(group, name)
            codes[field] = f"{plugins.described(point)}, code {users_code_digest(point.value)[:12]}"
    return codes


def settings(config: RunConfig, data: DataRecord) -> dict[str, Any]:
    """Return the settings that a supervisor uses as plain data: sections and their fields."""
    content = {"data": {"fingerprint": data.fingerprint}, **stated(config)}
    if config.model.base:
        content["base"] = {"content": base_content(config)}
    content |= {role: {"content": of} for role, of in other_contents(config).items()}
    return content | {"plugins": plugin_code(config) | strategy_code(config)}


def stated(config: RunConfig) -> dict[str, Any]:
    """Return the settings of the configuration alone, without resolving addresses."""
    return config.model_dump(mode="json", include=set(_SECTIONS))


def refused(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the changes that prevent a resume: field, old value and new value."""
    return [
        f"{name} {change}{_MEANING.get(name, '')}"
        for name, change in changes(before, now)
        if not _may_differ(name)
    ]


def other_strategy_code(before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Return whether the run continues with the same strategy, but with other code of it."""
    changed = (name for name, _ in changes(before, now))
    return any(name.startswith("plugins.strategy ") for name in changed)


def accepted(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Describe the allowed changes; "" if there are none."""
    known = {name: change for name, change in changes(before, now) if _may_differ(name)}
    if not known:
        return ""
    message = f"continues with changed settings: {', '.join(map(' '.join, known.items()))}"
    notes = dict.fromkeys(effect_of(name).note for name in known)
    return "; ".join([message, *filter(None, notes)])


def _may_differ(name: str) -> bool:
    known = name.partition(".")[0] in _SECTIONS
    return known and Use.RESUME not in effect_of(name).uses


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the fields that exist on both sides with different values."""
    old, new = dict(_fields(before)), dict(_fields(now))
    for name in (name for name in new if name in old):
        if old[name] != new[name]:
            yield name, f"{old[name]!r} -> {new[name]!r}"


def _fields(content: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the name and the value of each field that is not a section.

    Each by itself, because another version may know further fields of a section.
    """
    for name, value in content.items():
        field_name = f"{prefix}{name}"
        if isinstance(value, Mapping) and (not prefix or is_section(field_name)):
            yield from _fields(value, f"{field_name}.")
        else:
            yield field_name, value


_SUPERVISOR_DIED: Final = "the program that supervised this attempt died"


@dataclass(frozen=True)
class LeasedRun:
    """What a process holds while it trains a run.

    lease: of the run.
    agent: forked while this process had no other threads; None if there is none.
    """

    lease: Lease
    agent: ForkServer | None = None


def hold_run(config: RunConfig) -> AbstractContextManager[Lease]:
    """Hold a run for this process.

    Raises:
        RunBusy: a live supervisor holds it; the message says which one, where, and since when.
        BadInput, StorageError: see `hold`.
    """
    workspace = Workspace.of(config)
    return hold(
        LocalStorage(workspace.lease),
        run_id=workspace.run_id,
        seconds=config.recovery.lease_seconds,
        after=Ledger(workspace).generation(),
        notify=partial(_warn, workspace),
    )


def begin_run(config: RunConfig, tags: Mapping[str, str] = MappingProxyType({})) -> Workspace:
    """Start a run (`start_run`), which must not restart while another process trains it."""
    with hold_run(config):
        return start_run(config, tags)


def _warn(workspace: Workspace, message: str) -> None:
    """Report a wait, in a file that no other supervisor writes."""
    workspace.add_events(f"lease-{os.getpid()}", Warned(stage="train", message=message))


def check_continues(config: RunConfig) -> None:
    """Compare the configuration with the one that the run trained with before, if it did.

    The supervisor compares the data later, once they are prepared, and reports a damaged ledger.

    Raises:
        BadInput: a field differs that decides what is learned.
    """
    workspace = Workspace.of(config)
    try:
        history = Ledger(workspace).history()
    except BadInput:
        return
    if history.supervisor is None or not history.attempts:
        return
    if changed := refused(history.supervisor.settings, stated(config)):
        raise other_inputs(workspace, changed)


def other_inputs(workspace: Workspace, changed: list[str]) -> BadInput:
    """Return the error for a run that started with other data, another model or training.

    Args:
        changed: the fields with both values. May be empty if they are unknown.
    """
    problem = (
        f"run {workspace.run_id!r} in {workspace.output} was started with other data, model or "
        "training, and cannot continue with these"
    )
    return BadInput(
        ": ".join([problem, *filter(None, ["; ".join(changed)])]),
        remedy="give this run another name (run: ...), or use the configuration that it was "
        f"started with, in which these may differ: {may_differ()}; or remove {workspace.folder}; "
        f"`steadytrain adjust {workspace.run_id}` changes settings of a run under way",
    )


def end_lost_attempts(ledger: Ledger, workspace: Workspace) -> None:
    """End the attempts whose supervisor died, and make sure that their ranks are gone too.

    Also record what ranks reported last, which their supervisor did not.
    """
    end_processes(workspace.attempts)
    attempts = ledger.history().attempts
    lost = {item.started.attempt: item for item in attempts if item.ended is None}
    result = (item.event for item in Cursor(workspace.events).read())
    events = [item for item in result if is_of_rank(item) or getattr(item, "attempt", 0) in lost]
    for attempt in attempts:
        for event in unrecorded(attempt, events):
            ledger.record(event, seconds=REJECTED_SECONDS)
    for attempt in lost.values():
        seen, step = last_sign_of_life(attempt, events)
        ended = AttemptEnded(
            time=seen,
            attempt=attempt.started.attempt,
            outcome="failed",
            step=step,
            failure_class=FailureClass.NODE_LOST,
            message=_SUPERVISOR_DIED,
            waited_seconds=pods_waited(attempt.started, events, seen),
        )
        ledger.record(ended, seconds=REJECTED_SECONDS)


def undecided(history: History) -> AttemptEnded | None:
    """Return the failed attempt after which the supervisor died before it decided."""
    failed = history.attempts[-1].ended if history.attempts else None
    if failed is None or not failed.failure_class or failed.message == _SUPERVISOR_DIED:
        return None
    decided = {item.attempt for item in history.decisions if not item.in_place}
    return None if failed.attempt in decided else failed


def last_folder(workspace: Workspace) -> int:
    """Return the highest attempt number that has a folder; 0 if there is none."""
    names = (path.name for path in workspace.attempts.glob("*"))
    return max((int(name) for name in names if name.isdecimal()), default=0)


def left_to_wait(history: History, now: float) -> float:
    """Return the seconds left of the last decision's wait, if its supervisor died in it.

    Args:
        now: the time by the run's clock.
    """
    last = history.decisions[-1] if history.decisions else None
    if last is None or last.action == "stop" or last.attempt + 1 != history.next_attempt:
        return 0.0
    return min(max(0.0, last.time + last.delay_seconds - now), last.delay_seconds)
