"""Prints the table of attacks."""

import attacks.archives
import attacks.directories
import attacks.pickles
import attacks.weights  # noqa: F401
from attacks.catalogue import markdown

print(markdown(), end="")
