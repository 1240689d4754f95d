"""A run of marked tests imports only the files that may have some."""

from __future__ import annotations

import pytest

from support.selection import check_markers, may_have, required


@pytest.mark.parametrize(
    ("expression", "markers"),
    [
        ("slow and not long and not gpu", {"slow"}),
        ("not slow and not long", set()),
        ("long", {"long"}),
        ("slow or long", set()),
        ("(slow or long) and gpu", {"gpu"}),
        ("soak and core", {"soak"}),
        ("", set()),
    ],
)
def test_markers_without_which_nothing_is_selected(expression, markers):
    assert required(expression) == markers


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("@pytest.mark.slow\n", {"slow"}),
        ("HealthCheck.too_slow, as_long_as\n", set()),
        ("from support.selected import each\n", {"long"}),
    ],
)
def test_file_has_the_markers_that_it_or_its_conftest_names(tmp_path, text, found):
    path = tmp_path / "test_one.py"
    path.write_text(text)
    assert {marker for marker in ("slow", "long", "gpu") if may_have(path, marker)} == found
    other = tmp_path / "b" / "test_one.py"
    other.parent.mkdir()
    other.write_text("")
    (tmp_path / "b" / "conftest.py").write_text(text)
    assert {marker for marker in ("slow", "long", "gpu") if may_have(other, marker)} == found


def test_marker_from_elsewhere_is_an_error(request, tmp_path):
    path = tmp_path / "test_one.py"
    path.write_text("")
    item = pytest.Function.from_parent(request.node.parent, name="one", callobj=lambda: None)
    item.path = path
    check_markers([item])
    item.add_marker("gpu")
    with pytest.raises(pytest.UsageError, match="one is gpu, but its file doesn't say so"):
        check_markers([item])
