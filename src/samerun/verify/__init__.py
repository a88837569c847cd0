"""Whether it is still the same run: `inspection`, `load`, `order` and `updates` compare, and `judge` has the last word.

`state` holds what a checkpoint holds, by value; `evidence` what stages and jobs left behind.
"""
