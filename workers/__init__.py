"""What runs on accelerators: devices, the model, the prefix cache, the scheduler and the worker process."""
