"""Curvature of a layer as a Kronecker product: structure, factors, eigenbasis, and corrected eigenvalues (EKFAC)."""
