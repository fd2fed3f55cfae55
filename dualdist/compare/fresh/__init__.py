"""Programs that are started by their path, so that nothing is imported before their clock runs."""
