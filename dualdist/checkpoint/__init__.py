"""Save and load the state of a job, collectively."""
