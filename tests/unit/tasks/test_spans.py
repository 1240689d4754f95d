"""Find message contents in the text that a template has rendered."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steadytrain.components.tasks.encoding.printed import content_spans

parts = st.text("ab \n", max_size=3)
solid = st.text("ab", min_size=1, max_size=3)
chats = st.lists(st.tuples(parts, parts), min_size=1, max_size=4)


def printed(own: list[str], contents: list[str]) -> str:
    return own[0] + "".join(
        f"{content}{after}" for content, after in zip(contents, own[1:], strict=True)
    )


@settings(max_examples=300)
@given(parts, chats)
def test_verbatim_contents_are_found_where_printed(
    first: str, turns: list[tuple[str, str]]
) -> None:
    contents, own = [content for content, _ in turns], [first, *(after for _, after in turns)]
    text = printed(own, contents)
    spans = content_spans(own, contents, text)
    assert [text[start:end] for start, end in spans] == contents


@pytest.mark.slow
@settings(max_examples=500)
@given(
    solid,
    st.lists(st.tuples(parts, solid), min_size=1, max_size=4),
    st.sampled_from([str.strip, str.lstrip, str.rstrip, lambda text: text.lstrip("\n")]),
)
def test_contents_that_are_trimmed_are_found_between_the_marks_of_a_turn(
    first: str, turns: list[tuple[str, str]], trim: Callable[[str], str]
) -> None:
    contents = [content for content, _ in turns]
    own = [f"<{first}>", *(f"<{after}>" for _, after in turns)]
    text = printed(own, [trim(content) for content in contents])
    spans = content_spans(own, contents, text)
    assert [text[start:end] for start, end in spans] == [trim(content) for content in contents]


@pytest.mark.slow
@settings(max_examples=500)
@given(parts, chats, st.text("ab \n", max_size=12))
def test_spans_cover_the_full_content(first: str, turns: list[tuple[str, str]], text: str) -> None:
    contents, own = [content for content, _ in turns], [first, *(after for _, after in turns)]
    spans = content_spans(own, contents, text)
    found = [text[start:end] for start, end in spans]
    if spans:
        assert printed(own, found) == text
        assert [one.strip() for one in found] == [one.strip() for one in contents]
        assert all(one in content for one, content in zip(found, contents, strict=True))


def test_whitespace_only_content_may_lose_its_start() -> None:
    assert content_spans(["<a>", "<b>"], ["\n "], "<a> <b>") == [(3, 4)]


@pytest.mark.parametrize("size", [10**4, 10**6])
def test_long_whitespace_is_scanned_once(size: int) -> None:
    blank = " " * size
    own, contents = ["<", f"{blank}|", ">"], [f"{blank}a{blank}"] * 2
    text = printed(own, ["a", "a"])
    assert content_spans(own, contents, text) == [(1, 2), (size + 3, size + 4)]
    assert content_spans(own, contents, text.replace("|", "/")) == []
