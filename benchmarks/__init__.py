"""Side-by-side measurements that print ratios: `python -m benchmarks.NAME`."""
