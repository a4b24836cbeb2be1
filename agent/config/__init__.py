"""The configuration: options, their values, the file, and the settings they make together."""
