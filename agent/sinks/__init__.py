"""What the agent tells and does: each sink reads the newest snapshot or owns an effect."""
