"""Progress and final tables of a run on the terminal: `console.Console` and `console.summary`."""
