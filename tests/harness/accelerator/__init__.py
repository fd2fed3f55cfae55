"""A simulated accelerator, by which tests run on CPUs what is for GPUs."""
