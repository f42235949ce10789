"""`relaygr demo`: the whole relay as separate processes on a local broker, relay on beside relay off."""
