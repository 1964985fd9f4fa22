"""A page on this machine that shows scans with the methods' attention; it reads and never writes."""
