"""Compiled code is kept for later attempts, and never loaded from where others can write."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch._dynamo.exc import BackendCompilerFailed
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from steadytrain.components.train.failures import CompiledCodeDamaged
from steadytrain.components.train.loop.kernels import keep_compiled, without_damaged

from support.disks import small_file_system

CACHE = "TORCHINDUCTOR_CACHE_DIR"
PROGRAM = """
import sys
from pathlib import Path
import torch
import torch._dynamo.utils
from steadytrain.components.train.loop.kernels import compile_layers, keep_compiled
keep_compiled(Path(sys.argv[1]))
module = torch.nn.Linear(4, 4)
compile_layers(module)
module(torch.ones(3, 4)).sum().backward()
print(torch._dynamo.utils.counters["aot_autograd"]["autograd_cache_hit"])
"""


@pytest.mark.long
def test_another_process_finds_what_was_compiled(tmp_path: Path) -> None:
    def hits(temporary: str) -> int:
        """Return the cache hits of a process with an empty temporary folder, as in a new pod."""
        (tmp_path / temporary).mkdir()
        environment = {**os.environ, "TMPDIR": str(tmp_path / temporary)}
        environment.pop(CACHE, None)
        command = [sys.executable, "-c", PROGRAM, str(tmp_path / "compiled")]
        done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
        return int(done.stdout)

    assert hits("first") == 0
    assert hits("second") > 0


def test_user_cache_folder_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE, "/elsewhere")
    keep_compiled(tmp_path / "compiled")
    assert os.environ[CACHE] == "/elsewhere"
    assert not (tmp_path / "compiled").exists()


def test_compiled_code_is_not_loaded_from_a_shared_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CACHE, default_cache_dir())
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o770)
    (tmp_path / "own").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "own")
    for name in ("shared", "link"):
        keep_compiled(tmp_path / name)
        assert os.environ[CACHE] == default_cache_dir()
    keep_compiled(tmp_path / "own")
    assert os.environ[CACHE] == str(tmp_path / "own")


@pytest.mark.parametrize("kind", ["file", "dangling", "missing"])
def test_uncreatable_cache_folder_does_not_fail_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setenv(CACHE, default_cache_dir())
    (tmp_path / "file").touch()
    (tmp_path / "dangling").symlink_to(tmp_path / "nothing")
    keep_compiled(tmp_path / {"missing": "nothing/compiled"}.get(kind, kind))
    assert os.environ[CACHE] == default_cache_dir()


def test_unwritable_cache_folder_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root can write anywhere except on a read-only file system."""
    monkeypatch.setenv(CACHE, default_cache_dir())
    with small_file_system(tmp_path / "compiled", "ro,mode=0700") as folder:
        keep_compiled(folder)
    assert os.environ[CACHE] == default_cache_dir()


@pytest.mark.parametrize(
    ("error", "damaged"),
    [
        (BackendCompilerFailed("inductor", ImportError("file too short"), None), True),
        (BackendCompilerFailed("inductor", OSError(28, "No space left on device"), None), False),
        (ImportError("file too short"), False),
    ],
    ids=["damaged", "full", "other"],
)
def test_damaged_code_is_removed_and_compiled_again(
    tmp_path: Path, error: Exception, damaged: bool
) -> None:
    folder = tmp_path / "compiled"
    folder.mkdir()
    (folder / "code.so").touch()
    found = without_damaged(error, folder)
    assert isinstance(found, CompiledCodeDamaged) is damaged
    assert folder.exists() is not damaged
    assert found is error or "file too short" in str(found)


def test_earlier_compiled_code_is_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "compiled"
    monkeypatch.setenv(CACHE, default_cache_dir())
    assert not keep_compiled(folder)
    (folder / "code.so").touch()
    monkeypatch.setenv(CACHE, default_cache_dir())
    assert keep_compiled(folder)
