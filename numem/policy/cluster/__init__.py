"""Several workers: ranking them for a request, and the exchange between router and worker as pure transitions."""
