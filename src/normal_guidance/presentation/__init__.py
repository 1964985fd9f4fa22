"""Pages, tables and the style of figures: the forms in which results are shown, whatever the results are."""
