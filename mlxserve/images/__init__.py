"""Images that clients send: decoded, and known by their content."""
