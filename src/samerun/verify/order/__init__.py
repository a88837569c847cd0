"""Which samples were consumed: once each, in order, on either side of the seam."""
