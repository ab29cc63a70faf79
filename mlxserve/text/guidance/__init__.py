"""What an answer has to look like, token by token: grammars, and the guide that applies them."""
