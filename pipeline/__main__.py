"""`python -m pipeline`."""

from pipeline.cli import leave, main

leave(main())
