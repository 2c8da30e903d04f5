"""The durable plane: tiers of Lance volumes, catalog, spool, publication, promotion, restore, recovery."""
