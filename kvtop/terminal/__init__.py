"""Between Textual and the terminal: its private names, what is read, and what is written."""
