"""Ops on NVIDIA GPUs: Triton kernels, their launchers, and the attention libraries."""
