"""What a move leaves behind it: results of stages, and what the traces of its jobs recorded."""
