"""Makes `python -m samerun` the same as `samerun`."""

from samerun.cli import main

if __name__ == "__main__":
    main()
