"""Start ranks: jobs, launchers, schedulers, supervision."""
