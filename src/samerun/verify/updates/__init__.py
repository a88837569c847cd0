"""Whether a candidate's forward pass and updates are the control's, within bands sealed before it ran."""
