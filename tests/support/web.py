"""A web application behind the product's own server, in this process."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from steadytrain.components.shared import web_server


@contextlib.contextmanager
def served(app: Any, **options: Any) -> Iterator[tuple[int, web_server.Server]]:
    """Yield the port of a server, and the server."""
    config = web_server.config_of(app, **{"lifespan": "off", **options})
    server, listener = web_server.Server(config, lambda: None), web_server.listen("127.0.0.1", 0)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    yield listener.getsockname()[1], server
    server.should_exit = True
    thread.join()
