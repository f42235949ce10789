"""Pre-infer workers above their capacity: with forwarding, and with queues."""
