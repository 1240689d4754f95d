"""A module and what it uses of this package become one file that runs alone."""

from __future__ import annotations

import subprocess
import sys

import pytest

from steadytrain.components.train.one_file import one_file

HEAD = "from __future__ import annotations\n\n"
BASE = (
    HEAD
    + """
import os.path
from math import pi as ratio

SCALE = 2
\"\"\"What it multiplies.\"\"\"
GIVEN = 0


def unused():
    return os.sep


class Base:
    def area(self, radius: Radius) -> float:
        local = ratio * radius
        return local * radius * SCALE


Radius = float
"""
)
ENTRY = (
    HEAD
    + """
import sys

from PACKAGE.base import GIVEN, Base


def label(unused):
    return unused


@staticmethod
def shown(area): return f"{area:.3f}"


class Disk(Base):
    text = label("disk")


def main():
    sys.stdout.write(f"{Disk.text} {shown(Disk().area(GIVEN))}")
"""
)


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Write modules next to steadytrain's own, and return the name of their package."""
    import steadytrain.components.train as own

    monkeypatch.setattr(own, "__path__", [*own.__path__, str(tmp_path)])
    name = "steadytrain.components.train.written_for_a_test"
    folder = tmp_path / "written_for_a_test"
    folder.mkdir()
    yield name, folder
    sys.modules.pop(name, None)


def write(package, **modules):
    name, folder = package
    (folder / "__init__.py").touch()
    for module, text in modules.items():
        (folder / f"{module}.py").write_text(text.replace("PACKAGE", name))
    return name


def test_file_has_what_is_used_and_runs_alone(package, tmp_path):
    name = write(package, base=BASE, entry=ENTRY)
    text = one_file(
        "main()", {"main": f"{name}.entry"}, 'Says """what"""\nit is.', {"GIVEN": "GIVEN = 1.5"}
    )
    assert text.startswith("\"\"\"Says '''what'''\nit is.\n\"\"\"\n\nfrom __future__")
    assert "import sys\nfrom math import pi as ratio\n\n" in text
    assert 'SCALE = 2\n"""What it multiplies."""\n' in text
    assert "def unused" not in text
    assert "os.path" not in text, "only what is left out uses it"
    assert "written_for_a_test" not in text
    file = tmp_path / "alone.py"
    file.write_text(text)
    done = subprocess.run([sys.executable, "-I", file], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "disk 14.137"), done.stderr


def test_two_things_of_one_name_are_refused(package):
    entry = HEAD + "from PACKAGE.base import Base\n\nSCALE = 3\nONE = Base()\n"
    name = write(package, base=BASE, entry=entry)
    with pytest.raises(ValueError, match=r"SCALE is in .*entry and in .*base"):
        one_file("ONE", {"ONE": f"{name}.entry", "SCALE": f"{name}.entry"}, "", {})
