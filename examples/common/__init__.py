"""What several examples need: data sets, flags, the pace and the summary of a training, and its curves."""
