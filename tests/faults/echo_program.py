"""A rank without torch that tells what has arrived: python echo_program.py ARGUMENT..."""

import os
import sys

from harness.jobs import report

from dualdist.environments import detect

HUSH = "hush-hush"  # is in the value of every secret

if __name__ == "__main__":
    seen = {
        "arguments": sys.argv[1:],
        "given": os.environ.get("GIVEN"),
        "named": os.environ.get("NAMED_TOKEN"),
        "folder": os.getcwd(),
        "secrets": sorted(name for name, value in os.environ.items() if HUSH in value),
    }
    report(detect(os.environ).rank, seen)
