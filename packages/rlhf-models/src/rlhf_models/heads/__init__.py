"""Models with scalar heads: reward, judge, value, process reward, ensembles."""
