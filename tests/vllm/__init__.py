"""Our pool and policy against vLLM's own, step by step; runs in a venv of its own (`make test-vllm`)."""

import os

# Read when vllm is imported, whoever does so first.
os.environ.setdefault("VLLM_LOGGING_LEVEL", "CRITICAL")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "0")
