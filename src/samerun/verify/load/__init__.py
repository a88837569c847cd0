"""Whether a job holds what the checkpoint holds, once it has loaded it."""
