"""Model files: where they come from, and what stands in them."""
