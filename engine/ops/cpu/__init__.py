"""Ops on a CPU: packed and quantised linears, and the C kernels."""
