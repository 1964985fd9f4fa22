"""The mathematics, in torch alone: scans as bags of slices, models, guidance, regularizers, measures.

in     bags of slice features and their labels (`bags.py`)
out    logits, attention, losses (`prediction.py`), and the measures of them (`metrics.py`)
first  methods.py, the table of methods; guidance.py for the paper
"""
