"""How a result looks, whatever it is: text tables, HTML pages, the style of figures.

in     numbers, texts and PNG bytes
out    lines of a table, a page that needs no other file, matplotlib rules
first  html.py
"""
