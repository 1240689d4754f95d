"""Author and run pipelines. Importing this package never imports torch."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from steadytrain.pipelines.in_process import run
    from steadytrain.pipelines.server.submission import submit

__all__ = ["run", "submit"]


def __getattr__(name: str) -> Any:
    # Imported late, because every invocation of the command imports this package.
    if name == "run":
        from steadytrain.pipelines.in_process import run

        return run
    if name == "submit":
        from steadytrain.pipelines.server.submission import submit

        return submit
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
