"""Name maps that come with samerun, by file name: `samerun diff --map NAME`."""
