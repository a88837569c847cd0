"""The migration manifest: what is moved, from where to where, and what may change. Only `read` touches files."""
