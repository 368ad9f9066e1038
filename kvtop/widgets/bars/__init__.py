"""The one-line widgets: header, step line, hint, caption."""
