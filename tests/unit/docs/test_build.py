"""The documentation builds strictly, and its pages load nothing from other hosts."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from support.snippets import PAGES, README, ROOT, address_of


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.slow
def test_every_page_is_built(site):
    from reference.pages import PAGES as GENERATED

    own = {address_of(page) for page in PAGES if page != README}
    for address in own | set(GENERATED):
        assert (site / address).with_suffix(".html").is_file(), address


@pytest.mark.slow
def test_nothing_is_loaded_from_other_hosts(site):
    for page in site.rglob("*.html"):
        loaded = re.findall(
            r"<(?:script|img|link)[^>]+(?:src|href)=\"(https?:[^\"]+)", page.read_text()
        )
        assert not loaded, page.name


@pytest.mark.slow
def test_no_source_of_the_generators_is_published(site):
    assert not [*site.rglob("*.py"), *site.rglob("__pycache__")]
