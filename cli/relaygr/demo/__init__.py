"""`relaygr demo`: the whole relay as separate processes on one broker, with the relay on and with the relay off."""
