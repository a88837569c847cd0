"""The browser pages that are more than a report: served on this machine only, or opened from disk."""
