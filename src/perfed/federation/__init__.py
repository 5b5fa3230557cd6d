"""A real federation: the same methods between machines that do not share data, on Flower.

Needs the extra `perfed[flower]`.
"""
