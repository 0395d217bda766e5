"""Wire formats: encoders of changes and snapshot rows in several envelopes."""
