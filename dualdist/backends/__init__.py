"""One file a backend; which one is used is decided in dualdist.session."""
