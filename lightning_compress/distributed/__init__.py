"""Ranks: what they say to one another (`collective`, where to start; `message`), who does what (`share`), and what they
find on disk (`folder`). `buffers` and `bars`: what they must, and need not, all have."""
