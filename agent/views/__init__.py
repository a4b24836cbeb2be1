"""The agent's state in the forms that it serves: documents, events, health checks."""
