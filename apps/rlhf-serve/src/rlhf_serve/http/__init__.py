"""The HTTP server: routes, middleware, API keys, limits, streams, telemetry."""
