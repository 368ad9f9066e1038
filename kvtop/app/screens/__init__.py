"""Screens, each beside its stylesheet."""
