"""One step of the engine: who computes what, and what became of it. No threads, no tensors."""
