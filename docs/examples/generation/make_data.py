"""Write the documentation strings of Python's standard library: `python make_data.py FOLDER`."""

import ast
import json
import sys
import sysconfig
from pathlib import Path


def main(folder: Path) -> None:
    """Write the records to a folder."""
    library = Path(sysconfig.get_path("stdlib"))
    with (folder / "docstrings.jsonl").open("w", encoding="utf-8") as out:
        for path in sorted(library.rglob("*.py")):
            name = path.relative_to(library)
            if {"test", "tests", "idle_test", "site-packages", "lib2to3"} & set(name.parts):
                continue
            try:
                tree = ast.parse(path.read_text(encoding="utf-8"))
            except (SyntaxError, UnicodeDecodeError):
                continue
            for node in ast.walk(tree):
                if not isinstance(node, ast.FunctionDef | ast.ClassDef):
                    continue
                if text := ast.get_docstring(node):
                    kind = "class" if isinstance(node, ast.ClassDef) else "def"
                    record = {"text": f'{kind} {node.name}:\n"""{text}"""', "file": str(name)}
                    out.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
