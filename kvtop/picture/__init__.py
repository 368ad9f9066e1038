"""A screen as a file: text, SVG, PNG."""
