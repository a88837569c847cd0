"""Makes `python -m samerun.cli` the same as `samerun`."""

from samerun.cli import main

if __name__ == "__main__":
    main()
