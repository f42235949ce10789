"""The cost of the pipeline itself: gateway, trigger, worker, gateway, with a model that computes nothing."""
