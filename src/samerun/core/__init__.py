"""The pure part: no torch, no files, no clock, no environment, no logging. NumPy is allowed."""
