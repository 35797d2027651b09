"""Everything that the command line does, as typed Python functions and the class `Experiment`.

Start with `prepare` and `execute` in `runs.py`, which turn a config into a finished run.
A module here may import every package except `cli`, `search`, `growing` and `serving`.
"""
