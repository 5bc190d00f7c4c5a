"""The command `lightning-compress`: its options, the plans and estimates it makes, and what it runs."""
