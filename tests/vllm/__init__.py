"""Compares our pool and scheduler with vLLM's after every step, in an environment of its own (`make test-vllm`)."""

import os

# vllm reads it when it is imported for the first time.
os.environ.setdefault("VLLM_LOGGING_LEVEL", "CRITICAL")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "0")
