"""Triton kernels, one a file: the kernel, its launcher, its shapes and what it costs.

Owns nothing that lasts. Imported only by engine.ops.triton, since importing triton takes a while and
decides at that moment, for the whole process, whether kernels are compiled or interpreted
(TRITON_INTERPRET=1, which needs no GPU). A launcher validates nothing: the ops do. What changes from step
to step is no constant and has one alignment: nothing is compiled while tokens flow.
"""

from __future__ import annotations

import os

# Triton warns, onto the dashboard, until somebody says whether a multiply and an add may be one instruction.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
