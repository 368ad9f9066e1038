"""The panels of the ops view, one a file."""
