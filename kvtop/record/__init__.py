"""Recordings: writing, reading, redacting and verifying them."""
