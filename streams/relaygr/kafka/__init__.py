"""Kafka: clients and their settings, topic creation and checks, security, dead letters."""
