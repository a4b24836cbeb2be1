"""Usage: which processes hold each GPU, read off kernel events and scans; changed in place, one owner."""
