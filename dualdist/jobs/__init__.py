"""Jobs as people write them: a YAML file, read and checked."""
