"""Settings, YAML files and the few things that every package needs.

A module here may import `workers`, but no other package of `pipeline`. Start with `load` in
`settings.py`, which reads a config.
"""
