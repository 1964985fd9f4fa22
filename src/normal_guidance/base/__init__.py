"""Files, records, tables, processes and errors: what every other room stands on; it knows nothing of scans or models.

in     bytes, rows and paths
out    sealed files, typed records and tables, worker processes, `UserError`
first  errors.py, then files.py
"""
