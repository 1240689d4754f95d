"""Parse YAML written by people: only what JSON can express, within limits, with line numbers. Write
YAML that reads back equal. Show and check configurations as plain data.

PyYAML's safe loader runs no code, but it accepts documents that cannot be a configuration: endless
aliases, sets, bytes, and lists as keys. It also raises a dozen kinds of errors that are not its
own.
"""

from __future__ import annotations

import copy
import functools
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Final

import yaml
from yaml._yaml import CParser
from yaml.composer import Composer, ComposerError
from yaml.constructor import ConstructorError, SafeConstructor
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode
from yaml.reader import Reader
from yaml.resolver import Resolver

from steadytrain.components.shared.config.secrets import PLACEHOLDER, names_a_secret, redact
from steadytrain.components.shared.digest import value_digest
from steadytrain.components.shared.errors import BadInput, Problem
from steadytrain.components.shared.quantities import size

MAX_BYTES: Final = 2**20
MAX_DEPTH: Final = 64
MAX_VALUES: Final = 100_000
"""Limit for a document. Each alias counts as much as the content that it refers to."""

_TAG: Final = "tag:yaml.org,2002:"
_PLAIN_KEY: Final = re.compile("[a-z][a-z_0-9]{0,40}|<<")
"""A key that error messages may repeat. Any other key may be a secret in the wrong place."""
_TAGS: Final = {f"{_TAG}{name}" for name in ("null", "bool", "int", "float", "str", "seq", "map")}


_EXPONENT: Final = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)[eE][-+]?[0-9]+\Z")
"""A number in YAML 1.2, such as 1e-5. PyYAML implements YAML 1.1, where it is text."""
_NOT_DECIMAL: Final = re.compile(r"[-+]?(?:0[0-9_]+|[0-9_]+:.*)\Z")
"""010 and 1:30, which YAML 1.1 takes for 8 and 90, and nobody means that."""


class _Dumper(yaml.CSafeDumper):
    """Quotes text that this module's loader would take for a number."""


class _Loader(Composer, CParser, SafeConstructor, Resolver):
    """Null, booleans, numbers, text, lists, and mappings with text as keys. Dates stay text.

    libyaml scans the text, much faster than PyYAML; the limits below need PyYAML's composer.
    """

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

    def __init__(self, text: str) -> None:
        Reader(text)  # rejects characters that are not allowed, with a YAMLError
        CParser.__init__(self, text)
        Composer.__init__(self)
        SafeConstructor.__init__(self)
        Resolver.__init__(self)

    def compose_node(self, parent: Node | None, index: int) -> Node | None:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            event: Any = self.peek_event()
            problem = f"nested deeper than {MAX_DEPTH} levels"
            raise ComposerError(None, None, problem, event.start_mark)
        try:
            return super().compose_node(parent, index)
        finally:
            self.depth -= 1

    def compose_mapping_node(self, anchor: Any) -> MappingNode:
        node = super().compose_mapping_node(anchor)
        # At this point the node has only the keys that are written in it. Keys merged by << come
        # later, and the mapping may override them.
        _check_keys(node)
        return node

    def get_single_node(self) -> Node | None:
        root = super().get_single_node()
        if root is not None:
            _weigh(root, {})
        return root

    def resolve(self, kind: Any, value: Any, implicit: Any) -> str:
        tag: str = super().resolve(kind, value, implicit)  # type: ignore[no-untyped-call]
        number = tag in (f"{_TAG}int", f"{_TAG}float")
        return f"{_TAG}str" if number and _NOT_DECIMAL.match(value) else tag

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
        # Keys are kept as text: 1 is not a number and yes is not a boolean.
        return {key.value: self.construct_object(value, deep=True) for key, value in node.value}


for _kind in (_Loader, _Dumper):
    _kind.add_implicit_resolver(f"{_TAG}float", _EXPONENT, list("-+.0123456789"))


def parse(text: str, what: str) -> Any:
    """Return the content of a YAML document.

    Args:
        text: the document.
        what: the document's name for error messages.

    Raises:
        BadInput: if it is not valid YAML, is too large, or contains something JSON cannot express.
    """
    try:
        return copy.deepcopy(_content(text))
    except yaml.YAMLError as error:
        raise BadInput(
            f"{what} is not valid YAML{_reason(error)}",
            remedy="fix that place; put text with special characters in quotes",
        ) from None  # the original error quotes the line, which may contain a secret


@functools.lru_cache(maxsize=16)
def _content(text: str) -> Any:
    """Parse and cache a document: commands read the same run's configuration several times."""
    return _Loader(text).get_single_data()


def read(path: Path, what: str, remedy: str) -> str:
    """Return the text of a file.

    Raises:
        BadInput: if the file does not exist, cannot be read, is too large, or is not UTF-8.
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
        raise BadInput(f"{what}: larger than {size(MAX_BYTES)}", remedy=remedy)
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadInput(
            f"{what}: not UTF-8 text: byte {error.start} is {content[error.start]:#04x}",
            remedy="save it as UTF-8",
        ) from None


def _check_keys(mapping: MappingNode) -> None:
    """Reject duplicate keys, because PyYAML would silently drop the first one."""
    first: dict[str, Node] = {}
    for key, _ in mapping.value:
        if not isinstance(key, ScalarNode):
            continue
        earlier = first.setdefault(key.value, key)
        if earlier is not key:
            lines = sorted({earlier.start_mark.line + 1, key.start_mark.line + 1})
            name = key.value if _PLAIN_KEY.fullmatch(key.value) else "a key"
            where = f"lines {lines[0]} and {lines[1]}" if len(lines) > 1 else f"line {lines[0]}"
            raise ComposerError(None, None, f"{name} appears twice ({where})", key.start_mark)


def _weigh(node: Node, known: dict[int, int]) -> int:
    """Return how many values a node expands to.

    The time is linear in the size of the text, no matter how often aliases repeat.
    """
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
    """Return the position and the reason, without the text itself."""
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    position = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
    why = getattr(error, "problem", None) or getattr(error, "reason", None) or "cannot be read"
    return f"{position}: " + redact(re.sub(r" ?'(?!<)[^']{2,}'", "", str(why)))


def dump(content: Any, **style: Any) -> str:
    """Return plain data as YAML that reads back equal.

    Args:
        style: further arguments of `yaml.dump`.
    """
    text: str = yaml.dump(content, Dumper=_Dumper, sort_keys=False, allow_unicode=True, **style)
    # PyYAML writes line separators other than \n unescaped, but reads them back as \n.
    if any(end in text for end in ("\x85", "\u2028", "\u2029")):
        text = yaml.dump(content, Dumper=_Dumper, sort_keys=False, **style)
    return text


# A run's saved configuration, with the digest of each section in its first line.
#
# A file that was cut short may still be a valid configuration. The sections that it lost would get
# their defaults, and the gate would apply other rules.

_MARK: Final = "# SHA-256 of each section: "
_DIGITS: Final = 12


def saved_text(content: Mapping[str, Any]) -> str:
    """Return a configuration as YAML that shows later changes."""
    digests = (f"{name} {_digest(value)}" for name, value in content.items())
    return f"{_MARK}{', '.join(digests)}\n{dump(content)}"


def _changes(text: str, content: Mapping[str, Any]) -> list[str]:
    """Return the sections that differ from what was saved; none without digests.

    Args:
        content: what the text states.
    """
    first, _, _ = text.partition("\n")
    if not first.startswith(_MARK):
        return []  # people wrote it, or an older version
    pairs = (item.partition(" ") for item in first.removeprefix(_MARK).split(", "))
    before = {name: digest for name, _, digest in pairs}
    now = {name: _digest(value) for name, value in content.items()}
    return [
        name if name in now else f"{name} (missing)"
        for name in {**before, **now}
        if before.get(name) != now.get(name)
    ]


def damage(text: str, content: Mapping[str, Any]) -> str:
    """Return in words how a saved configuration was changed since; "" if it was not."""
    changed = ", ".join(_changes(text, content))
    return f"was edited or cut short after a run saved it: {changed}" if changed else ""


def _digest(value: Any) -> str:
    return value_digest(value)[:_DIGITS]


# Check for values that some readers of a configuration cannot represent.
#
# The readers are YAML, JSON, C, and steadytrain itself.

_LARGEST: Final = 2**63 - 1
_SHOWN: Final = 80


def find_unfit(content: Any, field: str = "", depth: int = 0) -> Iterator[Problem]:
    """Yield a problem for each value in a nested configuration that cannot round-trip."""
    if depth > MAX_DEPTH:
        yield _problem(field, "...", f"nested deeper than {MAX_DEPTH} levels", "nest it less")
    elif isinstance(content, dict):
        for key, value in content.items():
            if not isinstance(key, str):
                yield _problem(field, shown(key), "a key must be text", "put it in quotes")
            elif why := _unfit_text(key):
                yield _problem(field, shown(key), f"a key {why[0]}", why[1])
            else:
                yield from find_unfit(value, f"{field}.{key}" if field else key, depth + 1)
    elif isinstance(content, list):
        for index, value in enumerate(content):
            yield from find_unfit(value, f"{field}.{index}", depth + 1)
    elif why := _unfit(content):
        yield _problem(field, shown(content), *why)


def _unfit(value: object) -> tuple[str, str] | None:
    """Return what is wrong with a single value and the fix, or None."""
    if value is None or isinstance(value, bool):
        return None
    if isinstance(value, str):
        return _unfit_text(value)
    if isinstance(value, int):
        return ("is beyond 64 bits", "give a smaller number") if abs(value) > _LARGEST else None
    if isinstance(value, float):
        finite = math.isfinite(value)
        return None if finite else ("is not a finite number", "give a finite number")
    return f"is a {type(value).__name__}", "give text, a number, a list, or a mapping"


def shown(value: object) -> str:
    """Return a value as an error message shows it, shortened if it is long."""
    try:
        return shortened(repr(value))
    except ValueError:  # more digits than Python converts to text
        return "a number with thousands of digits"


def shortened(text: str) -> str:
    """Shorten text for an error message if it is long."""
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


def _unfit_text(text: str) -> tuple[str, str] | None:
    if "\0" in text:
        return "contains a NUL character", "remove it"
    try:
        text.encode()
    except UnicodeEncodeError:
        return "contains half of a surrogate pair, which is not a character", "remove it"
    return None


def _problem(field: str, value: str, message: str, remedy: str) -> Problem:
    if names_a_secret(field.rpartition(".")[2]):
        value = PLACEHOLDER
    return Problem(shortened(field) or "configuration", redact(value), message, remedy)


def assign(content: dict[str, Any], field: str, value: Any) -> None:
    """Set a field, and create the sections that it needs.

    Raises:
        BadInput: if a part of the name is not a section.
    """
    *sections, last = field.split(".")
    mapping = content
    for section in sections:
        inner = mapping.setdefault(section, {})
        if not isinstance(inner, dict):
            raise BadInput(
                f"override {shown(redact(field))}: {shown(redact(section))} is not a section",
                remedy="`steadytrain schema` lists every field",
            )
        mapping = inner
    mapping[last] = value


def stated_fields(content: Mapping[str, Any], before: str = "") -> frozenset[str]:
    """Return the full names of the fields that plain data state."""
    names: set[str] = set()
    for name, value in content.items():
        full = f"{before}{name}"
        names |= stated_fields(value, f"{full}.") if isinstance(value, dict) and value else {full}
    return frozenset(names)
