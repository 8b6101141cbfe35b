"""The named posteriors: over all weights, the last layer, a sub-network, and in function space."""
