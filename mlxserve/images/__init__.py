"""Images that clients send, decoded and identified by content."""
