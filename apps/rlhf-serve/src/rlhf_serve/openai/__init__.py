"""OpenAI's protocol: request and response bodies, errors, log-probs; knows neither HTTP nor models."""
