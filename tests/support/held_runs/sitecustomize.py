"""With this folder on PYTHONPATH, the ranks of a command wait as `support.held` says."""

from __future__ import annotations

import os

from support.held import hold_this_process

hold_this_process(os.environ)
