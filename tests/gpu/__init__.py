"""What only a GPU can show: `make gpu-check`."""
