"""Every operation of a forward pass, walked backwards: what propagated curvature is made of."""
