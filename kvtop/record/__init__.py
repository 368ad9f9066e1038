"""Recordings: written, read, redacted, and proved."""
