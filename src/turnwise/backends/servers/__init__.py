"""What backends that sample on HTTP servers share: starting a server, talking to it, and a fleet of several."""
