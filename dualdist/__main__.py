"""Run the command line as `python -m dualdist`."""

from dualdist.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
