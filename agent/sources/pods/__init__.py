"""The pods source: which pods there are, and which devices they hold."""
