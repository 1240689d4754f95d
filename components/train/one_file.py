"""A module and what it uses of this package, as one file of Python that does not need the package.

Sources are read and never imported, so the packages that the module itself needs may be missing.
"""

from __future__ import annotations

import ast
import re
import symtable
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import Final

_OURS: Final = __name__.partition(".")[0]
_WIDTH: Final = 100
_BLOCKS: Final = ("def ", "class ", "@")
_MAIN: Final = 'if __name__ == "__main__":\n    '
_FUTURE: Final = "from __future__ import annotations"


def one_file(call: str, names: Mapping[str, str], docstring: str, values: Mapping[str, str]) -> str:
    """Return the source of a program that needs nothing of this package.

    Args:
        call: what the program does.
        names: the module of each name in the call.
        docstring: of the program.
        values: sources that replace definitions, by name.

    Raises:
        ValueError: two modules define different things with the same name.
    """
    file = _File(values)
    for name, module in names.items():
        file.add(module, name)
    quoted = docstring.replace("\\", "\\\\").replace('"""', "'''")
    # A docstring of one line ends on that line.
    end = '\n"""' if "\n" in quoted else '"""'
    head = [f'"""{quoted}{end}', _FUTURE, *file.import_lines()]
    defined = _spaced(text for module in names.values() for text in file.definitions(module))
    first = "\n" if defined.startswith(_BLOCKS) else ""
    return "\n\n".join((*head, f"{first}{defined}\n", f"{_MAIN}{call}")) + "\n"


@dataclass
class _Source:
    """The source of a module of this package."""

    module: str

    @cached_property
    def text(self) -> str:
        spec = find_spec(self.module)
        assert spec is not None
        assert spec.origin is not None
        return Path(spec.origin).read_text(encoding="utf-8")

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @cached_property
    def imports(self) -> dict[str, tuple[str, str]]:
        """The module of each imported name, and its name there, "" for the module itself."""
        result: dict[str, tuple[str, str]] = {}
        for node in self.tree.body:
            if isinstance(node, ast.Import):
                result |= {
                    item.asname or item.name.partition(".")[0]: (item.name, "")
                    for item in node.names
                }
            elif isinstance(node, ast.ImportFrom):
                names = {item.asname or item.name: item.name for item in node.names}
                result |= {own: (str(node.module), name) for own, name in names.items()}
        return result

    @cached_property
    def definitions(self) -> dict[str, str]:
        """The source of each function, class and value, by name."""
        result, last = dict[str, str](), ""
        for node in self.tree.body:
            names = [*_names(node)]
            result |= dict.fromkeys(names, self._lines(node))
            if last and _is_text(node):
                # Its statement about the value before it.
                result[last] += f"\n{self._lines(node)}"
            last = names[-1] if names else ""
        return result

    def _lines(self, node: ast.stmt) -> str:
        decorators = getattr(node, "decorator_list", ())
        first = min([node.lineno, *(item.lineno for item in decorators)])
        lines = self.text.splitlines()[first - 1 : node.end_lineno]
        return "\n".join(re.sub(r"  # type: ignore\[.*", "", line) for line in lines)


@dataclass
class _File:
    """What a file needs.

    needed: the names of each module.
    imports: modules of other packages and names in them, "" for the module itself; and the name
        that each gets.
    """

    values: Mapping[str, str]
    sources: dict[str, _Source] = field(default_factory=dict)
    needed: dict[str, set[str]] = field(default_factory=dict)
    imports: set[tuple[str, str, str]] = field(default_factory=set)
    owners: dict[str, str] = field(default_factory=dict)

    def source(self, module: str) -> _Source:
        return self.sources.setdefault(module, _Source(module))

    def add(self, module: str, name: str) -> None:
        """Add a definition of a module, and all that it uses."""
        source, needed = self.source(module), self.needed.setdefault(module, set())
        if name not in source.definitions:
            self.add(*source.imports[name])
            return
        if self.owners.setdefault(name, module) != module:
            raise ValueError(f"{name} is in {module} and in {self.owners[name]}")
        if name in needed:
            return
        needed.add(name)
        self.follow(module, self._text(source, name))

    def follow(self, module: str, text: str) -> None:
        """Add all that a part of a module uses."""
        source = self.source(module)
        for used in sorted(_used(text)):
            if used in source.definitions:
                self.add(module, used)
            elif used in source.imports:
                where, original = source.imports[used]
                if where.partition(".")[0] == _OURS:
                    self.add(where, original)
                else:
                    self.imports.add((where, original, used))

    def import_lines(self) -> Iterator[str]:
        """Yield a block of imports of the standard library, and one of other packages."""
        for own in (True, False):
            kept = [
                item
                for item in self.imports
                if (item[0].partition(".")[0] in sys.stdlib_module_names) == own
            ]
            whole = sorted(
                (
                    where if where.partition(".")[0] == used else f"{where} as {used}"
                    for where, name, used in kept
                    if not name
                ),
                key=str.lower,
            )
            lines = [f"import {item}" for item in whole]
            parts = sorted(
                (item for item in kept if item[1]), key=lambda item: (item[0].lower(), item)
            )
            for where, items in groupby(parts, key=lambda item: item[0]):
                names = sorted(
                    (name if name == used else f"{name} as {used}" for _, name, used in items),
                    key=_isort,
                )
                line = f"from {where} import {', '.join(names)}"
                if len(line) > _WIDTH:
                    line = "\n".join((f"from {where} import (", *(f"    {n}," for n in names), ")"))
                lines.append(line)
            if lines:
                yield "\n".join(lines)

    def definitions(self, module: str) -> Iterator[str]:
        """Yield the sources of what is needed of the modules that a module imports, and of it."""
        for where, _ in self.source(module).imports.values():
            if where in self.needed:
                yield from self.definitions(where)
        source, needed = self.source(module), self.needed.pop(module, ())
        for name in source.definitions:
            if name in needed:
                yield self._text(source, name)

    def _text(self, source: _Source, name: str) -> str:
        return self.values.get(name, source.definitions[name])


def _names(node: ast.stmt) -> Iterator[str]:
    """Yield what a statement defines."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.Assign):
        yield from (target.id for target in node.targets if isinstance(target, ast.Name))
    elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        yield node.target.id


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _used(text: str) -> set[str]:
    """Return the names of a module that a definition reads, in annotations too."""
    found, tables = set[str](), [symtable.symtable(text, "", "exec")]
    while tables:
        table = tables.pop()
        top = table.get_type() == "module"
        found |= {
            symbol.get_name()
            for symbol in table.get_symbols()
            if symbol.is_global() or (top and symbol.is_referenced())
        }
        tables += table.get_children()
    return found


def _isort(name: str) -> tuple[bool, bool, str]:
    """Return the key by which names are sorted: constants, classes, all others."""
    return not name.isupper(), not name[:1].isupper(), name


def _spaced(texts: Iterator[str]) -> str:
    """Return definitions as one text, with two empty lines around functions and classes."""
    result, before = "", ""
    for text in texts:
        values = not text.startswith(_BLOCKS) and not before.startswith(_BLOCKS)
        result += f"{text}" if not result else f"\n{text}" if values else f"\n\n\n{text}"
        before = text
    return result
