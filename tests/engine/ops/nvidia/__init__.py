"""The Triton kernels without a GPU: interpreted in one process, compiled in another for each architecture."""
