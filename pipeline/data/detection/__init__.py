"""Detect the data sets at a path: class folders, tables, archives or data sets of a library.

Start with `detect` in `detect.py`. It asks `folders.py`, `tables.py`, `archives.py` (Parquet),
`shards.py` (tars) or `libraries.py` for a possible `source` of a card, `data_set.py` reads that
source with the code of ingest, and `doubts.py` checks that names do not contradict it.
"""
