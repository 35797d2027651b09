"""Cards, source formats, and ingest: raw data to shards.

A card (`cards.py`) describes a data set. `formats/` has a module for each format of raw data, and
`ingest.py` converts the data. For data without a card, `detection/` finds the layout, and
`starter.py` writes the card.
"""
