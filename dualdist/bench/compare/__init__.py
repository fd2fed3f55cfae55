"""`dualdist compare`: which launcher, backend and transport trains fastest on this machine."""
