"""Widgets, one a file: each paints a part of `DashboardState` and changes nothing."""
