"""What people look at: tables, plots and one page, all read from the store and never from a live
run."""
