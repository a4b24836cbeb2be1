"""What the agent watches: each source puts facts into the inbox, and knows no other source or sink."""
