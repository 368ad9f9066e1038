"""Checks that need a GPU: `make gpu-check`."""
