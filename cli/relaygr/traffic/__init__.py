"""Open-loop traffic: whose impressions come when, sent through the client, and what came back."""
