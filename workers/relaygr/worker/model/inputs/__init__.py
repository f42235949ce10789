"""The inputs of the first layer: look-ups in numpy on any thread, embedding on the device (docs/model.md)."""
