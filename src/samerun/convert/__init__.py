"""A checkpoint moved into another format or layout: planned, copied, read back, proved, and only then visible."""
