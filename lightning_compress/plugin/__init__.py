"""The Lightning side: strategy, callback and loop."""
