"""Health: what facts make of each GPU and device, and what is to be done about it."""
