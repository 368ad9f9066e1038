"""Kernels run by Triton's interpreter. Collected only under TRITON_INTERPRET=1; test_kernels.py does that."""
