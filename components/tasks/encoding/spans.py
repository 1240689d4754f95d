"""Find the content of each message in the text that a chat template printed."""

from __future__ import annotations

from collections.abc import Sequence

Span = tuple[int, int]
"""First character, and the one after the last."""


def content_spans(own: Sequence[str], contents: Sequence[str], text: str) -> list[Span]:
    """Return the spans of the contents in `text`, in order, if each is there in full.

    A template may trim white space at both ends of a content. Anything else that it changes or
    drops would count as part of the answer without ever being predicted, so it must not exist:
    `text` must consist of the contents and the template's own parts, each in its place. The work is
    linear in the length of `text`.

    Args:
        own: what the template prints before, between and after the contents, one more item than
            `contents`.

    Returns:
        One span per content, or an empty list if `text` has a different structure.
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
    """Return the span of a content that starts at `start` and is followed by `after`.

    None means that it is not there.
    """
    end = start + len(content)
    if text.startswith(content, start) and text.startswith(after, end):
        return start, end
    core = content.strip()
    lead, tail = content[: content.find(core)], content[content.find(core) + len(core) :]
    end = text.find(core[:1], start, start + len(lead) + 1)
    if end < 0 or not lead.endswith(text[start:end]) or not text.startswith(core, end):
        return None
    end += len(core)
    # Take the first match. There is no backtracking.
    found = len(text) - len(after) if last else text.find(after, end, end + len(tail) + len(after))
    if found < end or not text.startswith(after, found):
        return None
    # A content of only white space may have lost both ends.
    left = text[end:found]
    return (start, found) if tail.startswith(left) or (not core and left in tail) else None
