"""What the agent knows in the forms in which it is told: documents, events, health checks."""
