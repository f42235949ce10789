"""What crosses Kafka: clients, topics, the trigger, the consumer loop, lag and dead letters."""
