"""The documentation site: collects the committed pages, writes those that follow from the code, and
builds both with Sphinx. `make docs` runs it; all but `build.py` needs no Sphinx."""
