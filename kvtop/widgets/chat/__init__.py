"""The chat, the prompt, and the look-up of a prompt in the cache."""
