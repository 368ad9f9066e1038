"""A process either interprets its kernels or compiles them: without the variable nothing here is collected."""

from __future__ import annotations

import os

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]
