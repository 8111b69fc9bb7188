"""The merge methods, a family in each module: function, parameters and what fits it to a tensor.

A method is added by a module here; `METHODS`, and `PARAMETERS` of its own, make it known to the command
line, to configs and to the plan. Torch is imported where a method is fitted: configs are read without it.
"""
