"""Whether the champion's own content is why it cannot be loaded or scored.

Only that may decide about a candidate. Storage, network, memory and disk may work again a moment
later, and then the same candidate might win.
"""

from __future__ import annotations

import errno
import re
import sqlite3
from collections.abc import Callable
from typing import Final, TypeVar

from steadytrain.components.shared.config.secrets import redact
from steadytrain.components.shared.errors import BadInput, SteadytrainError, with_causes
from steadytrain.components.shared.foreign import ran_out
from steadytrain.components.shared.retry import retry

_Result = TypeVar("_Result")

_CONTENT: Final = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    BadInput,
    EOFError,
    FileNotFoundError,
    IsADirectoryError,
    LookupError,
    NotADirectoryError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What files that are damaged, incomplete or of another architecture make a loader raise."""
_CONTENT_NAMES: Final = {"SafetensorError", "UnpicklingError", "BadZipFile", "StrictDataclassError"}
_ABSENT: Final = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR}
_SERVICES: Final = re.compile(
    r"(aiohttp|azure|boto3|botocore|google|httpcore|httpx|huggingface_hub|requests|s3transfer"
    r"|sqlalchemy|urllib3)\b"
)
"""Packages whose errors are about a server or the network."""
_DEVICE: Final = re.compile(r"AcceleratorError|CUDA error|HIP error|NCCL error|CUDNN_STATUS")
_NOT_THERE: Final = re.compile(r"\b404\b|NoSuchKey|No such file|does not exist|RESOURCE_DOES_NOT")


class Unfit(SteadytrainError):
    """The champion's own content prevents the comparison."""


class ChampionAway(SteadytrainError):
    """The champion cannot be reached or held in memory now. It says nothing about its content."""

    passing = True


def with_champion(number: str, work: Callable[[], _Result]) -> _Result:
    """Do what loads and scores the champion. Retry while something else than its content fails.

    Args:
        number: the champion's version.

    Raises:
        Unfit: its files are damaged, or do not fit together or with the task.
        ChampionAway: storage, the network, memory or a disk still fails after retries.
    """

    def attempt() -> _Result:
        try:
            return work()
        except Exception as error:
            said = redact(str(error).strip().partition("\n")[0]) or type(error).__name__
            what = f"the champion, version {number}, cannot be loaded or scored: {said}"
            if _elsewhere(error):
                raise ChampionAway(
                    what,
                    remedy="this says nothing about the candidate: check the registry's storage, "
                    "the network, memory and disks, then start the evaluate step again",
                ) from error
            if isinstance(error, _CONTENT) or _is_content(error):
                raise Unfit(what) from error
            raise

    return retry(attempt)


def _is_content(error: Exception) -> bool:
    # Transformers raises a plain OSError, without a number, for files that lack something.
    plain = type(error) is OSError and error.errno is None
    return plain or type(error).__name__ in {*_CONTENT_NAMES, "MlflowException"}


def _elsewhere(error: BaseException) -> bool:
    return any(map(_about_the_surroundings, with_causes(error)))


def _about_the_surroundings(error: BaseException) -> bool:
    if isinstance(error, SteadytrainError) and not isinstance(error, BadInput):
        # Storage, tracking, out of memory.
        return True
    if ran_out(error) or isinstance(error, ConnectionError | TimeoutError | sqlite3.Error):
        return True
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno not in _ABSENT
    kind = type(error)
    if kind.__name__ == "MlflowException":
        # A failed download has no code of its own.
        return not _NOT_THERE.search(f"{getattr(error, 'error_code', '')} {error}")
    if _SERVICES.match(kind.__module__):
        return not _NOT_THERE.search(str(error))
    return isinstance(error, RuntimeError) and bool(_DEVICE.search(f"{kind.__name__}: {error}"))
