"""The HTTP sink: health, preflight, metrics, and the API."""
