"""Everything that the screen shows, computed from the event stream. No Textual, no torch."""
