"""With this folder on PYTHONPATH, the ranks of a command wait as `support.pause` says."""

from __future__ import annotations

import os

from support.pause import pause_this_process

pause_this_process(os.environ)
