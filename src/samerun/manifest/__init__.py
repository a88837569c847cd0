"""The migration manifest: what is moved, from where to where, and what may change. Data and checks, no I/O but `read`."""
