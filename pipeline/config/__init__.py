"""Settings, YAML files and the few things that every package needs; imports no other package.

A module here must not import another package of `pipeline`.
"""
