"""What all widgets are made of: painted lines, panels, tables, graphs."""
