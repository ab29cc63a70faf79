"""Chat: the one producer of text, between the engine and the library, the terminal and HTTP."""
