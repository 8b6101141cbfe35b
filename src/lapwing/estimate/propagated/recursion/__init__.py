"""The parts of `kfra`: what is gathered in a pass over the data, and the walk back on expected matrices."""
