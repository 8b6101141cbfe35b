"""Curvature propagated layer by layer: variances alone, mixed with exact columns, or expected matrices (KFRA)."""
