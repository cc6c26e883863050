"""Bundled recipes: one YAML file per published checkpoint, and the JSON Schema they follow. Data only."""
