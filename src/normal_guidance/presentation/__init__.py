"""HTML pages, text tables and the style of figures, for any results."""
