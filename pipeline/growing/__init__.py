"""The commands `add` and `remove`: new classes, new images and removals, for runs and models.

Start reading at `add.add` and `remove.remove`.
"""
