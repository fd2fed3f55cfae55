"""Sample and load data sets on several ranks."""
