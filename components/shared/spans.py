"""Where in the text that a chat template has printed each message's content stands."""

from __future__ import annotations

from collections.abc import Sequence

Span = tuple[int, int]
"""First character, and the one after the last."""


def content_spans(own: Sequence[str], contents: Sequence[str], text: str) -> list[Span]:
    """The spans of contents that stand in `text` in full, in order.

    A template may trim white space at a content's ends. Whatever else it changes or leaves out
    would count as said without ever being predicted, so there must be nothing else: `text` is
    the contents and the template's own parts, each in its place. The work is linear in `text`.

    Args:
        own: what the template prints before, between and after the contents; one more than those.

    Returns:
        A span for each content; empty where `text` is not made up so.
    """
    if not text.startswith(own[0]):
        return []
    spans: list[Span] = []
    position = len(own[0])
    for index, content in enumerate(contents, 1):
        span = _span(content, own[index], text, position, last=index == len(contents))
        if span is None:
            return []
        spans.append(span)
        position = span[1] + len(own[index])
    return spans if position == len(text) else []


def _span(content: str, after: str, text: str, start: int, *, last: bool) -> Span | None:
    """The span of a content that begins at `start`, with `after` behind it; None: not there."""
    end = start + len(content)
    if text.startswith(content, start) and text.startswith(after, end):
        return start, end
    core = content.strip()
    lead, tail = content[: content.find(core)], content[content.find(core) + len(core) :]
    end = text.find(core[:1], start, start + len(lead) + 1)
    if end < 0 or not lead.endswith(text[start:end]) or not text.startswith(core, end):
        return None
    end += len(core)
    # The first place is taken: nothing is tried twice.
    found = len(text) - len(after) if last else text.find(after, end, end + len(tail) + len(after))
    if found < end or not text.startswith(after, found):
        return None
    # White space alone may have lost both its ends.
    left = text[end:found]
    return (start, found) if tail.startswith(left) or (not core and left in tail) else None
