"""The configuration: options, their values, the file, and the settings that result."""
