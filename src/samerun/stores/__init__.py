"""Where bytes lie: local files, opened read-only and mapped."""
