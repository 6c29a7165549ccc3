"""A model's stages as processes that pass activations and gradients over TCP.

Torch is known to boundary, passes, stage, optimise and run alone; the others serve replays and the controller too.
"""
