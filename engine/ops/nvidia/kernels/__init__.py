"""Triton kernels, one a file: the kernel, its launcher, its shapes and its cost.

Has no state. Imported only by engine.ops.nvidia, because importing triton is slow. The import also decides for the
whole process whether kernels are compiled or interpreted (TRITON_INTERPRET=1, which needs no GPU). A launcher checks
nothing; the ops do. Invariant: values that change from step to step are not compile-time constants and always have
the same alignment, so nothing is compiled during generation.
"""

from __future__ import annotations

import os

# Without it Triton prints a warning, onto the dashboard: may a multiply and an add become one instruction?
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
