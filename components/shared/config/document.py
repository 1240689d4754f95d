"""YAML that people write: what JSON can say, within bounds, and a mistake named by its line.

PyYAML's safe loader runs no code, and still lets a document through that no
configuration can be: endless aliases, sets, bytes, keys that are lists. It
also raises a dozen errors that are not its own.
"""

from __future__ import annotations

import copy
import functools
import re
from pathlib import Path
from typing import Any, ClassVar, Final

import yaml
from yaml.composer import ComposerError
from yaml.constructor import ConstructorError
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from steadytrain.components.shared.config.secrets import redact
from steadytrain.components.shared.errors import BadInput

MAX_BYTES: Final = 2**20
MAX_DEPTH: Final = 64
MAX_VALUES: Final = 100_000
"""Of a document, with each alias counted as what it stands for."""

_TAG: Final = "tag:yaml.org,2002:"
_PLAIN_KEY: Final = re.compile("[a-z][a-z_0-9]{0,40}|<<")
"""A key that a message repeats; any other may be a secret that slipped."""
_TAGS: Final = {f"{_TAG}{name}" for name in ("null", "bool", "int", "float", "str", "seq", "map")}


class _Loader(yaml.SafeLoader):
    """Null, booleans, numbers, text, lists, and mappings with text as keys. A date is text."""

    yaml_constructors: ClassVar = {
        tag: make
        for tag, make in yaml.SafeLoader.yaml_constructors.items()
        if tag is None or tag in _TAGS
    }
    yaml_implicit_resolvers: ClassVar = {  # type: ignore[misc]  # the stubs say instance
        first: [item for item in found if item[0] in {*_TAGS, f"{_TAG}merge"}]
        for first, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    depth = 0

    def compose_node(self, parent: Node | None, index: int) -> Node | None:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise ComposerError(None, None, f"nested deeper than {MAX_DEPTH} levels", mark)
        try:
            return super().compose_node(parent, index)
        finally:
            self.depth -= 1

    def compose_mapping_node(self, anchor: Any) -> MappingNode:
        node = super().compose_mapping_node(anchor)
        # Here the keys are those that are written; what << merges comes later, and may be set anew.
        _check_keys(node)
        return node

    def get_single_node(self) -> Node | None:
        root = super().get_single_node()
        if root is not None:
            _weigh(root, {})
        return root

    def construct_object(self, node: Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep=deep)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            kind = node.tag.removeprefix(_TAG)
            raise ConstructorError(None, None, f"not a valid {kind}", node.start_mark) from error

    def construct_mapping(self, node: Node, deep: bool = False) -> dict[Any, Any]:  # noqa: ARG002
        if not isinstance(node, MappingNode):
            raise ConstructorError(None, None, "not a mapping", node.start_mark)
        self.flatten_mapping(node)
        for key, _ in node.value:
            if not isinstance(key, ScalarNode):
                raise ConstructorError(None, None, "a key must be text", key.start_mark)
        # A key is text as it is written: 1 and yes are no number and no truth value.
        return {key.value: self.construct_object(value, deep=True) for key, value in node.value}


def parse(text: str, what: str) -> Any:
    """The content of a YAML document.

    Args:
        what: the document's name in the message.

    Raises:
        BadInput: it is not valid YAML, too large, or says what JSON cannot.
    """
    try:
        return copy.deepcopy(_content(text))
    except yaml.YAMLError as error:
        raise BadInput(
            f"{what} is not valid YAML{_reason(error)}",
            remedy="fix that place; put text with special characters in quotes",
        ) from None  # the error shows the line, which may hold a secret


@functools.lru_cache(maxsize=16)
def _content(text: str) -> Any:
    """Kept, since a command reads the configuration of the same run several times."""
    return yaml.load(text, _Loader)


def read(path: Path, what: str, remedy: str) -> str:
    """The text of a file.

    Raises:
        BadInput: there is no such file, or it is unreadable, too large, or not UTF-8.
    """
    try:
        if not path.is_file():
            why = "not a regular file" if path.exists() else "no such file"
            raise BadInput(f"{what}: {why}", remedy=remedy)
        with path.open("rb") as handle:
            content = handle.read(MAX_BYTES + 1)
    except OSError as error:
        raise BadInput(f"{what}: {error.strerror}", remedy=remedy) from error
    if len(content) > MAX_BYTES:
        raise BadInput(f"{what}: larger than {MAX_BYTES // 2**20} MiB", remedy=remedy)
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadInput(
            f"{what}: not UTF-8 text: byte {error.start} is {content[error.start]:#04x}",
            remedy="save it as UTF-8",
        ) from None


def _check_keys(mapping: MappingNode) -> None:
    """Of two equal keys the first would be lost without a word."""
    first: dict[str, Node] = {}
    for key, _ in mapping.value:
        if not isinstance(key, ScalarNode):
            continue
        earlier = first.setdefault(key.value, key)
        if earlier is not key:
            lines = sorted({earlier.start_mark.line + 1, key.start_mark.line + 1})
            name = key.value if _PLAIN_KEY.fullmatch(key.value) else "a key"
            where = f"lines {lines[0]} and {lines[1]}" if len(lines) > 1 else f"line {lines[0]}"
            raise ComposerError(None, None, f"{name} stands twice ({where})", key.start_mark)


def _weigh(node: Node, known: dict[int, int]) -> int:
    """How many values a node stands for. Linear in the text, however often aliases repeat."""
    if id(node) in known:
        if known[id(node)] == 0:
            raise ComposerError(None, None, "an alias contains itself", node.start_mark)
        return known[id(node)]
    known[id(node)] = 0
    below: list[Node] = []
    if isinstance(node, SequenceNode):
        below = node.value
    elif isinstance(node, MappingNode):
        below = [part for pair in node.value for part in pair]
    weight = 1 + sum(_weigh(part, known) for part in below)
    if weight > MAX_VALUES:
        raise ComposerError(None, None, f"more than {MAX_VALUES:,} values", node.start_mark)
    known[id(node)] = weight
    return weight


def _reason(error: yaml.YAMLError) -> str:
    """Where and why, without the text itself."""
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    place = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
    why = getattr(error, "problem", None) or getattr(error, "reason", None) or "cannot be read"
    return f"{place}: " + redact(re.sub(r" ?'(?!<)[^']{2,}'", "", str(why)))
