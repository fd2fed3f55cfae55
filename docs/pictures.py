"""Make the manual's pictures: a comparison on this machine, of which the plots and the report are kept.

    make docs-pictures              # compares for some minutes; then pictures of its output
    make docs-pictures FROM=report  # pictures of the output that is there

The picture of the report needs a browser: apt-get install chromium.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

IMAGES = Path(__file__).parent / "pages" / "images"
COMPARE = shlex.split("compare --model mlp --backends native,mpi --transports shm,gloo,mpi --baselines ddp --rounds 6")
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
WIDTH, HEIGHT = 1100, 1215  # of the report's picture
COLORS = 128  # of a picture, which keeps it below 200 KB


def keep(source: Path, name: str, width: int) -> None:
    """Write a picture, scaled and with few colors, to the manual."""
    with Image.open(source) as image:
        scaled = image.convert("RGB").resize(
            (width, round(image.height * width / image.width)), Image.Resampling.LANCZOS
        )
        scaled.quantize(COLORS).save(IMAGES / f"{name}.png", optimize=True)


def main(arguments: list[str]) -> None:
    """Compare, unless a folder is given, and make the pictures."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(arguments[0]) if arguments else Path(scratch, "report")
        if not arguments:
            subprocess.run([sys.executable, "-m", "dualdist", *COMPARE, "--output", str(folder)], check=True)
        shutil.copy(folder / "steps.svg", IMAGES / "compare-steps.svg")
        browser = next(filter(None, map(shutil.which, BROWSERS)), None)
        if browser is None:
            sys.exit("no browser for the picture of the report: apt-get install chromium")
        shot = Path(scratch, "shot.png")
        options = ["--headless", "--no-sandbox", "--hide-scrollbars", f"--window-size={WIDTH},{HEIGHT}"]
        page = (folder / "report.html").resolve().as_uri()
        subprocess.run([browser, *options, f"--screenshot={shot}", page], check=True, timeout=120)
        keep(shot, "compare-report", 900)


if __name__ == "__main__":
    main(sys.argv[1:])
