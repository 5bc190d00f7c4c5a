"""Where bytes live during a run: weights in tiers, activations between steps, and how much is alive."""
