"""Requests and their branches: the rows, how events change them, what branches write and share."""
