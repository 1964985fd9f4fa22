"""The methods that the field compares with, written from their papers, each in a file of its own.

A file defines the model, its loss if it has one of its own, and `METHOD`, and is called like it.  Nothing else is
needed: the commands, the tables and the tests find it.

All of them work on the frozen embeddings as ABMIL does here: without a layer before attention, without dropout, and
with the same optimiser, grid and selection.  The classifiers are linear, so slices are classified and then pooled,
which equals pooling first and is far cheaper.
"""
