"""A PRM over HTTP: `prm serve`. See docs/serve.md."""
