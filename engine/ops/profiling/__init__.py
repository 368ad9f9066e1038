"""Where the time of one step goes, kernel by kernel, and how far that is from the roofline."""
