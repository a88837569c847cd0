"""Planning: a manifest and a checkpoint's logical state become a plan, which is a value. No I/O."""
