"""Benchmarks that compare implementations and print ratios: `python -m benchmarks.NAME`."""
