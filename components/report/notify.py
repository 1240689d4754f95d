"""Call the webhook when a run fails or its model becomes champion, once each.

The exit handler calls this. It always runs, so killed steps are reported too. If the webhook does
not answer, that is a warning, never a failure.
"""

from __future__ import annotations

from steadytrain.components.report.facts import Facts, gather
from steadytrain.components.report.story import executions, outcome
from steadytrain.components.shared import webhook
from steadytrain.components.shared.config.secrets import redact
from steadytrain.components.shared.digest import value_digest
from steadytrain.components.shared.events.types import Warned
from steadytrain.components.shared.storage import LocalStorage
from steadytrain.components.shared.workspace import Workspace


def notify(workspace: Workspace) -> None:
    """Report how the run ended, if that is new and a webhook is configured."""
    if not webhook.is_set():
        return
    facts = gather(workspace)
    message = _message(facts)
    if message is None:
        return
    digest = value_digest([message, _ended(facts) if message["event"] == "failed" else 0])
    storage = LocalStorage(workspace.notified.parent)
    name = workspace.notified.name
    if storage.exists(name) and storage.read(name).decode() == digest:
        return
    failure = webhook.call(message)
    if not failure:
        storage.write(name, digest.encode())
        return
    stream = workspace.stream("report")
    text = f"the webhook ({webhook.VARIABLE}) was not notified that the run {message['event']}"
    stream.emit(Warned(stage="report", message=f"{text}: {failure}"))
    stream.close()


def _message(facts: Facts) -> dict[str, str] | None:
    """Return what to report, or None. `text` is a full sentence, because chat services show it."""
    standing = outcome(facts)
    promoted = facts.promotion if standing.state == "finished" else None
    common = {
        "run": facts.workspace.run_id,
        "name": str(facts.setting("name") or ""),
        "text": standing.sentence,
        "report": str(facts.workspace.report),
    }
    if promoted is not None and promoted.champion:
        more = {"event": "promoted", "model": promoted.model_name, "version": promoted.version}
        return _plain(common | more | {"reason": promoted.reason})
    if standing.state not in ("failed", "unfinished"):
        return None
    more = {"event": "failed"}
    if standing.failure:
        more |= {"stage": standing.failure.stage, "error": standing.failure.error}
        more |= {"message": standing.failure.message, "remedy": standing.failure.remedy}
    attempts = facts.history.attempts
    if attempts and attempts[-1].ended and more.get("stage", "train") == "train":
        more["failure_class"] = attempts[-1].ended.failure_class
    return _plain(common | more)


def _plain(content: dict[str, str]) -> dict[str, str]:
    """Remove empty values and secrets, and cut long texts."""
    return {name: redact(text)[:2000] for name, text in content.items() if text}


def _ended(facts: Facts) -> float:
    """Return when the last step ended. The same failure at another time is a new one."""
    return max((item.end for item in executions(facts.events)), default=0.0)
