"""The map of the block pool, and one block in detail."""
