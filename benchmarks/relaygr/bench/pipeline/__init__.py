"""What the pipeline itself costs: gateway, trigger, worker, gateway, with a model that computes nothing."""
