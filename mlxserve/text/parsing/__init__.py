"""What an answer says beside text: thinking and calls of tools, told apart as the text streams."""
