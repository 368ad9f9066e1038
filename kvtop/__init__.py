"""kvtop: watch the KV blocks of an LLM engine in a terminal. The engine lies in the package `engine`."""

__version__ = "0.1.0"
