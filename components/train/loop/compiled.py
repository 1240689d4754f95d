"""Compile the model's layers with torch.compile, in place, so their tensors keep their names.

Compiling layer by layer lets equal layers share one compilation. What cannot be compiled (attention
by document, the fused loss) stays out of the graph.
"""

from __future__ import annotations

import logging
import os
import shutil
import stat
from pathlib import Path
from typing import Any, Final

from steadytrain.components.train.errors import CompiledCodeDamaged

_VARIABLE: Final = "TORCHINDUCTOR_CACHE_DIR"
_log = logging.getLogger(__name__)


def compile_layers(model: Any) -> None:
    """Compile each layer that Transformers lists, or the whole model if it lists none.

    Compile for any number of tokens from the first step on. Code specialized for the first step's
    token count would make a resumed run, which starts with a different batch, compute different
    bits.
    """
    kinds = set(getattr(model, "_no_split_modules", None) or ())
    layers = [item for item in model.modules() if type(item).__name__ in kinds]
    for layer in layers or [model]:
        layer.compile(dynamic=True)


def keep_compiled(folder: Path) -> bool:
    """Keep compiled code in a folder, where later attempts find it, even from other pods.

    If the user has set TORCHINDUCTOR_CACHE_DIR, it stays as it is.

    Returns:
        Whether the folder has code of an earlier attempt, which will be used.
    """
    # Import late: few runs need it. On import, PyTorch sets the variable to its own default.
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    usual = default_cache_dir()
    if os.environ.get(_VARIABLE, usual) != usual:
        return False
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        _log.warning("%s; compiled code is not kept", error)
        return False
    if found.st_uid != os.getuid() or found.st_mode & 0o022 or not stat.S_ISDIR(found.st_mode):
        # Code found in this folder would be executed.
        _log.warning("%s: other users can write there; compiled code is not kept", folder)
        return False
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        _log.warning("%s: it cannot be written; compiled code is not kept", folder)
        return False
    os.environ[_VARIABLE] = str(folder)
    return any(folder.iterdir())


def without_damaged(error: BaseException, folder: Path) -> BaseException:
    """Remove the folder after an error in torch.compile, and return an error that says so.

    A file truncated by a power loss or a full disk would end every later attempt otherwise. Other
    errors are returned unchanged, and so are errors for lack of memory or disk space.
    """
    import torch

    compiling = type(error).__module__.startswith(("torch._dynamo", "torch._inductor"))
    cause = getattr(error, "inner_exception", error)
    if not compiling or isinstance(cause, (OSError, MemoryError, torch.OutOfMemoryError)):
        return error
    shutil.rmtree(folder, ignore_errors=True)
    return CompiledCodeDamaged(folder, cause)
