"""The demonstration: a small real training run, moved onto another layout and judged, with faults to inject."""
