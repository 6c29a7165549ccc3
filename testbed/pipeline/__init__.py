"""A model's stages as processes that pass activations and gradients over TCP.

schedule, job, control, gather and transport know no torch; boundary, stage and host do.
"""
