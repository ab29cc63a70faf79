"""Many servers behind a router, with KV events and a page store, up to a thousand of them."""
