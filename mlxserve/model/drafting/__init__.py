"""Drafters: guess the next tokens of answers on the device, before the model verifies them in the same step."""
