"""The optimization lab: equal current values hide different continuations."""
