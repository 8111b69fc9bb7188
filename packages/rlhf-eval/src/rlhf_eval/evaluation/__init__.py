"""One model on prompts: what it writes, what that is worth, how far it is from its reference.

May import the statistics, the pages and the scores of this package, and, where a function needs them, the
packages for models; imports them when it is called, so that a report without models needs none of them.
"""
