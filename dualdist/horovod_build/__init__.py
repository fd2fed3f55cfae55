"""`dualdist install-horovod`: patch Horovod's sdist for the installed torch; build, cache, install, test its wheel."""
