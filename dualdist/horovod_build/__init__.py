"""install-horovod: Horovod's sdist, adapted to the installed torch, built, kept, installed and tried."""
