"""Kafka: clients with every setting in one place, topics and their checks, security, dead letters."""
