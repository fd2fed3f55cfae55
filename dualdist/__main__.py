"""`python -m dualdist` is the command `dualdist`."""

from dualdist.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
