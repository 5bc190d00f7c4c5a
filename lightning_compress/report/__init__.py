"""What a compression cost and saved: tables, JSON, a self-contained page."""
