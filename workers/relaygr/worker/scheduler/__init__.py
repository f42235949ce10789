"""What the device does next: pure decisions over numbers, without Kafka, torch or a clock of its own."""
