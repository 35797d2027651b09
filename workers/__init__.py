"""Code that runs in a worker. Start reading at `loop.run_stage`.

A job (`job.py`) describes one stage completely. This package knows jobs, not graphs of stages, and
never imports `pipeline`.
"""
