"""Starting ranks: jobs, launchers, schedulers, supervision."""
