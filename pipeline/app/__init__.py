"""Everything that the command line does, as typed Python functions and the class `Experiment`.

A module here may import every package except `cli`, `search`, `growing` and `serving`.
"""
