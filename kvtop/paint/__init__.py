"""What is painted with: colours, themes, motion, and the layout of the map."""
