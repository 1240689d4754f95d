"""How a schedule on the server differs from the declared one."""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any, Final

from steadytrain.components.shared.config import RunConfig, load
from steadytrain.components.shared.config.document import parse
from steadytrain.components.shared.config.fields import leaves
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.shared.tracking.values import flatten
from steadytrain.pipelines.server.schedules import Actual, Change, Desired

_LEFT_OPEN: Final = ("pipeline_root", "service_account")


def described(item: Actual | Desired) -> dict[str, str]:
    """Describe a schedule by field, in the same form for a present and a wanted one."""
    return _describe_desired(item) if isinstance(item, Desired) else _told_present(item)


def _describe_desired(desired: Desired) -> dict[str, str]:
    declared = desired.declared
    return {
        "when": desired.cron or f"every {declared.interval_seconds} s",
        "end": _moment(declared.end),
        "catch_up": str(declared.catch_up),
        "max_concurrency": str(declared.max_concurrency),
        "version": desired.version.version_id or "to be uploaded",
        "pipeline_root": declared.pipeline_root,
        "service_account": declared.service_account,
        **_parameters(desired.parameters),
    }


def _told_present(present: Actual) -> dict[str, str]:
    item = present.item
    trigger = item.trigger.cron_schedule or item.trigger.periodic_schedule
    cron = item.trigger.cron_schedule and item.trigger.cron_schedule.cron
    parameters = (item.runtime_config and item.runtime_config.parameters) or {}
    return {
        "when": cron or f"every {trigger.interval_second} s",
        "end": _moment(trigger.end_time),
        "catch_up": str(not item.no_catchup),
        "max_concurrency": str(item.max_concurrency),
        "version": str(item.pipeline_version_reference.pipeline_version_id),
        "pipeline_root": str((item.runtime_config and item.runtime_config.pipeline_root) or ""),
        "service_account": item.service_account or "",
        **_parameters(parameters),
    }


def differences(change: Change) -> Iterator[str]:
    """Yield what differs, field by field."""
    old = described(change.surplus[0]) if change.surplus else {}
    new = described(change.desired) if change.desired else {}
    for key in dict.fromkeys([*old, *new]):
        before, after = old.get(key, ""), new.get(key, "")
        # A field that is not declared keeps the server's value.
        if before == after or (new and not after and key in _LEFT_OPEN):
            continue
        if "\n" in before + after:
            yield f"{key}:"
            yield from _lines(before, after)
        else:
            yield f"{key}: {before or '-'} -> {after or '-'}"


def _lines(before: str, after: str) -> Iterator[str]:
    changed = difflib.unified_diff(before.splitlines(), after.splitlines(), n=0, lineterm="")
    yield from (f"  {line}" for line in changed if not line.startswith(("---", "+++", "@@")))


def _settings(config: RunConfig) -> Iterator[str]:
    """Yield a line for each field that does not have its default."""
    content = config.model_dump(mode="json", exclude_defaults=True)
    yield from (f"{field}: {value}" for field, value in flatten(content))


def _parameters(parameters: Mapping[str, Any]) -> dict[str, str]:
    described = {f"parameter {key}": str(value) for key, value in parameters.items()}
    whole = described.get("parameter config", "")
    # A preset's name is one line. A full configuration is mostly defaults, which are left out.
    if "\n" in whole:
        # With the empty line, even a single field is compared line by line.
        described["parameter config"] = "\n".join(["", *_settings_in(whole)])
    return described


def _settings_in(text: str) -> Iterator[str]:
    """Yield a line for each field of a configuration that does not have its default.

    Another version of steadytrain may have written it, with fields that this one does not accept.
    """
    try:
        yield from _settings(load(text))
    except BadInput:
        defaults = {field.name: _as_stored(field.default) for field in leaves(RunConfig)}
        with contextlib.suppress(BadInput):
            for name, value in flatten(parse(text, "it")):
                if value not in ("[]", "{}") and defaults.get(name) != _as_stored(value):
                    yield f"{name}: {value}"


def _as_stored(value: Any) -> str:
    """Return a value's text, the same for a default and for what YAML makes of it."""
    text = str(list(value) if isinstance(value, tuple) else value)
    try:
        return str(float(text))
    except ValueError:
        return text


def _moment(moment: datetime | None) -> str:
    return f"{moment.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}" if moment else ""
