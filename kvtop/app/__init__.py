"""The application: screens, keys, and everything that Textual needs."""
