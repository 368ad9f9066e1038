"""The model that computes a step with torch: weights, decoder, KV cache, batch, CUDA graphs."""
