"""Lets tests, and their worker processes, import the examples as the examples import each other."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
