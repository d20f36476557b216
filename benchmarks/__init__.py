"""Programs that measure, and what they share."""
