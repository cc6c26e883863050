"""Bodies of requests: closed schemas, also what the OpenAPI document shows."""
