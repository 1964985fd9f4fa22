"""A page on this machine that shows scans beside what methods attend to; it reads and never writes."""
