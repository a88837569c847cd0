"""From a destination as a value to files on disk: planned, checked, copied, journalled, committed."""
